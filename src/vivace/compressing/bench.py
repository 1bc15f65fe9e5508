"""The parent's side: forms in processes of their own, timed in turn with the reference."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vivace.compressing.result import Status, Tried
from vivace.errors import ChildFailed, JobError, Refused, Unsteady
from vivace.ledger import Ratio
from vivace.measuring.paired import BLOCK_SECONDS, Comparison, Timed, across, compare
from vivace.processes.launch import Child, Source
from vivace.serving.calls import read_arrays
from vivace.serving.envelope import Check
from vivace.serving.envelope import compare as compare_outputs
from vivace.serving.files import digest
from vivace.serving.forms import BY_NAME, EXTRA, REFERENCE, Form
from vivace.serving.margin import Change
from vivace.words import number, ratio, size

JUDGE = "vivace.serving.judge:Judge"
WORKER = "vivace.compressing.worker:Worker"
TIMEOUT = 1200.0
TIMED_SECONDS, CONFIRMED_SECONDS = 6.0, 8.0
WARM_SECONDS = 0.5


class Server(Timed):
    """A child process that serves one form."""

    def __init__(self, bench: Bench) -> None:
        arguments = {"run": bench.run, "folder": str(bench.folder), "threads": bench.threads}
        super().__init__(Child(WORKER, bench.source, arguments, log=bench.log), TIMEOUT)

    def open(self, form: str, folder: Path, batch: int) -> float:
        """Be ready to be timed; the seconds that opening and the first call took."""
        opened = self.ask("open", form=form, folder=str(folder), batch=batch)
        self.warm(WARM_SECONDS, TIMEOUT)
        return float(opened["seconds"]) + self.warmup_seconds


class Bench:
    """Measures and judges forms of one trained model.

    Args:
        run: the run folder's absolute path.
        folder: an empty folder for calls and outputs.
        files: the folder of the forms' files.
    """

    def __init__(self, source: Source, run: str, folder: Path, files: Path, log: Path, batch: int) -> None:
        self.source, self.run, self.folder, self.files, self.log = source, run, folder, files, log
        self.batch, self.threads, self.margin = batch, 1, 0.0
        self.judge = Child(JUDGE, source, {"run": run, "folder": str(folder)}, log=log)
        self.facts: dict[str, Any] = {}
        self.envelopes: dict[str, list[float]] = {}
        self._reference: Server | None = None

    def begin(self) -> dict[str, Any]:
        """Record the calls, open the reference, and learn how far rounding moves its outputs."""
        self.facts = self.judge.ask("record", TIMEOUT)
        self.threads = self.facts["threads"]
        self._reference = Server(self)
        self._reference.open(REFERENCE, self.files, self.batch)
        self._reference.ask("outputs", path=str(self._outputs(REFERENCE)))
        self.envelopes = self._reference.ask("envelopes")
        return self.facts

    def renew(self) -> None:
        """A fresh process for the reference: an interruption may have left an answer of the old one."""
        assert self._reference is not None
        self._reference.close()
        self._reference = Server(self)
        self._reference.open(REFERENCE, self.files, self.batch)
        self._reference.block(max(1, round(BLOCK_SECONDS / self._reference.step_seconds)))

    def reference(self) -> Tried:
        """What is known of the model as it is, once others have been timed against it."""
        assert self._reference is not None
        times = self._reference.ask("latencies")
        return self._tried(
            BY_NAME[REFERENCE],
            "kept",
            ratio=Ratio(1.0, 1.0, 1.0),
            p50=times["p50"],
            p99=times["p99"],
            bytes=self._reference.ask("bytes"),
            peak_bytes=self._reference.ask("peak"),
            effect=self._reference.ask("effect"),
        )

    def attempt(self, form: Form, *, by_size: bool) -> Tried:
        """Make, time and judge a form; whatever keeps it from that is the answer."""
        if form.missing():
            lacking = " and ".join(form.missing())
            verb = "are" if len(form.missing()) > 1 else "is"
            return self._tried(form, "missing", f"{lacking} {verb} not installed: {EXTRA}")
        begin = time.monotonic()
        try:
            written = self._written(form)
            with self._served(form) as server:
                return self._judged(form, server, by_size, time.monotonic() - begin, written)
        except (Refused, ChildFailed, JobError) as error:
            status: Status = "failed" if isinstance(error, ChildFailed) else "refused"
            return self._tried(form, status, str(error), made_seconds=time.monotonic() - begin)

    def confirmed(self, form: Form, first: Ratio) -> Ratio:
        """The ratio of a form with that of fresh processes for it and for the reference."""
        with self._served(BY_NAME[REFERENCE]) as reference, self._served(form) as server:
            second = compare(reference, server, seconds=CONFIRMED_SECONDS)
        return across([Comparison(first, ()), second])

    def write(self, form: Form) -> dict[str, Any]:
        """Make the file of a form, in a process of its own."""
        arguments = {"run": self.run, "folder": str(self.folder), "threads": self.threads}
        with Child(WORKER, self.source, arguments, log=self.log) as child:
            made: dict[str, Any] = child.ask("write", TIMEOUT, form=form.name, folder=str(self.files))
        return made

    def close(self) -> None:
        """End all processes."""
        self.judge.close()
        if self._reference is not None:
            self._reference.close()

    def _written(self, form: Form) -> int | None:
        return None if form.in_process else int(self.write(form)["bytes"])

    @contextlib.contextmanager
    def _served(self, form: Form) -> Iterator[Server]:
        server = Server(self)
        try:
            server.open(form.name, self.files, self.batch)
            yield server
        finally:
            server.close()

    def _judged(
        self, form: Form, server: Server, by_size: bool, made_seconds: float, written: int | None
    ) -> Tried:
        assert self._reference is not None
        server.ask("outputs", path=str(self._outputs(form.name)))
        found: dict[str, Any] = {"made_seconds": made_seconds, "file": "" if form.in_process else form.file}
        found["bytes"] = written or server.ask("bytes")
        found["sha256"] = "" if form.in_process else digest(self.files / form.file)
        found["effect"] = server.ask("effect")
        checks = self._checks(form)
        found["checks"] = tuple(check.to_dict() for check in checks)
        broken = next((check for check in checks if check.problem), None)
        if broken is not None:
            reason = f"'{broken.output}' is not the model's: {broken.problem}"
            return self._tried(form, "refused", reason, **found)
        try:
            timed = compare(self._reference, server, seconds=TIMED_SECONDS)
        except Unsteady as error:
            return self._tried(form, "undecided", str(error), **found)
        times = server.ask("latencies")
        found |= {"ratio": timed.ratio, "foreign_share": timed.foreign_share}
        found |= {"p50": times["p50"], "p99": times["p99"], "peak_bytes": server.ask("peak")}
        change = self._change(form)
        found["change"] = change.to_dict()
        took = form.weights_only or not found["effect"] or form.numbers in found["effect"]
        if not took:
            ran = ", ".join(f"{count} in {numbers}" for numbers, count in found["effect"].items())
            reason = f"nothing that multiplies ran in {form.numbers} (of your model's operators {ran})"
            return self._tried(form, "refused", reason, **found)
        status, reason = decide(form, checks, change, timed.ratio, self._told(found), by_size=by_size)
        return self._tried(form, status, reason, **found)

    def _told(self, found: dict[str, Any]) -> str:
        assert self._reference is not None
        whole = self._reference.ask("bytes")
        smaller = found["bytes"] < 0.9 * whole
        return f"smaller ({size(found['bytes'])} instead of {size(whole)}) and " if smaller else ""

    def _outputs(self, name: str) -> Path:
        return self.folder / f"outputs-{name}.npz"

    def _checks(self, form: Form) -> list[Check]:
        width = self.envelopes["fp32" if form.exact else "bf16"]
        expected, found = (read_arrays(self._outputs(name)) for name in (REFERENCE, form.name))
        return compare_outputs(expected, found, width, self.facts["outputs"])

    def _change(self, form: Form) -> Change:
        document = self.judge.ask(
            "change", TIMEOUT, outputs=str(self._outputs(form.name)), margin=self.margin
        )
        return Change(**{k: v for k, v in document.items() if k not in ("difference", "kept")})

    def _tried(self, form: Form, status: Status, reason: str = "", **found: Any) -> Tried:
        return Tried(form.name, form.does, form.runtime, form.numbers, status, reason, **found)


def decide(
    form: Form, checks: list[Check], change: Change, speed: Ratio, smaller: str, *, by_size: bool
) -> tuple[Status, str]:
    """What the measurements say of a form: is it right, and is it worth it?"""
    if speed.low <= 1.0 and not by_size:
        return "refused", f"{smaller}not faster: {ratio(speed)}"
    if form.exact:
        outside = next((check for check in checks if not check.kept), None)
        if outside is None:
            return "kept", ""
        return "refused", (
            f"the same numbers were asked for, and '{outside.output}' is {number(outside.envelopes)} "
            "times as far from your model's as rounding explains"
        )
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
