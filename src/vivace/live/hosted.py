"""A plan that acts on a loop which Vivace does not run: on the call of its root and on its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vivace.live.kept import Weights
from vivace.machine import Machine
from vivace.mechanisms.strided import mend_strided
from vivace.plan import Plan
from vivace.technique import Build, Numerics, Seam, Stage
from vivace.technique.registry import acting
from vivace.torch_internals.modules import step_with_hooks


class HostedBuild(Build):
    """A workbench with the seams alone that a script's loop has; what needs another is refused by name."""

    def __init__(self, has: frozenset[Seam], **objects: Any) -> None:
        super().__init__(**objects)
        self.has = has

    def _may_touch(self, seam: Seam) -> None:
        self.require(seam in self.has, f"in a script's own loop it cannot act on '{seam}'")

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have it called at the end; but what was compiled stays, as plans take turns."""
        if callback is not torch.compiler.reset:
            super().on_close(callback)


class Hosted:
    """A plan in action until `close`. Raises Refused where it cannot act, and leaves nothing changed then.

    To techniques the root's call is an own step of one module, or of its `parts`, by their names in it, where
    it is one of its methods that calls them; those of the optimizer's stage are given the optimizer. Where
    `root` is what the optimizer updates, no call can be reached.

    Only one that `may_compile` does so; others run what was compiled, and as written what was not, such as
    batches of another shape.
    """

    def __init__(
        self,
        plan: Plan,
        root: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: Machine,
        *,
        parts: Sequence[str] = ("",),
        may_compile: bool = False,
    ) -> None:
        self.plan = plan
        self._runs_compiled = plan.compiles and not may_compile
        device = next(p.device for p in root.parameters())
        objects = {"machine": machine, "device": device}
        has = frozenset[Seam]() if isinstance(root, Weights) else frozenset({Seam.STEP})
        there = dict(root.named_modules(remove_duplicate=False)) if has else {"": root}
        called = [there[name] for name in parts if name in there] or [root]  # others were taken away since
        self.of_call = HostedBuild(has, models=called, optimizer=None, own_step=True, **objects)
        self.of_update = HostedBuild(
            frozenset(), models=[root], optimizer=optimizer, own_step=False, **objects
        )
        try:
            if acts_on_calls(plan) and has:
                mend_strided(self.of_call)
            for technique in plan.techniques:
                build = self.of_update if technique.card.stage == Stage.OPTIMIZER else self.of_call
                with acting(technique):
                    build.begin(technique)
                    technique.apply(build)
        except BaseException:
            self.close()
            raise
        self._call = self.of_call.compose({Seam.STEP: _call}).step

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the root as the plan says; `function` is how it is called without."""
        if not self._runs_compiled:
            return self._call((function, arguments, keywords))
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._call((function, arguments, keywords))

    @property
    def unit_roundoff(self) -> float:
        """The coarsest that its techniques declare."""
        return max(self.of_call.unit_roundoff, self.of_update.unit_roundoff)

    def close(self) -> None:
        """Undo everything, last change first."""
        try:
            self.of_update.close()
        finally:
            self.of_call.close()


def of_process_alone(plan: Plan) -> bool:
    """Does a plan act on no object of the script's, and change none of its numbers?"""
    return all(one.card.stage == Stage.PROCESS for one in plan.techniques) and plan.promise == Numerics.EXACT


def acts_on_calls(plan: Plan) -> bool:
    """Does a plan act on the root's calls, and not on the update alone, or on the process without changing
    a number?
    """
    exact = [
        one
        for one in plan.techniques
        if one.card.stage == Stage.PROCESS and one.card.numerics == Numerics.EXACT
    ]
    return any(one.card.stage != Stage.OPTIMIZER and one not in exact for one in plan.techniques)


def _call(batch: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    function, arguments, keywords = batch
    return function(*arguments, **keywords)


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """An update without the hooks of every optimizer, and without what wraps this one's step. Its own hooks
    run: a copy has none of the script's, but those of the plan that acts on it.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, when the first of its class was built
        step = step.__wrapped__
    step_with_hooks(optimizer, step)
