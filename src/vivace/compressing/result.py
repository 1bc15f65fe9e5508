"""What `vivace compress` found: every form that was tried, with its measurement or why there is none."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from vivace.ledger import Ratio

FORMAT = 1
Status = Literal["kept", "refused", "slower", "undecided", "unmeasured", "untried", "failed", "missing"]
Outcome = Literal["better", "nothing_better", "could_not_measure", "nothing_tried", "interrupted"]


@dataclasses.dataclass(frozen=True)
class Tried:
    """One form. `ratio` is its speed against the reference's, paired with it; None where it was not timed.

    `status`: ``kept`` may be deployed; ``refused`` was measured and is not faster, or loses too much;
    ``slower`` than the best of the others by far, and not judged further; ``undecided`` for lack of samples;
    ``unmeasured`` where the machine was too busy to time it; ``untried`` as it was not expected to be the
    best, or the budget ended; ``failed`` could not be made or run; ``missing`` lacks a package.

    `versions` are those of the form's packages. `job`, `run` and the sha256 `weights` are of a model that was
    trained further; empty where it is the person's own.
    `p50` and `p99` are seconds of a call, `change` is what the metric loses (see `serving.margin.Change`),
    `checks` hold each output's distance from the reference (see `serving.envelope.Check`), `effect` says how
    many operators really ran in which numbers, `stayed` which of them not in the form's and why (see
    `serving.effect.told`), `sha256` is that of all parts of the file, `made_seconds` how long making and
    opening it took.
    """

    name: str
    does: str
    runtime: str
    numbers: str
    status: Status
    reason: str = ""
    ratio: Ratio | None = None
    p50: float | None = None
    p99: float | None = None
    bytes: int | None = None
    peak_bytes: int | None = None
    change: dict[str, Any] | None = None
    checks: tuple[dict[str, Any], ...] = ()
    effect: dict[str, Any] = dataclasses.field(default_factory=dict)
    stayed: tuple[dict[str, str], ...] = ()
    made_seconds: float = 0.0
    seconds: float = 0.0
    foreign_share: float = 0.0
    file: str = ""
    sha256: str = ""
    job: str = ""
    run: str = ""
    weights: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, as the journal and the document hold them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Tried:
        """The inverse of `to_dict`."""
        speed = document["ratio"]
        known = {field.name for field in dataclasses.fields(cls)}
        found = {key: value for key, value in document.items() if key in known}
        found |= {key: tuple(found.get(key, ())) for key in ("checks", "stayed")}
        return cls(**{**found, "ratio": Ratio(**speed) if speed else None})


@dataclasses.dataclass(frozen=True)
class Beside:
    """A form in calls of `batch` samples, timed in turn with the model as it is, each in a fresh process.

    `ratio` is its speed against that one's; `p50` and `p99` are seconds of a call, over so many `calls`.
    `reason` says why it could not be timed.
    """

    name: str
    does: str
    batch: int
    reason: str = ""
    ratio: Ratio | None = None
    p50: float | None = None
    p99: float | None = None
    samples_per_second: float | None = None
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Compressed:
    """The answer of `vivace compress`.

    `chosen` is the form to deploy, the reference's own name where none is better; it was sought for calls of
    `batch` samples. `beside` has its times in calls of each size that was asked for, with those of the model
    as it is, of torch.compile as it comes and of the plan that trained it. `subject` describes the run, its
    metric and its samples. `file` is what to deploy, `page_path` the page. `go_on` is the command that tries
    what is left, where the search was interrupted or its budget ended first; the first of `notes` says that
    it was interrupted.
    """

    job: str
    objective: str
    batch: int
    margin: float
    chosen: str
    tried: tuple[Tried, ...]
    subject: dict[str, Any]
    machine: dict[str, Any]
    notes: tuple[str, ...]
    seconds: float
    date: str
    file: str = ""
    page_path: str = ""
    interrupted: bool = False
    budget_seconds: float = 0.0
    go_on: str = ""
    beside: tuple[Beside, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """How it ended; that nothing is better is another answer than that nothing could be measured."""
        if self.interrupted:
            return "interrupted"
        if self.chosen != self.reference.name:
            return "better"
        if any(one.status == "unmeasured" for one in self.tried):
            return "could_not_measure"
        measured = any(one.ratio is not None for one in self.tried[1:])
        untried = any(one.status == "untried" for one in self.tried)
        return "nothing_tried" if untried and not measured else "nothing_better"

    @property
    def winner(self) -> Tried:
        """The form to deploy, which may be the model as it is."""
        return next(one for one in self.tried if one.name == self.chosen)

    @property
    def reference(self) -> Tried:
        """The model as it is."""
        return self.tried[0]

    @property
    def exit_code(self) -> int:
        """0, 1 where no form is better than the model as it is, or 130 after Ctrl-C."""
        if self.interrupted:
            return 130
        return 1 if self.chosen == self.reference.name else 0

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace compress --json`` prints."""
        outcome = {"outcome": self.outcome, "exit_code": self.exit_code}
        return {"format": FORMAT, **dataclasses.asdict(self), **outcome}


def choose(tried: list[Tried], *, by_size: bool) -> Tried:
    """The fastest form that is kept, or the smallest; the reference where there is none."""
    kept = [one for one in tried[1:] if one.status == "kept" and one.ratio is not None]
    reference = tried[0]
    if by_size:
        smaller = [one for one in kept if (one.bytes or 0) < (reference.bytes or 0)]
        return min(smaller, key=lambda one: one.bytes or 0, default=reference)
    return max(kept, key=lambda one: one.ratio.counts if one.ratio else 0.0, default=reference)
