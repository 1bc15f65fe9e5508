"""What watching has found of a run, in all processes that trained it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from vivace import words
from vivace.watching.findings import STEP_LIMIT, Finding
from vivace.watching.schedule import Schedule


@dataclasses.dataclass
class Tally:
    """Steps that were watched, the worst of them, and those that broke; how often what a session holds
    between two steps was compared.

    `last_kept`: the last watched step that was the same. `seconds` of watching, `first_seconds` of these for
    the first step of each process, and `run_seconds` of the run are those of so many `processes`.
    """

    steps: int = 0
    worst: float = 0.0  # in envelopes
    worst_figure: str = ""
    worst_step: int = 0
    last_kept: int | None = None
    last_step: int = 0
    off: int = 0  # steps beyond the limit
    broken_steps: list[int] = dataclasses.field(default_factory=list)
    between_steps: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    run_seconds: float = 0.0
    processes: int = 0

    @classmethod
    def of(cls, held: object) -> Self:
        """What a checkpoint's manifest holds of it; an empty one where that is nothing."""
        found = held.get("watched") if isinstance(held, dict) else None
        names = {field.name for field in dataclasses.fields(cls)}
        tally = cls(**{key: value for key, value in (found or {}).items() if key in names})
        if tally.worst is None:  # as JSON has no infinity
            tally.worst = math.inf
        return tally

    def add(self, finding: Finding, step: int) -> None:
        """One more watched step."""
        self.steps, self.last_step = self.steps + 1, step
        if finding.score >= self.worst:
            self.worst, self.worst_figure, self.worst_step = finding.score, finding.figure, step
        if finding.kept:
            self.last_kept = step
        else:
            self.off += 1

    def with_process(self, schedule: Schedule) -> Tally:
        """The same with what watching and the run have taken in this process."""
        return dataclasses.replace(
            self,
            seconds=self.seconds + schedule.spent,
            first_seconds=self.first_seconds + schedule.first_part * schedule.spent,
            run_seconds=self.run_seconds + schedule.run_seconds,
            processes=self.processes + 1,
        )

    @property
    def share(self) -> float:
        """What watching has taken of the run's time."""
        return self.seconds / max(1e-9, self.run_seconds)

    @property
    def is_empty(self) -> bool:
        """Was no step watched?"""
        return not (self.steps or self.broken_steps)

    @property
    def kept(self) -> bool | None:
        """Was every watched step the same? None where none was watched, or the last one was off and no other
        came that could confirm it.
        """
        if self.broken_steps:
            return False
        return True if self.steps and self.last_kept == self.last_step else None

    def to_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return dataclasses.asdict(self) | {"worst": self.worst if math.isfinite(self.worst) else None}

    def sentence(self, allowed: float, why_no_more: str) -> str:
        """What was seen, for a person; `allowed`: the share that watching may take."""
        cost = words.percent(self.share)
        if self.share > allowed:  # a short run
            part = self.first_seconds / self.seconds if self.seconds else 1.0
            first = "the first step" if self.processes == 1 else "first steps"
            cost += f", {'all' if part > 0.99 else words.percent(part)} of that for {first}"
        if self.broken_steps:
            listed = ", ".join(map(str, self.broken_steps[:3]))
            more = f" and {len(self.broken_steps) - 3} more" if len(self.broken_steps) > 3 else ""
            found = f"not the same model at {listed}{more}"
        elif self.kept is None:
            off = f"step {self.last_step} was off, and no step after it was watched that could confirm it"
            found = f"not decided: {off}; worst {self.worst:.1f} of {STEP_LIMIT:.0f}"
        else:
            found = f"same model; worst {self.worst:.1f} of {STEP_LIMIT:.0f}"
            found += f", as {self.off} of them were off" if self.off else ""
        ended = f"; then no more, because {why_no_more}" if why_no_more else ""
        return f"watched {words.count(self.steps, 'step')}: {found}; watching cost {cost}{ended}"
