"""Who may stand around the steps of a run and look at them; `vivace.watching` and `vivace.live` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vivace.job import Batch
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.training.checkpoints import Position
from vivace.training.progress import Progress


class Watch(Protocol):
    """Stands around every step of a run, and changes no number of it."""

    @property
    def seconds(self) -> float:
        """What it has taken of the run so far."""

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        """The run begins, with so many steps in this process where that is known."""

    def step(self, session: Session, position: Position, batch: Batch, take: Callable[[Any], Any]) -> Any:
        """What ``take(batch)``, the run's next step, returns. Raises Broken where it must not stand."""

    def resumes(self, session: Session, position: Position, held: object, exact: bool) -> None:
        """The run begins where a checkpoint stands, in whose manifest `holds` once left `held`; `exact`: and
        goes on as it would have done, bit for bit.

        Raises Broken where the session does not hold it; then the checkpoint is to be loaded anew.
        """

    def rests(self, session: Session, position: Position, *, ends: bool) -> None:
        """A step is over with its schedule, and nothing may change the session before the next one.

        `ends`: more than the next batch may follow, such as an epoch's end or an evaluation.
        """

    def wakes(self, session: Session, position: Position) -> None:
        """Raises Broken where the plan has changed the session since `rests`; it is put back then."""

    def holds(self, session: Session, position: Position) -> dict[str, Any]:
        """What to write of the session into the manifest of a checkpoint; empty where nothing is known."""

    def aside(self) -> Plan | None:
        """Take everything of its own out of the run's objects, which are about to be read or opened anew.

        Returns the plan under which a resumed run should go on, where that is not the session's.
        """

    def end(self) -> None:
        """The run is over, whatever ended it."""

    def to_dict(self) -> dict[str, Any] | None:
        """What it saw, for the run's record; None where it had nothing to look at."""

    def found(self) -> dict[str, Any]:
        """What it found for the run to gain, for the run's record; empty where it did not search."""


class Broken(Exception):
    """A step, or what follows it, broke the plan's promise, and the session is again as it was before that.

    The message says how. `plan` is the one under which to take the step again; None: the run stops.
    `facts` are for the checkpoint of the state before the step.
    """

    def __init__(self, text: str, plan: Plan | None, facts: dict[str, Any]) -> None:
        super().__init__(text)
        self.plan, self.facts = plan, facts


class Better(Exception):
    """A faster plan was proven, under which the run goes on; no step was taken. The message says which."""

    def __init__(self, text: str, plan: Plan) -> None:
        super().__init__(text)
        self.plan = plan


class Unwatched:
    """The watch of a run that nobody looks at: every step is taken as it is."""

    seconds = 0.0

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}  # of who watched the run before

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        """Nothing: there is no one to be told."""

    def step(self, session: Session, position: Position, batch: Batch, take: Callable[[Any], Any]) -> Any:
        """What ``take(batch)`` returns."""
        return take(batch)

    def resumes(self, session: Session, position: Position, held: object, exact: bool) -> None:
        """Keep what was seen before; all is taken as it is."""
        self.held = held if isinstance(held, dict) else {}

    def rests(self, session: Session, position: Position, *, ends: bool) -> None:
        """Nothing is noted."""

    def wakes(self, session: Session, position: Position) -> None:
        """Nothing was noted."""

    def holds(self, session: Session, position: Position) -> dict[str, Any]:
        """What was seen before; since then nothing was looked at."""
        return self.held

    def aside(self) -> None:
        """None: nothing of its own is in the run's objects."""

    def end(self) -> None:
        """Nothing: it holds nothing."""

    def to_dict(self) -> None:
        """None: no step was looked at."""

    def found(self) -> dict[str, Any]:
        """Empty: no faster plan was sought."""
        return {}
