"""The workbench: the objects and seams of a session, as the techniques of its plan edit them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from vivace.errors import Refused
from vivace.job import Batch
from vivace.machine import Machine
from vivace.technique.contract import Numerics, Stage, Technique
from vivace.technique.facts import Facts
from vivace.technique.step import Seam, Step
from vivace.tensors.settings import hold

if TYPE_CHECKING:
    import torch

    from vivace.tensors.shards import Shards

_UNCUT = "your own step function cannot be cut into forward, backward and update"
OWN_STEP_SEAMS = frozenset({Seam.BATCHES, Seam.VALIDATION, Seam.PLACE, Seam.STEP})


class Stateful(Protocol):
    """What can tell its state and be brought back to it, such as a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now, by name."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Become what a state tells."""


class Build:
    """The workbench on which a session is built: the objects, the seams, and what must be undone on close.

    Where the person brings an own step function (`own_step`), `models` holds the modules that it trains, and
    only the seams `batches`, `place` and `step` may be touched.
    """

    seams: Step  # once all techniques have been applied: for those that call other seams

    def __init__(
        self,
        *,
        models: list[torch.nn.Module],
        optimizer: torch.optim.Optimizer | None,
        machine: Machine,
        device: torch.device,
        own_step: bool,
    ) -> None:
        self.models = models
        self.optimizer = optimizer
        self.machine = machine
        self.device = device
        self.own_step = own_step
        self.numerics = Numerics.EXACT
        self.unit_roundoff = 0.0
        self.declared: list[str] = []
        self.notes: dict[str, Any] = {}  # a technique's own evidence, for its `confirm`
        self.facts = Facts()
        self.loss: Callable[[Any, Any], Any] | None = None  # the person's own, as is the next
        self.on_gradients: Callable[[Any], Any] | None = None
        self.close_callbacks: list[Callable[[], None]] = []
        self.forget_callbacks: list[Callable[[], None]] = []
        self.kept: dict[str, Stateful] = {}
        self.optimizers: list[torch.optim.Optimizer] = []  # of an own step too
        self.parallel: list[Any] = []  # what exchanges gradients between ranks: DistributedDataParallel
        # What that exchanges, where no other weights may be trained: see `trained_in`.
        self.exchanged: list[int] = []
        self.shards: Shards | None = None  # where each rank holds a part of the weights
        self._wrappers: dict[Seam, list[Callable[..., Any]]] = {}
        self._replacements: dict[Seam, Callable[..., Any]] = {}
        self._current = ""
        self._replaced_by: dict[Seam, str] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The single trained module; refused where the person's own step trains several."""
        self.require(not self.own_step, _UNCUT)
        return self.models[0]

    def require(self, condition: object, reason: str) -> None:
        """Raise `Refused` with `reason` unless `condition` holds."""
        if not condition:
            raise Refused(reason)

    def wrap(self, seam: Seam, function: Callable[..., Any]) -> None:
        """Call ``function(next, *arguments)`` in place of the seam; `next` is what it would have been."""
        self._may_touch(seam)
        called = self._or_left_alone if seam == Seam.VALIDATION else self._called_by
        self._wrappers.setdefault(seam, []).append(partial(called, self._current, function))

    def replace(self, seam: Seam, function: Callable[..., Any]) -> None:
        """Make `function` the innermost body of the seam. Only one technique of a plan can."""
        self._may_touch(seam)
        other = self._replaced_by.get(seam)
        self.require(other is None, f"'{other}' already replaces the seam '{seam}'")
        self._replacements[seam] = partial(self._called_by, self._current, function)
        self._replaced_by[seam] = self._current

    def declare(self, numerics: Numerics, reason: str) -> None:
        """Raise what the plan promises on this very job, for example because the model has BatchNorm."""
        if numerics > self.numerics:
            self.numerics = numerics
        self.declared.append(f"{self._current}: {reason}")

    def set_flag(self, owner: object, name: str, value: object) -> None:
        """Set a process-wide attribute, and set it back on close, in whatever order sessions close."""
        read, write = partial(getattr, owner, name), partial(setattr, owner, name)
        self.on_close(hold((id(owner), name), read, write, value))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Undo something when the session closes; callbacks run last in, first out."""
        self.close_callbacks.append(callback)

    def close(self) -> None:
        """Undo everything, last change first, whatever fails on the way; raises the last failure."""
        callbacks = self.close_callbacks
        try:
            while callbacks:
                callbacks.pop()()
        finally:
            if callbacks:
                self.close()

    def on_forget(self, callback: Callable[[], None]) -> None:
        """Drop what was recorded of the person's Python, such as a captured graph, when that has changed."""
        self.forget_callbacks.append(callback)

    def keep(self, stateful: Stateful) -> None:
        """Store an object with `state_dict` and `load_state_dict` in checkpoints, by technique."""
        self.kept[self._current] = stateful

    def begin(self, technique: Technique) -> None:
        """Enter a technique: its card raises the promise, its name stands in refusals."""
        self._current = technique.name
        card = technique.card
        where = self.device.type
        acting = " and ".join(card.devices)
        self.require(where in card.devices, f"it acts on {acting}, and this job runs on {where}")
        outside = card.cuts_batches or card.saves_memory == "states"  # of the model's forward
        if not outside and card.stage not in (Stage.PROCESS, Stage.DATA, Stage.OPTIMIZER):
            from vivace.tensors.modules import is_copied_to_devices

            self.require(
                not any(map(is_copied_to_devices, self.models)),
                "the model is wrapped in nn.DataParallel, whose copies on the other GPUs it does not reach: "
                "take that off, and train on all GPUs with ddp",
            )
        self.numerics = max(self.numerics, card.numerics)
        self.unit_roundoff = max(self.unit_roundoff, card.unit_roundoff)

    def compose(self, defaults: dict[Seam, Callable[..., Any]]) -> Step:
        """The step: of every seam the innermost body, within what techniques wrapped around it."""
        functions = {}
        for seam, default in defaults.items():
            function = self._replacements.get(seam, default)
            for wrapper in self._wrappers.get(seam, []):
                function = partial(wrapper, function)
            functions[seam] = function
        self.seams = Step(functions)
        return self.seams

    def _called_by(self, technique: str, function: Callable[..., Any], *arguments: object) -> Any:
        before, self._current = self._current, technique  # what it declares now has its name
        try:
            return function(*arguments)
        except Refused as refused:
            raise refused.by(technique) from None
        finally:
            self._current = before

    def _or_left_alone(
        self,
        technique: str,
        function: Callable[..., Any],
        following: Callable[..., Any],
        loader: Iterable[Batch],
    ) -> Any:
        try:
            return function(following, loader)
        except Refused as refused:  # the plan is for the training data: these are read as ever
            self.facts.validation_left_alone = {
                **(self.facts.validation_left_alone or {}),
                technique: str(refused),
            }
            return following(loader)

    def _may_touch(self, seam: Seam) -> None:
        self.require(not self.own_step or seam in OWN_STEP_SEAMS, _UNCUT)
