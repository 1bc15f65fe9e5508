"""The course of a process that trains one model with others, and does what the first of them has decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from vivace.live.course import Course, Wishes
from vivace.live.pairs import Pause
from vivace.plan import Plan

if TYPE_CHECKING:
    from vivace.live.loop import Loop


class Followed(Course):
    """What a process that does not lead wishes: what the first one says. `host` as for `Ranks.follow`."""

    def __init__(self, loop: Loop, root: nn.Module, rest: str, host: Callable[[Plan], str]) -> None:
        super().__init__(loop, root, rest)
        self._host = host

    def wishes(self) -> Wishes:
        """Pauses under the plan whose turn it is."""
        ranks, plan = self.loop.ranks, self.reference
        assert ranks is not None
        while True:
            yield Pause(plan, ranks.next_step - self.loop.num_steps)
            said = ranks.follow(self.loop.num_steps, self._host)
            if not isinstance(said, Plan):
                self.loop.left_alone = said or ""
                return
            plan = plan if said == plan else said  # one that acts goes on

    def _record(self, kind: str, document: dict[str, Any]) -> None:
        """The first process keeps the ledger."""
