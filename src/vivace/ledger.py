"""The ledger: what was observed and measured, as immutable records in an append-only file of JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any, Literal

from vivace import words
from vivace.errors import Code as Code
from vivace.errors import FolderError
from vivace.files import finite, open_own, read_own
from vivace.pages.answer import Answer


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the reference's step spends its time: what bounds the gain of each technique.

    `shares` are fractions of the step (``data``, ``place``, ``forward``, ``backward``, ``update``; an own
    step's whole time is ``forward``); `operator_shares` fractions of operator time by class, see
    `vivace.operators.CLASSES`. `features` are facts about the job such as ``batch_norm``, ``convolution_2d``,
    ``batch_size``.
    """

    device: str
    step_seconds: float
    shares: dict[str, float]
    operator_shares: dict[str, float]
    num_operators: int
    page_faults: float
    parameter_bytes: int
    peak_bytes: int
    features: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_index(self) -> bool:
        """Can the job's samples be asked for by number, in a torch DataLoader? True where that is unknown."""
        loader = self.features.get("loader", {})
        return bool(loader.get("is_dataloader", True)) and not loader.get("is_iterable", False)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        answer = Answer(
            command="profile",
            subject=f"the reference on {self.device}",
            figure=words.duration(self.step_seconds),
            sentence="a step",
            tone="plain",
            title_of_parts="Where its time goes",
            parts=tuple((name, words.percent(share)) for name, share in self.shares.items()),
            facts=(
                ("peak memory", words.size(self.peak_bytes)),
                ("of parameters", words.size(self.parameter_bytes)),
            ),
        )
        return card(answer)


NO_KERNELS = "this machine shows no kernels (torch's profiler gets none from CUPTI)"


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one profiled step really did: the ground on which a technique confirms that it acted.

    `dtypes` counts floating-point operator inputs by dtype over matrix and convolution operators; `operators`
    counts operator names, `kernels` the device's kernels, none where CUPTI gives none; `peak_bytes` is the
    largest number of live tensor bytes; `page_faults` are minor faults a step; `notes` are the techniques'
    own, `facts` those of `vivace.technique.facts.Facts` that are known.
    """

    operators: dict[str, int]
    dtypes: dict[str, int]
    peak_bytes: int
    page_faults: float
    compiled_graphs: int = 0
    graph_breaks: int = 0
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


WIDE = 0.5  # of the estimate: an interval wider than this has no estimate worth telling


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Speed against the reference with a 95 % interval; 2.0 means twice the samples a second."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The interval's whole width as a fraction of the estimate."""
        return (self.high - self.low) / self.estimate

    @property
    def wide(self) -> bool:
        """Is the interval too wide for its estimate to mean anything?"""
        return self.width > WIDE

    @property
    def counts(self) -> float:
        """What it counts for: the estimate, or of a wide interval that above 1 only the lower end."""
        return self.low if self.wide and self.low > 1.0 else self.estimate


class Outcome(enum.StrEnum):
    """How a search for a faster plan ended."""

    FASTER = "faster"
    FITS = "fits"  # the plan meets the memory budget, which the reference does not; it need not be faster
    NOTHING_HELPS = "nothing_helps"  # measured: nothing was faster
    NONE_KEPT = "none_kept"  # measured: what was faster broke its promise
    COULD_NOT_MEASURE = "could_not_measure"
    NOTHING_TRIED = "nothing_tried"  # the budget ended first
    TIME_ENDED = "time_ended"  # nothing measured was faster, and what promises more had no turn of its own
    NOTHING_FITS = "nothing_fits"  # into the memory that is allowed
    TOO_SHORT = "too_short"  # a tenth of the training is too little to search in
    INTERRUPTED = "interrupted"  # the plan, if any, is neither verified nor confirmed

    @property
    def answered(self) -> bool:
        """Is it an answer about the job, and not one about the machine or the budget?"""
        unmeasured = (Outcome.COULD_NOT_MEASURE, Outcome.NOTHING_TRIED, Outcome.TIME_ENDED)
        return self not in (*unmeasured, Outcome.INTERRUPTED)

    @property
    def searched(self) -> bool:
        """Was the search long enough to speak against a plan that an earlier one had found?"""
        return self.answered and self is not Outcome.TOO_SHORT


