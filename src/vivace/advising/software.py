"""Which framework and compute API for a job on this machine: from records of `scripts/bench frameworks`, and
from what `vivace inspect` knows. No record that fits, no figure. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace import words
from vivace.advising.demand import Demand
from vivace.advising.source import open_subject
from vivace.errors import AnswerIsNo, InputError
from vivace.inspection import apis, inspect
from vivace.inspection.table import API_KEYS, ceiling_in_words
from vivace.ledger import Ratio
from vivace.machine import Machine
from vivace.pages.answer import Answer

CHECKOUT = Path(__file__).resolve().parents[3]  # where Vivace runs from its source code
RECORDS = CHECKOUT / "records"
ALIKE = 10.0  # times more or fewer operations a step, up to which a record tells of a job
MEASURED_AS = {"convolutional": "cnn resnet18", "recurrent": "lstm", "transformer": "transformer"}
STAYING = "torch"
PROCESSES = 1.08  # by which two processes of one program differ; a record has one process of each contender
KEPT = ("date", "command", "versions", "pins")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to train that was measured.

    Args:
        ratio: times PyTorch eager in strict fp32, in turns with it.
        seconds: until the first step, and until the record's accuracy (None: not reached).
        doubt: why it cannot be the answer; empty where it can.
    """

    name: str
    framework: str
    ratio: Ratio
    seconds: tuple[float, float | None]
    doubt: str


@dataclasses.dataclass(frozen=True)
class SoftwareAdvice:
    """The answer on one job.

    Args:
        answer: ``stay`` on PyTorch, ``move``, or ``unknown`` where no record fits.
        best: the fastest way, of PyTorch where the answer is to stay; None where it is not known.
        over_staying: how many times faster than PyTorch at its fastest another framework is, at its best.
        record: date, command and job of what the answer rests on; empty without one.
        reasons: sentences without full stops.
        api: the compute API to train through, and on which device.
        next: the command that says more.
    """

    job: str
    kind: str
    answer: str
    best: Option | None
    over_staying: Ratio | None
    options: tuple[Option, ...]
    record: Mapping[str, Any]
    reasons: tuple[str, ...]
    api: tuple[str, str]
    api_reasons: tuple[str, ...]
    next: str

    @property
    def exit_code(self) -> int:
        """0, or 1 where no record fits."""
        return AnswerIsNo.exit_code if self.answer == "unknown" else 0

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace advise --software --json`` prints."""
        return {**dataclasses.asdict(self), "api": dict(zip(("name", "device"), self.api, strict=True))}

    def ending(self) -> Answer:
        """What the command ends with."""
        figures = {"stay": "Stay on PyTorch", "move": self.best.name if self.best else "", "unknown": ""}
        first, *others = self.reasons
        parts = [(option.name, _told(option)) for option in self.options]
        return Answer(
            command="advise",
            subject=self.job,
            figure=figures[self.answer] + (":" if figures[self.answer] else ""),
            sentence=first,
            tone="open" if self.answer == "unknown" else "plain",
            title_of_parts="Times PyTorch eager in strict fp32",
            parts=tuple(parts),
            notes=(*others, f"compute API: {self.api[0]}, for {self.api[1]}", *self.api_reasons),
            next=(self.next,),
        )


def advise_on_software(
    reference: str, machine: Machine | None = None, records: Path | None = None
) -> SoftwareAdvice:
    """Advise on a JOB, a saved profile or a counted model.

    `records` is the folder in which `scripts/bench` files records; this checkout's unless given. Raises
    InputError where it is none, and what `open_subject` raises.
    """
    if records is not None and not records.is_dir():
        raise InputError(f"--records must be a folder of records of scripts/bench, not '{records}'")
    machine = machine or inspect()
    subject = open_subject(reference)
    kind, work = kind_of(subject.demand), max(1.0, subject.demand.flops * subject.batch_size)
    tune = f"vivace tune {shlex.quote(reference) if subject.counted in ('fake', 'real') else 'JOB'}"
    options: tuple[Option, ...] = ()
    found, why, following = _fitting(kind, work, machine, _newest(records or RECORDS, machine), tune)
    answer, best, over, reasons = "unknown", None, None, [why]
    if found:
        options = options_of(found)
        answer, best, over, reasons = chosen(options)
        reasons.append(why)
        following = tune
    return SoftwareAdvice(
        job=reference,
        kind=kind,
        answer=answer,
        best=best,
        over_staying=over,
        options=options,
        record={key: found[key] for key in (*KEPT, "job")} if found else {},
        reasons=tuple(reasons),
        api=_api(machine),
        api_reasons=tuple(_api_reasons(machine)),
        next=following,
    )


def kind_of(demand: Demand) -> str:
    """``convolutional``, ``recurrent``, ``transformer`` or ``dense``: what a step of the network consists
    of."""
    if demand.convolutional:
        return "convolutional"
    if demand.count_of("recurrent"):
        return "recurrent"
    attends = demand.count_of("attention") or (demand.count_of("batched") and demand.count_of("softmax"))
    return "transformer" if attends else "dense"


def _newest(folder: Path, machine: Machine) -> dict[str, Any] | None:
    """The newest record of a machine like this one: the same device and number of cores."""
    found = []
    for path in sorted(folder.glob("frameworks/*/*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            of, whole = record["machine"], {key: record[key] for key in KEPT}
            options_of(record)
            like = [entry["kind"] for entry in record["work"].values() if entry["flops_per_step"] > 0]
            if like and (of["device"], of["cores"]) == (machine.device.name, machine.num_cores):
                found.append((str(whole["date"]), record))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f"'{path}' is no record of scripts/bench frameworks: remove it, or measure again"
            ) from None
    return max(found, key=lambda one: one[0])[1] if found else None


def _fitting(
    kind: str, work: float, machine: Machine, record: dict[str, Any] | None, tune: str
) -> tuple[dict[str, Any], str, str]:
    """The part of the record on the job most like this one, a sentence on it, and what to run; nothing where
    none fits."""
    if kind not in MEASURED_AS:
        return (
            {},
            f"No benchmark of frameworks has a network like this one ({kind}), so nothing is known of it",
            tune,
        )
    measure = f"scripts/bench frameworks {MEASURED_AS[kind]}"
    if record is None:
        device = f"{machine.device.name}, {machine.num_cores} cores"
        if machine.device.kind != "cpu":
            return {}, f"Frameworks were compared on processors only, not on this machine ({device})", tune
        return _unmeasured(f"Frameworks were not compared on this machine ({device})", measure, tune)
    like = {name: entry for name, entry in record["work"].items() if entry["kind"] == kind}
    if not like:
        return _unmeasured(f"The record of {record['date']} holds no {kind} network", measure, tune)
    name = min(like, key=lambda name: abs(math.log(work / like[name]["flops_per_step"])))
    other = like[name]["flops_per_step"]
    sizes = f"{words.quantity(work, 'FLOP')} a step here, {words.quantity(other, 'FLOP')} there"
    if not 1 / ALIKE <= work / other <= ALIKE:
        return {}, f"No network of that size was measured: {sizes} ('{name}', the nearest)", tune
    told = f"measured on {record['date']} on this kind of machine with '{name}', a {kind} network: {sizes}"
    then, now = record["versions"].get("torch"), machine.versions.get("torch")
    told += f"; torch {then} then, {now or 'none'} now" if then != now else ""
    found = {**record, "job": name, "rows": [row for row in record["rows"] if row["job"] == name]}
    return found, told, ""


def _unmeasured(why: str, measure: str, tune: str) -> tuple[dict[str, Any], str, str]:
    """No part of a record, and the command that makes one, where the person has it."""
    if (CHECKOUT / "scripts" / "bench").is_file():
        return {}, why, measure
    source = (
        "Vivace's source code, and not with the package: run it there, and name its records with --records"
    )
    return {}, f"{why}; '{measure}', which compares them, comes with {source}", tune


def options_of(record: Mapping[str, Any]) -> tuple[Option, ...]:
    """What was measured in a record's rows, the fastest first."""
    found = []
    for row in record["rows"]:
        if row["status"] != "measured":
            continue
        doubt = ""
        if row["accuracy_seconds"] is None:
            doubt = f"it did not reach the accuracy of {words.percent(record['accuracy'])}"
        seconds = (row["to_first_step_seconds"], row["accuracy_seconds"])
        found.append(Option(row["contender"], row["framework"], Ratio(**row["ratio"]), seconds, doubt))
    return tuple(sorted(found, key=lambda option: -option.ratio.estimate))


