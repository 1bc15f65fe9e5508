"""The parent's side: forms in processes of their own, timed in turn with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vivace.compressing.result import Beside, Status, Tried
from vivace.errors import ChildFailed, JobError, Refused, TimedOut, Unsteady, VivaceError
from vivace.ledger import Ratio
from vivace.measuring.paired import BLOCK_SECONDS, Comparison, Timed, across, compare
from vivace.measuring.statistics import LAST
from vivace.processes.launch import Child, Source
from vivace.serving.calls import outputs_file, read_arrays
from vivace.serving.envelope import Check
from vivace.serving.envelope import compare as compare_outputs
from vivace.serving.files import digest, parts
from vivace.serving.forms import BY_NAME, EXTRA, REFERENCE, Form, versions_of
from vivace.serving.maker import PROOF_SAMPLES
from vivace.serving.margin import Change
from vivace.serving.use import astray
from vivace.words import duration, number, ratio, size

JUDGE = "vivace.serving.judge:Judge"
WORKER = "vivace.compressing.worker:Worker"
TIMEOUT = 1200.0
PATIENCE_SECONDS = 60.0  # before a form counts as hanging, however little of the budget is left
LOOK_SECONDS, TIMED_SECONDS, CONFIRMED_SECONDS = 3.0, 6.0, 8.0
WARM_SECONDS = 0.5
INPUTS, FEWEST_INPUTS = 16, 4  # different batches that are timed in turn; the fewer where lengths differ
ENVELOPE_SECONDS, FEWEST_SAMPLES = 1.0, 16  # of the model as it is; its shadows take ten times as long
TOLERANCE = 0.03  # of a ratio: how far its interval may reach
LOOK_TOLERANCE = 0.06  # after a short look: the form that is chosen is measured again


class Server(Timed):
    """A child process that serves one form."""

    def __init__(self, bench: Bench, form: Form) -> None:
        super().__init__(bench.worker(form), bench.timeout)
        self.form, self.calls_a_step = form, 1

    def open(self, folder: Path, batch: int, inputs: int) -> float:
        """Be ready to be timed; the seconds that opening and the first call took."""
        opened = self.ask("open", form=self.form.name, folder=str(folder), batch=batch, inputs=inputs)
        self.calls_a_step = opened["calls_a_step"]
        self.warm(WARM_SECONDS, self.timeout)
        return float(opened["seconds"]) + self.warmup_seconds

    def effect(self) -> dict[str, Any]:
        """What really ran in which numbers, as `Tried` has it."""
        ran = self.ask("effect")
        return {**ran, "stayed": tuple(ran["stayed"])}


class Bench:
    """Measures and judges forms of one trained model.

    Args:
        run: the run folder's absolute path.
        folder: an empty folder for calls and outputs.
        files: the folder of the forms' files. What lies there of a form is taken as it is.

    `further` holds jobs of models that are trained further, by their forms' prefix, and the run whose weights
    are meant; with no run, those that they begin with. A form may take until `deadline` (of
    `time.monotonic`), and `PATIENCE_SECONDS` at least.
    """

    def __init__(self, source: Source, run: str, folder: Path, files: Path, log: Path, batch: int) -> None:
        self.source, self.run, self.folder, self.files, self.log = source, run, folder, files, log
        self.further = dict[str, tuple[Source, str]]()
        self.deadline = math.inf
        self.batch, self.threads, self.margin = batch, 1, 0.0
        self.inputs = INPUTS
        self.judge = self._new_judge()
        self.facts: dict[str, Any] = {}
        self._envelopes: dict[str, list[float]] = {}
        self._reference: Server | None = None

    def begin(self) -> dict[str, Any]:
        """Record the calls and what the model returns, and open the reference."""
        self.facts = self.judge.ask("record", TIMEOUT)
        self.facts["unused"] = self.judge.ask("unused", TIMEOUT)
        self.threads = self.facts["threads"]
        self.renew()
        return self.facts

    @property
    def timeout(self) -> float:
        """Seconds that a process may take to answer."""
        return min(TIMEOUT, max(PATIENCE_SECONDS, self.deadline - time.monotonic()))

    def renew(self) -> None:
        """A fresh process for the reference: an interruption may have left an answer of the old one."""
        if self._reference is not None:
            self._reference.close()
        self._reference = reference = Server(self, BY_NAME[REFERENCE])
        reference.open(self.files, self.batch, self.inputs)
        fewer = max(FEWEST_INPUTS, round(BLOCK_SECONDS / reference.step_seconds * reference.calls_a_step))
        if fewer < reference.calls_a_step / 1.5:  # a call with each length takes too long for one block
            self.inputs = fewer
            self.renew()
        else:
            _time_once(reference)

    def _revive(self) -> None:
        """A fresh process for each that has died, as of lack of memory: without it no form can be judged."""
        assert self._reference is not None
        if not self._reference.child.alive:
            self.renew()
        if not self.judge.alive:
            self.judge.close()
            self.judge = self._new_judge()
            self.judge.ask("record", TIMEOUT)

    def _new_judge(self) -> Child:
        return Child(JUDGE, self.source, {"run": self.run, "folder": str(self.folder)}, log=self.log)

    def reference(self) -> Tried:
        """What is known of the model as it is, once others have been timed against it."""
        assert self._reference is not None
        if not self._reference.child.alive:
            self.renew()
        times = self._reference.ask("latencies")
        return outcome_of(
            BY_NAME[REFERENCE],
            "kept",
            ratio=Ratio(1.0, 1.0, 1.0),
            p50=times["p50"],
            p99=times["p99"],
            bytes=self._reference.ask("bytes"),
            peak_bytes=self._reference.ask("peak"),
            **self._reference.effect(),
        )

    def attempt(self, form: Form, *, by_size: bool, best: Tried | None = None, brief: bool = False) -> Tried:
        """Make, time and judge a form; whatever keeps it from that is the answer.

        One that is shown to be slower than the `best` is not judged further. `brief`: a short look is enough
        where that is shown by it, or its interval is narrow.
        """
        if form.missing():
            lacking = " and ".join(form.missing())
            verb = "are" if len(form.missing()) > 1 else "is"
            return outcome_of(form, "missing", f"{lacking} {verb} not installed: {EXTRA}")
        begin = time.monotonic()
        try:
            self._revive()
            written = self._written(form)
            with self._served(form) as server:
                made_seconds = time.monotonic() - begin
                found = self._judged(form, server, by_size, best, brief, made_seconds, written)
        except TimedOut as error:
            late = time.monotonic() > self.deadline
            reason = "the budget ended while it was made" if late else str(error)
            self.forget(form)
            found = outcome_of(form, "untried" if late else "failed", reason)
        except (Refused, ChildFailed, JobError) as error:
            self.forget(form)
            status: Status = "failed" if isinstance(error, ChildFailed) else "refused"
            found = outcome_of(form, status, str(error), made_seconds=time.monotonic() - begin)
        return dataclasses.replace(found, seconds=time.monotonic() - begin)

    def confirmed(self, form: Form, first: Ratio) -> Ratio:
        """The ratio of a form with that of fresh processes for it and for the reference."""
        with self._served(BY_NAME[REFERENCE]) as reference, self._served(form) as server:
            second = compare(reference, server, seconds=CONFIRMED_SECONDS)
        return across([Comparison(first, ()), second])

    def beside(self, forms: Sequence[Form], batch: int) -> list[Beside]:
        """The model as it is, and each form in turn with it, in calls of so many samples."""
        own = BY_NAME[REFERENCE]
        try:
            with self._served(own, batch) as reference:
                _time_once(reference)
                found = [self._beside(form, batch, reference) for form in forms]
                times = reference.ask("latencies")
                return [Beside(own.name, own.does, batch, "", Ratio(1.0, 1.0, 1.0), **times), *found]
        except VivaceError as error:
            return [Beside(own.name, own.does, batch, str(error))]

    def _beside(self, form: Form, batch: int, reference: Server) -> Beside:
        limit = self.timeout
        try:
            with self._served(form, batch) as server:
                timed = compare(reference, server, seconds=TIMED_SECONDS, tolerance=TOLERANCE)
                return Beside(form.name, form.does, batch, "", timed.ratio, **server.ask("latencies"))
        except VivaceError as error:
            reason = f"not ready within {duration(limit)}" if isinstance(error, TimedOut) else str(error)
            return Beside(form.name, form.does, batch, reason)

    def glance(self, form: Form) -> tuple[Ratio, int]:
        """A form's speed and bytes, without a word on its outputs. Raises Unsteady, ChildFailed, Refused."""
        assert self._reference is not None
        written = self._written(form)
        with self._served(form) as server:
            timed = compare(self._reference, server, seconds=TIMED_SECONDS, tolerance=TOLERANCE)
            return timed.ratio, written or server.ask("bytes")

    def forget(self, form: Form) -> None:
        """Remove a form's file, if there is one: it may be half written, or of other weights."""
        if not form.in_process:
            for part in parts(self.files / form.file):
                part.unlink()

    def forget_further(self, prefix: str) -> None:
        """Remove the files of all forms of that prefix, and the one that others are made from: they are of
        other weights.
        """
        for path in self.files.glob(f"{prefix}*"):
            path.unlink()

    def write(self, form: Form) -> dict[str, Any]:
        """Make the file of a form, in a process of its own."""
        with self.worker(form) as child:
            made: dict[str, Any] = child.ask("write", self.timeout, form=form.name, folder=str(self.files))
        return made

    def worker(self, form: Form) -> Child:
        """A process that makes or serves a form."""
        source, run = self.further[form.further] if form.further else (self.source, self.run)
        own = {"run": run, "folder": str(self.folder), "threads": self.threads}
        return Child(WORKER, source, own, log=self.log)

    def close(self) -> None:
        """End the judge's and the timed processes."""
        self.judge.close()
        if self._reference is not None:
            self._reference.close()

    def _written(self, form: Form) -> int | None:
        if form.in_process:
            return None
        path = self.files / form.file
        if path.exists():
            return sum(part.stat().st_size for part in parts(path))
        return int(self.write(form)["bytes"])

    @contextlib.contextmanager
    def _served(self, form: Form, batch: int | None = None) -> Iterator[Server]:
        server = Server(self, form)
        try:
            server.open(self.files, batch or self.batch, self.inputs)
            yield server
        finally:
            server.close()

    def _judged(
        self,
        form: Form,
        server: Server,
        by_size: bool,
        best: Tried | None,
        brief: bool,
        made_seconds: float,
        written: int | None,
    ) -> Tried:
        found: dict[str, Any] = {"made_seconds": made_seconds, "file": "" if form.in_process else form.file}
        found["bytes"] = written or server.ask("bytes")
        found["sha256"] = "" if form.in_process else digest(self.files / form.file)
        found |= server.effect()
        if without := without_effect(form, found["effect"]):
            return outcome_of(form, "refused", without, **found)
        try:
            timed = self._timed(server, best, brief)
        except Unsteady as error:
            found["foreign_share"] = error.foreign_share
            return outcome_of(form, "unmeasured", str(error), **found)
        times = server.ask("latencies")
        found |= {"ratio": timed.ratio, "foreign_share": timed.foreign_share}
        found |= {"p50": times["p50"], "p99": times["p99"], "peak_bytes": server.ask("peak")}
        if not by_size and timed.ratio.low <= 1.0:
            return outcome_of(form, "refused", not_faster(timed.ratio, self._told(found)), **found)
        if best is not None and beaten(timed.ratio, best):
            return outcome_of(form, "slower", f"slower than {best.name}, and not judged further", **found)
        server.ask("outputs", path=str(self._outputs(form.name)))
        checks = self._checks(form)
        found["checks"] = tuple(check.to_dict() for check in checks)
        broken = next((check for check in checks if check.problem), None)
        if broken is not None:
            reason = f"'{broken.output}' is not the model's: {broken.problem}"
            return outcome_of(form, "refused", reason, **found)
        change = self._change(form)
        found["change"] = change.to_dict() if change is not None else None
        unseen = "" if form.exact or form.further else astray(found["checks"], self.facts["unused"])
        if unseen:
            return outcome_of(form, "refused", unseen, **found)
        status, reason = decide(form, checks, change)
        return outcome_of(form, status, reason, **found)

    def _timed(self, server: Server, best: Tried | None, brief: bool) -> Comparison:
        """The form beside the reference: a short look, and where that is not enough, a longer one."""
        assert self._reference is not None
        if brief:
            known = best.ratio.counts if best is not None and best.ratio is not None else None
            with contextlib.suppress(Unsteady):
                look = compare(
                    self._reference, server, seconds=LOOK_SECONDS, tolerance=LOOK_TOLERANCE, target=known
                )
                if look.ratio.width < LAST * LOOK_TOLERANCE or beaten(look.ratio, best):
                    return look
        return compare(self._reference, server, seconds=TIMED_SECONDS, tolerance=TOLERANCE)

    def _told(self, found: dict[str, Any]) -> str:
        assert self._reference is not None
        whole = self._reference.ask("bytes")
        smaller = found["bytes"] < 0.9 * whole
        return f"smaller ({size(found['bytes'])} instead of {size(whole)}) and " if smaller else ""

    def _outputs(self, name: str) -> Path:
        return self.folder / outputs_file(name)

    def _checks(self, form: Form) -> list[Check]:
        width = self._envelope("fp32" if form.exact else "bf16")
        expected, found = (read_arrays(self._outputs(name)) for name in (REFERENCE, form.name))
        return compare_outputs(expected, found, width, self.facts["outputs"])

    def _envelope(self, numbers: str) -> list[float]:
        """How far rounding moves each output, on as many samples as the model does in a second or so."""
        assert self._reference is not None
        if numbers not in self._envelopes:
            step = self.batch * self._reference.calls_a_step
            in_time = ENVELOPE_SECONDS / max(self._reference.step_seconds / step, 1e-6)
            samples = int(max(FEWEST_SAMPLES, min(in_time, PROOF_SAMPLES)))
            self._envelopes[numbers] = self._reference.ask("envelope", numbers=numbers, samples=samples)
        return self._envelopes[numbers]

    def _change(self, form: Form) -> Change | None:
        """What the metric loses; None where that cannot be told, and rounding alone decides."""
        outputs = str(self._outputs(form.name))
        try:
            document = self.judge.ask("change", TIMEOUT, outputs=outputs, margin=self.margin)
        except (Refused, JobError):
            if not form.exact:
                raise
            return None
        return Change(**{k: v for k, v in document.items() if k not in ("difference", "kept")})