@dataclasses.dataclass(frozen=True)
class Trial:
    """One immutable line of the ledger. A measured trial carries its pairs; without them it cannot be
    constructed.

    `pairs` are (reference seconds, candidate seconds) a step, of neighbouring blocks. `reason` says why a
    refused or failed trial has none, `code` the same for programs, and `technique` which one is at fault,
    where it is one. `predicted` are the bounds of the gain that the cards named beforehand; `rounds` counts
    the pairs of processes behind the ratio; `foreign_share` is the largest share of the processor that other
    processes used during the timing. `joules` are what the machine took a sample, under the reference and
    under the candidate, where its counters can be read; `evaluations` the seconds of one of the metric.
    `full` counts how often the GPU's memory was full while the candidate was timed: what fits so is slow.
    """

    techniques: dict[str, dict[str, Any]]
    plan_id: str
    machine: str
    job: str
    status: Literal["measured", "refused", "failed"]
    reason: str = ""
    role: str = "candidate"
    ratio: Ratio | None = None
    pairs: tuple[tuple[float, float], ...] = ()
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    warmup_seconds: float | None = None
    predicted: tuple[float, float] | None = None
    promise: str = "exact"
    evidence: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    rounds: int = 1
    code: Code = Code.NONE
    foreign_share: float = 0.0
    technique: str = ""
    joules: tuple[float, float] | None = None
    evaluations: tuple[float, float] | None = None
    full: int = 0

    def __post_init__(self) -> None:
        if self.status == "measured" and (self.ratio is None or not self.pairs):
            raise AssertionError("a measured trial needs timings paired with the reference")
        if self.status != "measured" and not self.reason:
            raise AssertionError("a trial that was not measured needs its reason")

    @property
    def evaluating(self) -> float:
        """How many times as long as under the reference an evaluation takes; 1 where that was not timed."""
        return self.evaluations[1] / self.evaluations[0] if self.evaluations else 1.0

    @property
    def break_even_steps(self) -> float | None:
        """Steps until the warm-up is gained back; infinite for a slower trial, None where noise hides it."""
        if self.warmup_seconds is None or self.ratio is None or self.ratio.low <= 1.0 <= self.ratio.high:
            return None
        saved = statistics.median(reference - candidate for reference, candidate in self.pairs)
        return self.warmup_seconds / saved if saved > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Trial:
        """Rebuild a trial from `to_dict`'s document; older ones have no code, newer ones fields unknown here.

        Raises TypeError or ValueError where it is no trial that this version knows.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in document.items() if name in known}
        code = Code(fields.pop("code", Code.NONE))
        ratio = fields.pop("ratio", None)
        for name in ("predicted", "joules", "evaluations"):
            fields[name] = tuple(fields[name]) if fields.get(name) else None
        pairs = tuple((a, b) for a, b in fields.pop("pairs", ()))
        measured = fields.get("status") == "measured"
        if (measured and not (ratio and pairs)) or not (measured or fields.get("reason")):
            raise ValueError("a measured trial has a ratio and pairs, any other one its reason")
        return cls(
            **fields,
            code=code,
            ratio=Ratio(**ratio) if ratio else None,
            pairs=pairs,
        )


class Ledger:
    """An append-only file of JSON lines ``{"record": kind, ...}``, in which a number that is not finite is
    null; a torn last line is ignored on reading.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: str, document: dict[str, Any]) -> None:
        """Write one record and flush it to the disk. Raises FolderError where the file cannot be written."""
        line = json.dumps({"record": record, **finite(document)}, ensure_ascii=False)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            opened = open_own(self.path, flags)
            with os.fdopen(opened, "a", encoding="utf-8", errors="replace") as file:  # a path may be no text
                size = os.fstat(file.fileno()).st_size
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # by a kill: begin anew
                file.write(("\n" if torn else "") + line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FolderError(f"the ledger '{self.path}' cannot be written: {error.strerror}") from None

    def read(self, record: str | None = None) -> list[dict[str, Any]]:
        """All records, or those of one kind, oldest first."""
        found = []
        for line in read_own(self.path).split(b"\n"):
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):  # torn JSON, or torn inside a character; nested without end
                continue
            if isinstance(document, dict) and record in (None, document.get("record")):
                found.append(document)
        return found

    def trials(self) -> list[Trial]:
        """The trials that this version can read, oldest first."""
        found = []
        for document in self.read("trial"):
            with contextlib.suppress(TypeError, ValueError):  # of another version: it is not built upon
                found.append(Trial.from_dict(document))
        return found