def chosen(options: tuple[Option, ...]) -> tuple[str, Option | None, Ratio | None, list[str]]:
    """To move only where another framework is faster than PyTorch at its fastest, beyond noise."""
    able = [option for option in options if not option.doubt]
    staying = next((option for option in able if option.framework == STAYING), None)
    other = next((option for option in able if option.framework != STAYING), None)
    reasons = [f"{option.name}: {option.doubt}" for option in options if option.doubt]
    if staying is None:
        return "unknown", None, None, ["PyTorch itself has no row that counts in the record", *reasons]
    if other is None:
        return "stay", staying, None, ["no other framework has a row that counts", *reasons]
    over = Ratio(
        other.ratio.estimate / staying.ratio.estimate,
        other.ratio.low / staying.ratio.high,
        other.ratio.high / staying.ratio.low,
    )
    if over.low > PROCESSES:
        told = f"{words.ratio(over)} the speed of {staying.name}, PyTorch's fastest"
        return "move", other, over, [told, *reasons]
    told = f"{other.name}, the fastest elsewhere, has {words.ratio(over)} the speed of {staying.name}"
    return "stay", staying, over, [told, *reasons]


def _told(option: Option) -> str:
    first, reached = option.seconds
    told = f"{words.ratio(option.ratio)}; first step after {words.duration(first)}"
    return told + (f", the accuracy after {words.duration(reached)}" if reached is not None else "")


def _api(machine: Machine) -> tuple[str, str]:
    """The API through which torch reaches the device that a job trains on."""
    device = machine.device.name
    serving = (backend.name for backend in machine.backends if backend.torch and device in backend.devices)
    return next(serving, machine.device.kind), device


def _api_reasons(machine: Machine) -> list[str]:
    """Why not another: what each reached here beside torch, or the command that measures it."""
    reasons = [machine.passed_over] if machine.passed_over else []
    surveys = apis.stored(machine)
    for name, survey in surveys.items():
        for key in reversed(API_KEYS[:2]):
            if key in survey.ceilings and key in machine.ceilings:
                mine, theirs = (
                    ceiling_in_words(key, value)
                    for value in (machine.ceilings[key], survey.ceilings[key].value)
                )
                reasons.append(f"{key.replace('_', ' ')}: {mine} through torch, {theirs} through {name}")
                break
    if not surveys:
        reasons.append("what other APIs reach was not measured: vivace inspect --measure")
    return reasons