def outcome_of(form: Form, status: Status, reason: str = "", **found: Any) -> Tried:
    """What came of trying a form."""
    found["versions"] = versions_of(form)
    return Tried(form.name, form.does, form.runtime, form.numbers, status, reason, **found)


def _time_once(server: Server) -> None:
    server.block(max(1, round(BLOCK_SECONDS / server.step_seconds)))


def beaten(speed: Ratio, best: Tried | None) -> bool:
    """Is a form slower than the best, if there is one, even at the upper end of its interval?"""
    return best is not None and best.ratio is not None and speed.high < 0.97 * best.ratio.counts


def without_effect(form: Form, ran: dict[str, int]) -> str:
    """Why a form's numbers took no effect, by how many operators that multiply `ran` in which; else empty.

    Ahead-of-time code tells of none. A form in fp32 acts by its runtime, and weights alone are not seen here.
    """
    silent = form.runtime == "aoti" and not ran
    if form.numbers in ("fp32", *ran) or form.weights_only or silent:
        return ""
    told = ", ".join(f"{count} in {numbers}" for numbers, count in ran.items()) or "none multiplies"
    return f"nothing that multiplies ran in {form.numbers} (of your model's operators {told})"


def not_faster(speed: Ratio, smaller: str) -> str:
    """Why a form is refused that is not faster than the model as it is."""
    return f"{smaller}not faster: {ratio(speed)}"


def decide(form: Form, checks: list[Check], change: Change | None) -> tuple[Status, str]:
    """What outputs and metric say of a form that is worth it: is it right?"""
    if form.exact:
        outside = next((check for check in checks if not check.kept), None)
        if outside is None:
            return "kept", ""
        return "refused", (
            f"the same numbers were asked for, and '{outside.output}' is {number(outside.envelopes)} "
            "times as far from your model's as rounding explains"
        )
    assert change is not None
    if change.kept:
        return "kept", ""
    told = f"{number(change.value)} instead of {number(change.reference)}"
    if change.kept is False:
        return "refused", f"it loses more than the margin: {told}"
    if change.needed is None:
        return (
            "refused",
            f"it may lose {number(-change.low)} where {number(change.margin)} are allowed: {told}",
        )
    return "undecided", (
        f"{change.samples:,} samples are not enough to tell that it loses less than {number(change.margin)}: "
        f"about {change.needed:,} are needed"
    )
