"""The clock of a training loop: exclusive seconds by phase, cut into steps. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("data", "place", "forward", "backward", "update", "communication", "idle")

# What the loop's own code between two phases was, by the phase that follows it.
_BETWEEN = {"backward": "forward", "update": "update"}
UPDATES_APART = 16  # since the last batch was fetched: what was fetched is not what feeds the loop


@dataclasses.dataclass
class Step:
    """Seconds by phase of one step; `interrupted` where something else happened in it, such as validation.

    `elements` are those of all tensors of its batches, `sources` name the loaders' iterators that gave them;
    `retains` says whether its last backward pass kept the graph.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    wall_seconds: float = 0.0
    samples: int = 0
    elements: int = 0
    fetches: int = 0
    sources: set[int] = dataclasses.field(default_factory=set)
    backwards: int = 0
    updates: int = 0
    interrupted: bool = False
    validates: bool = False
    without_gradients: bool = False  # a batch was fetched where gradients are off
    retains: bool = False
    starting_seconds: float = 0.0  # of `data`: until loaders that begin again have given their first batch
    not_finite: bool = False  # one of its losses, where losses were examined


class Clock:
    """Phases nest: an optimizer whose step runs a closure, as LBFGS and Lightning do, is charged for what
    comes after the closure's backward pass.

    A step ends where the next batch is fetched after an update; in a loop that no DataLoader feeds, though
    one may serve its validation, after the update of the optimizer that stepped first. Code between the
    phases is `forward` before a backward pass, `update` before an update (unscaling, clipping), and `idle`
    elsewhere (logging, Python).

    Where no backward pass is ever seen, as gradients come in another way, it is `forward` before an update.

    Where the weights are updated `by_hand`, nothing shows the update: what follows a backward pass is
    `update`, until the next batch is fetched or gradients are cleared, and the backward pass ends the step.
    """

    def __init__(self, on_step: Callable[[Step], None], now: Callable[[], float] = time.perf_counter) -> None:
        self.on_step, self.now = on_step, now
        self.step = Step()
        self.primary: int | None = None
        self.loop_fetches = False
        self.by_hand = False
        self.unanswered = 0  # backward passes since the last update
        self._apart, self._alone = 0, False  # updates since a batch for training came; does none come?
        self._validates_next = False
        self._stack: list[str] = []
        self._since = self._step_began = now()
        self._undecided = 0.0
        self._went_back = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`."""
        self.push(name)
        try:
            yield
        finally:
            self.pop()

    def push(self, name: str, *, decides: bool = True) -> None:
        """Enter a phase; one that does not decide leaves open what the code before it was."""
        self._went_back |= name == "backward"
        if not self._stack:
            self._settle(name if decides else "place")
        else:
            closure = self._stack[-1] == "update" and (name == "backward" or not decides)
            self._charge("forward" if closure else self._stack[-1])
        self._stack.append(name)

    def pop(self) -> None:
        """Leave the innermost phase, and charge it with the time since the last change."""
        if self._stack:
            self._charge(self._stack.pop())

    @property
    def inside(self) -> str | None:
        """The innermost phase, or None in the loop's own code."""
        return self._stack[-1] if self._stack else None

    def fetch(self, *, training: bool = True) -> None:
        """A batch is about to be fetched. Ends the step where one was made; `training` is False where
        gradients are off.
        """
        self._stack.clear()
        if training:
            self._alone = self._apart >= UPDATES_APART or (self._alone and not self._apart)
            self.loop_fetches, self._apart = not self._alone, 0
        if self._is_complete():
            self._settle("update" if self.by_hand else "data")
            self._finish()
        if not training:
            self.step.interrupted = self.step.validates = self.step.without_gradients = True

    def fetched(self, samples: int, elements: int = 0, source: int = 0) -> None:
        """A batch of so many samples has come from this iterator."""
        self.step.fetches += 1
        self.step.sources.add(source)
        self.step.samples += samples
        self.step.elements += elements

    def went_backward(self, *, retains: bool = False) -> None:
        """A backward pass has ended, and its graph stays or goes."""
        self.step.backwards += 1
        self.step.retains = retains
        self.unanswered += 1
        if self.by_hand:
            self._go_apart()

    def returned(self) -> None:
        """The loop goes on after a backward pass."""
        if self.by_hand and not self.loop_fetches:
            self._finish()

    def evaluates(self) -> None:
        """A module is put into evaluation mode; after an update, that is the next step's validation."""
        if self._is_complete():
            self._validates_next = True
        else:
            self.step.validates = True

    def cleared(self) -> None:
        """A module's gradients are about to be cleared: an update by hand is over."""
        if self.by_hand and not self._stack:
            self._settle("update")

    def updated(self, optimizer: int) -> None:
        """An optimizer, named by its id, has stepped."""
        self.primary = self.primary or optimizer
        self.by_hand, self.unanswered = False, 0
        self.step.updates += 1
        if optimizer == self.primary:
            self._go_apart()
        if not self.loop_fetches and optimizer == self.primary:
            self._charge("update")
            self._stack.clear()
            self._settle("data")
            self._finish()

    def replayed(self, optimizer: int) -> None:
        """A whole step has run as one; its parts cannot be told apart, and all of it is `forward`."""
        now = self.now()
        self.step.seconds["forward"] += self._undecided + now - self._since
        self._undecided, self._since = 0.0, now
        self.step.backwards += 1
        self.updated(optimizer)

    def restart(self) -> None:
        """Forget the time since the last step: something of our own took it."""
        self.step = Step()
        self._stack.clear()
        self._since = self._step_began = self.now()
        self._undecided = 0.0

    def _finish(self) -> None:
        step, now = self.step, self.now()
        step.wall_seconds = now - self._step_began
        self.step, self._step_began = Step(validates=self._validates_next), now
        self._validates_next = False
        self.on_step(step)
        own = self.now() - now  # what watching takes is no part of the loop
        if self._step_began == now:
            self._step_began, self._since = now + own, self._since + own

    def _go_apart(self) -> None:
        """One more update without a batch; after many the loop has another source than a DataLoader."""
        self._apart += 1
        if self._apart >= UPDATES_APART:
            self.loop_fetches, self._alone = False, True

    def _is_complete(self) -> bool:
        return bool(self.step.updates or (self.by_hand and self.step.backwards))

    def _settle(self, following: str) -> None:
        """Charge the loop's own code since the last phase; before placing it is not yet known what it was."""
        now = self.now()
        self._undecided += now - self._since
        self._since = now
        if following not in ("place", "communication"):
            between = _BETWEEN.get(following, "idle")
            self.step.seconds["forward" if between == "update" and not self._went_back else between] += (
                self._undecided
            )
            self._undecided = 0.0

    def _charge(self, phase: str) -> None:
        now = self.now()
        self.step.seconds[phase] += now - self._since
        self._since = now
