"""What a report says: a folder's records and the answers drawn from them. Page and terminal show the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vivace import words
from vivace.events import metric_title
from vivace.ledger import Outcome, Ratio, Trial
from vivace.pages.sameness import of_limit
from vivace.pictures import Picture
from vivace.reporting import phrases

_BASELINES = ("strict_fp32", "default", "tf32")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured trial, named, with the steps after which its warm-up is gained back."""

    name: str
    trial: Trial
    ratio: Ratio
    break_even: float | None
    kept: bool


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a comparison; `value` is None where there is none, and `note` says why."""

    name: str
    value: float | None
    note: str = ""
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Gain:
    """One step of the waterfall: the cumulative ratio after it, and the estimate before it."""

    name: str
    before: float
    ratio: Ratio


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The bounds that the cards named beforehand beside what was measured."""

    name: str
    low: float
    high: float
    ratio: Ratio

    @property
    def held(self) -> bool:
        """Whether the measured estimate lies inside the predicted bounds."""
        return self.low <= self.ratio.estimate <= self.high


@dataclasses.dataclass(frozen=True)
class Content:
    """Everything that a folder's files say; any part may be empty where a run was interrupted."""

    folder: Path
    trials: tuple[Trial, ...]
    run: dict[str, Any]
    profile: dict[str, Any]
    result: dict[str, Any]
    verdict: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    training: dict[str, Any]
    curves: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by the record's kind
    unread: int = 0
    skipped: tuple[str, ...] = ()  # what has another form than it is read in
    pictures: Mapping[str, Sequence[Picture]] = dataclasses.field(default_factory=dict)  # by heading

    @property
    def tuned(self) -> bool:
        """Whether the folder holds a tune run."""
        return bool(self.run or self.trials or self.result or self.profile or self.verdict)

    @property
    def job(self) -> dict[str, Any]:
        """The job's facts."""
        return dict(self.run.get("job") or {})

    @property
    def machine(self) -> dict[str, Any]:
        """The machine's facts."""
        return dict(self.run.get("machine") or {})

    @property
    def interrupted(self) -> bool:
        """Did the search end before its time: a person has ended it, or a rank was lost?"""
        return bool(self.result.get("interrupted")) or self.result.get("outcome") == Outcome.INTERRUPTED

    @property
    def plan(self) -> dict[str, dict[str, Any]]:
        """The kept plan; empty where nothing was kept, or not yet: no more than an interrupted search had
        begun with.
        """
        found = dict(self.result.get("plan") or {})
        return {} if self.interrupted and found == self.result.get("reference") else found

    @cached_property
    def measured(self) -> list[Row]:
        """The measured trials, fastest first."""
        rows = [self._row(trial, trial.ratio) for trial in self.trials if trial.ratio]
        return sorted(rows, key=lambda row: row.ratio.counts, reverse=True)

    def _row(self, trial: Trial, ratio: Ratio) -> Row:
        after = None if trial.role.startswith("baseline") else trial.break_even_steps
        name = phrases.plan_name(trial.techniques, trial.role)
        return Row(name, trial, ratio, after, trial is self.final)

    @cached_property
    def final(self) -> Trial | None:
        """The trial of the kept plan: its confirmation where there is one."""
        same = [t for t in self.trials if t.ratio and t.techniques == self.plan and self.plan]
        confirmed = [t for t in same if t.role == "confirmation"]
        found = confirmed or same
        return found[-1] if found else None

    @property
    def best(self) -> Row | None:
        """The fastest candidate that fits and is faster beyond noise: what an interrupted run had in hand."""
        limit = words.real(self.run.get("memory_bytes")) or math.inf
        rows = (r for r in self.measured if r.trial.role in ("candidate", "confirmation") and r.ratio.low > 1)
        return next((row for row in rows if (row.trial.peak_bytes or 0) <= limit), None)

    @property
    def speedup(self) -> Ratio | None:
        """The kept plan's ratio against strict fp32."""
        return ratio_of(self.result.get("speedup"))

    @property
    def not_measured(self) -> list[tuple[list[str], str, str]]:
        """Refused and failed trials by what was said of them: their names, the status and the reason."""
        said: dict[tuple[str, str], list[str]] = {}
        for trial in self.trials:
            if trial.status != "measured":
                names = said.setdefault((trial.status, trial.reason), [])
                names.append(phrases.plan_name(trial.techniques, trial.role))
        return [(list(dict.fromkeys(names)), *why) for why, names in said.items()]

    @property
    def baselines(self) -> list[Bar]:
        """The three baselines and the kept plan, in samples a second: strict fp32's, times what was measured
        in turn with it. Speeds of different minutes would not compare.
        """
        if not self.tuned:
            return []
        speeds, notes = self.result.get("baselines") or {}, self.result.get("baseline_notes") or {}
        bars: list[Bar] = []
        for key in dict.fromkeys((*_BASELINES, *speeds)):
            trial = self._baseline(key)
            fallback = trial.samples_per_second if trial and key not in speeds else None
            value = words.real(speeds.get(key)) or fallback
            if bars and bars[0].value and value and trial and trial.ratio:
                value = bars[0].value * trial.ratio.counts
            note = str(notes.get(key) or (trial.reason if trial else "") or ("" if value else "not measured"))
            bars.append(Bar(phrases.plan_name({key: {}}, f"baseline_{key}"), value, note))
        if self.plan:
            known = self.final.samples_per_second if self.final else None
            start = bars[0].value
            product = start * self.speedup.counts if start and self.speedup else None
            bars.append(Bar("The plan", product or known, kept=True))
        return bars

    def _baseline(self, key: str) -> Trial | None:
        found = [trial for trial in self.trials if trial.role == f"baseline_{key}"]
        return found[-1] if found else None

    @property
    def over_default(self) -> float | None:
        """The plan's speed over PyTorch's defaults: what a person who sets nothing gains."""
        bars = self.baselines
        usual, plan = (bars[1].value, bars[-1].value) if len(bars) == 4 else (None, None)
        return plan / usual if usual and plan else None

    @property
    def without_loader(self) -> float | None:
        """How many times faster the kept plan is on one cached batch."""
        measured = self.result.get("input_pipeline") or {}
        ratio = ratio_of(measured.get("plan" if self.plan else "reference"))
        return ratio.estimate if ratio else None

    @property
    def waterfall(self) -> list[Gain]:
        """The cumulative gains, technique by technique."""
        gains: list[Gain] = []
        for step in self.result.get("waterfall") or []:
            ratio = ratio_of(step.get("ratio"))
            if ratio:
                gains.append(Gain(str(step.get("step")), gains[-1].ratio.counts if gains else 0.0, ratio))
        return gains

    @property
    def predictions(self) -> list[Prediction]:
        """Predicted bounds beside the measured ratio, for every candidate that has both and an estimate."""
        rows = (row for row in self.measured if row.trial.role == "candidate" and not row.ratio.wide)
        return [Prediction(r.name, *r.trial.predicted, r.ratio) for r in rows if r.trial.predicted]

    @property
    def memory(self) -> list[Bar]:
        """Peak memory before and after, beside the budget and the device."""
        before, after = self.peaks
        device = (self.machine.get("devices") or [{}])[0]
        bars = [
            Bar("Parameters", words.real(self.profile.get("parameter_bytes"))),
            Bar("Peak, strict fp32", before),
            Bar("Peak, the plan", after, kept=True),
            Bar("Budget", words.real(self.run.get("memory_bytes"))),
            Bar("Device", words.real(device.get("memory_bytes"))),
        ]
        return [bar for bar in bars if bar.value] if any(bar.value for bar in bars[:4]) else []

    @property
    def checks(self) -> list[dict[str, Any]]:
        """The verification's checks, as they were written."""
        return [check for check in self.verdict.get("checks") or [] if isinstance(check, dict)]

    @property
    def setting(self) -> list[tuple[str, str]]:
        """The job's and the machine's facts, in their units."""
        machine, run = self.machine, self.run
        cores = words.number(machine.get("num_cores"))
        job = (fact for fact in self.job.items() if not isinstance(fact[1], dict))  # which holds digests
        told: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in job]
        told = [(n.removeprefix("num "), phrases.plain(v)) for n, v in told]
        for device in machine.get("devices") or []:
            features = ", ".join(map(str, device.get("features") or []))
            told.append(
                (str(device.get("kind")), f"{device.get('name')}, {words.size(device.get('memory_bytes'))}")
            )
            told += [("features", features)] if features else []
        told += [("cores", cores)] if machine else []
        told += [(name, value) for name, value in (machine.get("versions") or {}).items()]
        for group in ("limits", "ceilings"):
            facts = (machine.get(group) or {}).items()
            told += [
                (n.removesuffix("_bytes").replace("_", " "), phrases.fact(n, v, group)) for n, v in facts
            ]
        told += [("missing", reason) for reason in machine.get("missing") or []]
        told += [("energy", phrases.energy(run.get("energy") or {}))]
        told += [("machine", machine.get("fingerprint")), ("vivace", run.get("version"))]
        told += [("allowed promise", run.get("allow")), ("budget", words.duration(run.get("budget_seconds")))]
        return [(name, str(value)) for name, value in told if value not in (None, "", words.UNKNOWN)]

    @property
    def outcome(self) -> Outcome:
        """How the search ended; records of before this was told are read by their plan and verdict."""
        told = self.result.get("outcome")
        if told in list(Outcome):
            return Outcome(told)
        if self.plan:
            return Outcome.FASTER
        return Outcome.NONE_KEPT if self.verdict.get("kept") is False else Outcome.NOTHING_HELPS

    @property
    def broken(self) -> bool:
        """Did the kept plan break its promise?"""
        return bool(self.plan) and self.verdict.get("kept") is False and self.verdict.get("steps") != 0

    @property
    def loading(self) -> str:
        """Whether this host can feed the step, and what helped it; empty where that was no limit."""
        features = self.profile.get("features")
        beforehand = features.get("loading_limit") if isinstance(features, dict) else ""
        return str(self.result.get("loading") or beforehand or "")

    @property
    def epochs_left(self) -> int:
        """The epochs that a training run, which nothing interrupted, has left to a resumed one."""
        stopped = self.training.get("interrupted") or self.training.get("unfinished")
        return 0 if stopped else int(words.real(self.training.get("epochs_left")) or 0)

    @property
    def trained(self) -> str:
        """How long a training run was, and what it ended with."""
        last = self.metrics[-1] if self.metrics else {}
        taken = words.real(self.training.get("steps")) or words.real(last.get("step"))
        epochs, metric = self.training.get("epochs"), self.training.get("metric", last.get("metric"))
        length = words.count(int(taken or 0), "step")
        length += f" in {words.count(epochs, 'epoch')}" if epochs else ""
        length += ", ended early by --max-steps" if self.epochs_left else ""
        parts = [f"{length} so far" if self.training.get("unfinished") else length]
        measured = words.real(metric) is not None
        facts = {**last, **self.training}
        of = " on the validation data" if facts.get("metric_data") == "validation" else ""
        parts += [f"{metric_title(facts)}{of} {words.number(metric)}"] if measured else []
        loss = words.real(self.training.get("loss", last.get("loss")))
        told = "; ".join(parts + ([f"training loss {words.number(loss)}"] if loss is not None else []))
        return ". ".join(filter(None, (told, self._watched())))

    def _watched(self) -> str:
        """What repeating steps of a training run under the reference found."""
        found = self.training.get("watched")
        if not isinstance(found, dict) or not words.real(found.get("steps")):
            return ""
        kept = found.get("kept")
        same = "not decided" if kept is None else "the same model" if kept is True else "not the same model"
        worst, limit = (words.real(found.get(key)) for key in ("worst", "limit"))
        far = f"; worst {of_limit(worst, limit)}" if worst is not None and limit is not None else ""
        cost = words.percent(found.get("share"))
        return f"Watched {words.count(found['steps'], 'step')}: {same}{far}; it cost {cost}"

    @property
    def late_steps(self) -> float | None:
        """The steps after which the warm-up is gained back, where one whole training is shorter."""
        after = words.real(self.result.get("break_even_steps"))
        return after if after is not None and self.job_steps is not None and after > self.job_steps else None

    @property
    def job_steps(self) -> float | None:
        """The steps of one whole training, where they are known."""
        return words.real(self.result.get("job_steps"))

    @property
    def peaks(self) -> tuple[float | None, float | None]:
        """Peak bytes of strict fp32 and of the plan."""
        reference = self._baseline("strict_fp32")
        before = (reference.peak_bytes if reference else None) or self.profile.get("peak_bytes")
        return words.real(before), words.real(self.final.peak_bytes) if self.final else None


def ratio_of(document: object) -> Ratio | None:
    """A ratio as it was written; None for everything else."""
    if not isinstance(document, dict):
        return None
    values = [words.real(document.get(key)) for key in ("estimate", "low", "high")]
    estimate, low, high = values
    return Ratio(estimate, low, high) if None not in values else None  # type: ignore[arg-type]
