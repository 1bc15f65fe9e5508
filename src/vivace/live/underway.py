"""A plan that is found while a run trains, on its own steps: `vivace train JOB --tune`.

The engine is that of `vivace run`: every step trains, candidates are proven on copies of a step before they
act, and timed in turn with the run as it is. Once the search has ended the run goes over to the plan, as if
it had been given, and its steps are watched as those of any run.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.files import finite, own_folder, replace_text
from vivace.job import Batch
from vivace.live.ending import document_of
from vivace.live.errand import DOCUMENT, OWN, PAGE, PLAN, Errand
from vivace.live.loop import Loop
from vivace.live.page import page
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.training.checkpoints import Position
from vivace.training.progress import Progress
from vivace.training.watch import Better, Unwatched, Watch

FOLDER = "tune"  # in the run folder


class Underway:
    """Leads a run's steps until a plan is found or nothing helps; then `watch` looks at them.

    A run that already has a plan is not led, only watched. Made before the job is opened.

    Args:
        folder: the run folder.
        job: its reference, for the command to come.
        watch: who looks at the steps under the plan.
    """

    def __init__(self, folder: Path, job: str, watch: Watch) -> None:
        self.folder, self.job, self.watch = folder / FOLDER, job or "JOB", watch
        self.led: Loop | None = None
        self.session: Session | None = None
        self.progress: Progress | None = None
        self.total_steps: int | None = None
        self.document: dict[str, Any] = {}  # of the search, once it has ended
        self.step_of_plan: int | None = None  # the first one under the plan
        self.plan_seconds = 0.0  # of steps from there on
        self._records: list[dict[str, Any]] = []
        self._own_seconds = self._saved_before = 0.0
        self._has_ended = False

    @property
    def seconds(self) -> float:
        """What leading and watching have taken of the run so far."""
        led = self.led.spending.waited if self.led is not None else 0.0
        return self._own_seconds + led + self.watch.seconds

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        """The run begins."""
        self.progress, self.total_steps = progress, total_steps
        self.watch.begin(progress, total_steps)

    def step(self, session: Session, position: Position, batch: Batch, take: Callable[[Any], Any]) -> Any:
        """The step, under the plan whose turn it is. Raises Better where the run is to go over to a plan."""
        if self.session is None:
            self._meet(session)
        elif session is not self.session:
            self._changed(session, position)
        if self.led is not None and self._is_over(self.led):
            self._conclude(position)
        if self.led is not None or not session.plan.techniques:
            return take(batch)
        began = time.perf_counter()
        try:
            return self.watch.step(session, position, batch, take)
        finally:
            self.plan_seconds += time.perf_counter() - began

    def resumes(self, session: Session, position: Position, held: object, exact: bool) -> None:
        """A run that has a plan goes on from a checkpoint."""
        self.watch.resumes(session, position, held, exact)

    def rests(self, session: Session, position: Position, *, ends: bool) -> None:
        """A step is over."""
        self.watch.rests(session, position, ends=ends)

    def wakes(self, session: Session, position: Position) -> None:
        """Raises Broken where what the session holds has changed since."""
        self.watch.wakes(session, position)

    def holds(self, session: Session, position: Position) -> dict[str, Any]:
        """What to write of the session into a manifest."""
        return self.watch.holds(session, position)

    def aside(self) -> Plan | None:
        """Leave the run's objects as they are without a plan; the next step takes the plan up again."""
        conductor = self.led.conductor if self.led is not None else None
        if conductor is None:
            return None
        conductor.pause()
        return conductor.course.plan if conductor.course.plan.techniques else None

    def end(self) -> None:
        """The run is over."""
        self._stop()
        self.watch.end()

    def to_dict(self) -> dict[str, Any] | None:
        """What watching saw under the plan, also one that the run has left; None where there was none."""
        acts = self.session is not None and self.session.plan.techniques
        return self.watch.to_dict() if acts or self.step_of_plan is not None else None

    def found(self) -> dict[str, Any]:
        """What the search came to; empty where the run had its plan from the beginning."""
        self._stop()
        if not self.document:
            return {}
        if self.step_of_plan is not None and self.document["clock"] == "wall":
            low = self.document["ratio"]["low"]
            self.document["saved_seconds"] = self._saved_before + self.plan_seconds * (low - 1.0)
        self._write()
        kept = ("outcome", "reason", "plan", "ratio", "saved_seconds", "own_seconds", "page")
        found = {key: self.document[key] for key in kept if key in self.document}
        found["ended"] = self._has_ended
        return found | ({"step": self.step_of_plan} if self.step_of_plan is not None else {})

    def _meet(self, session: Session) -> None:
        """The first step: begin to lead, where the run has no plan."""
        self.session = session
        if session.plan.techniques:
            return
        own_folder(self.folder)
        for name in OWN:
            (self.folder / name).unlink(missing_ok=True)
        errand = Errand(str(self.folder), str(self.folder), f"vivace train {self.job} --tune")
        self.led = Loop(errand, tell=self._told, total_steps=self.total_steps)
        self.led.install()

    def _changed(self, session: Session, position: Position) -> None:
        """The run goes on in another session: under the plan that was found, or another one by itself."""
        self.session = session
        if self.led is not None:
            reason = "the run went on under another plan"
            if self.led.conductor is not None:
                self.led.conductor.drop(reason)
            self.led.leave_alone(reason)
            self._stop()
        if self.step_of_plan is not None and not session.plan.techniques:  # a notice has said why
            self.document |= {
                "outcome": "taken_back",
                "plan": {},
                "plan_steps": position.step + 1 - self.step_of_plan,
            }

    def _is_over(self, led: Loop) -> bool:
        return led.guard.off or (led.conductor is not None and led.conductor.course.is_settled)

    def _conclude(self, position: Position) -> None:
        """The search has ended. Raises Better where it has found a plan."""
        self._stop()
        self._has_ended = True
        assert self.progress is not None
        if self.document["outcome"] != "faster":
            self.progress.notice(f"this run goes on as it is: {self.document['reason']}")
            self._own_seconds += self.watch.seconds
            self.watch = Unwatched()  # which holds no second model
            return
        plan, ratio = Plan.from_dict(self.document["plan"]), self.document["ratio"]
        self.step_of_plan = position.step + 1
        interval = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        raise Better(f"from here on {ratio['estimate']:.2f}x as fast ({interval}), by {plan}", plan)

    def _stop(self) -> None:
        """Lead no more."""
        led, self.led = self.led, None
        if led is not None:
            led.finish()
            self._own_seconds += led.spending.waited

    def _told(self, led: Loop) -> None:
        """What came of leading the loop, which ends now."""
        self.document = document_of(led)
        self._saved_before = self.document.get("saved_seconds") or 0.0
        if self.document["outcome"] == "faster":
            plan = shlex.quote(str(self.folder / PLAN))
            self.document["next"] = f"vivace train {shlex.quote(self.job)} --plan {plan}"
            self.document["in_your_code"] = f"vivace export --plan {plan}"
        self._records = led.conductor.course.ledger.read() if led.conductor is not None else []
        self._write()

    def _write(self) -> None:
        replace_text(self.folder / DOCUMENT, json.dumps(finite(self.document)))
        if self.document["tried"]:
            command = f"vivace train {self.job} --tune"
            replace_text(self.folder / PAGE, page(self.document, self._records, command))
