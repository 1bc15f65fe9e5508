"""What a report says: a folder's records and the answers drawn from them. Page and terminal show the same."""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

from vivace import words
from vivace.ledger import Outcome, Ratio, Trial
from vivace.reporting import phrases

_BASELINES = ("strict_fp32", "default", "tf32")
_SAME = {"exact": "bit-identical model", "rounding": "same model", "semantics": "same metric"}


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
    def plan(self) -> dict[str, dict[str, Any]]:
        """The kept plan; empty where nothing was kept, or not yet."""
        return dict(self.result.get("plan") or {})

    @cached_property
    def measured(self) -> list[Row]:
        """The measured trials, fastest first."""
        rows = [self._row(trial, trial.ratio) for trial in self.trials if trial.ratio]
        return sorted(rows, key=lambda row: row.ratio.counts, reverse=True)

    def _row(self, trial: Trial, ratio: Ratio) -> Row:
        kept = trial is self.final
        told = self.result.get("break_even_steps") if kept else None
        name = phrases.plan_name(trial.techniques, trial.role)
        return Row(name, trial, ratio, told if told is not None else _break_even(trial), kept)

    @cached_property
    def final(self) -> Trial | None:
        """The trial of the kept plan: its confirmation where there is one."""
        same = [t for t in self.trials if t.ratio and t.techniques == self.plan and self.plan]
        confirmed = [t for t in same if t.role == "confirmation"]
        found = confirmed or same
        return found[-1] if found else None

    @property
    def best(self) -> Row | None:
        """The fastest candidate that is faster beyond noise: what an interrupted run had in hand."""
        rows = (r for r in self.measured if r.trial.role in ("candidate", "confirmation") and r.ratio.low > 1)
        return next(rows, None)

    @property
    def speedup(self) -> Ratio | None:
        """The kept plan's ratio against strict fp32."""
        return _ratio(self.result.get("speedup"))

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
        """The three baselines and the kept plan, in samples a second."""
        if not self.tuned:
            return []
        speeds, notes = self.result.get("baselines") or {}, self.result.get("baseline_notes") or {}
        bars = []
        for key in _BASELINES:
            trial = self._baseline(key)
            fallback = trial.samples_per_second if trial and key not in speeds else None
            value = words.real(speeds.get(key)) or fallback
            note = str(notes.get(key) or (trial.reason if trial else "") or ("" if value else "not measured"))
            bars.append(Bar(phrases.plan_name({}, f"baseline_{key}"), value, note))
        if self.plan:
            known = self.final.samples_per_second if self.final else None
            start = bars[0].value
            product = start * self.speedup.counts if start and self.speedup else None
            bars.append(Bar("The plan", known or product, kept=True))
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
        ratio = _ratio(measured.get("plan" if self.plan else "reference"))
        return ratio.estimate if ratio else None

    @property
    def waterfall(self) -> list[Gain]:
        """The cumulative gains, technique by technique."""
        gains: list[Gain] = []
        for step in self.result.get("waterfall") or []:
            ratio = _ratio(step.get("ratio"))
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
        reference = self._baseline("strict_fp32")
        before = (reference.peak_bytes if reference else None) or self.profile.get("peak_bytes")
        device = (self.machine.get("devices") or [{}])[0]
        bars = [
            Bar("Parameters", words.real(self.profile.get("parameter_bytes"))),
            Bar("Peak, strict fp32", words.real(before)),
            Bar("Peak, the plan", words.real(self.final.peak_bytes) if self.final else None, kept=True),
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
        told: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in self.job.items()]
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
        told += [("machine", machine.get("fingerprint")), ("vivace", run.get("version"))]
        told += [("allowed promise", run.get("allow")), ("budget", words.duration(run.get("budget_seconds")))]
        return [(name, str(value)) for name, value in told if value not in (None, "", words.UNKNOWN)]

    @property
    def sentence(self) -> tuple[str, str]:
        """The honest answer in one sentence, cut after its figure: "2.31×" and " (2.24–2.38) faster ..."."""
        speedup, promise = self.speedup, str(self.result.get("promise") or "").upper()
        if not self.tuned:
            return "", self.trained
        if not self.result or (self.result.get("interrupted") and not self.plan):
            return "", self._unfinished()
        if self.outcome in phrases.ENDINGS or speedup is None:
            return "", phrases.ENDINGS.get(self.outcome, phrases.ENDINGS[Outcome.NOTHING_HELPS])
        if self.broken:
            return "", "Not the same model"
        if speedup.low <= 1:
            rest = f"Not faster beyond noise, {words.ratio(speedup)} of strict fp32's speed"
            return "", f"{rest}; {self._promise(promise)}"
        bounds = words.interval(speedup.low, speedup.high)
        return words.speed(speedup), f" ({bounds}) faster than strict fp32; {self._promise(promise)}"

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
    def why(self) -> str:
        """What more is known than the sentence says: why there is no plan, or what a broken promise is."""
        if self.broken:
            promise = str(self.result.get("promise") or "").upper()
            reason = str(self.verdict.get("reason") or "")
            told = f"{self._promise(promise)}{': ' if reason else ''}{reason}"
            return f"{told}. It ran at {words.ratio(self.speedup)} of strict fp32's speed"
        return str(self.result.get("reason") or "") if self.outcome in phrases.ENDINGS else ""

    @property
    def longer(self) -> str:
        """The plan for longer trainings, and from how many steps on it wins; empty where there is none."""
        plan = self.result.get("long_plan")
        if not isinstance(plan, dict):
            return ""
        speedup = _ratio(plan.get("speedup"))
        return phrases.longer(
            phrases.plan_name(plan.get("plan") or {}),
            speedup,
            plan.get("from_steps"),
            plan.get("warmup_seconds"),
            str(plan.get("plan_path")),
            verified=bool(plan.get("verified")),
        )

    @property
    def loading(self) -> str:
        """Whether this host can feed the step, and what helped it; empty where that was no limit."""
        features = self.profile.get("features")
        beforehand = features.get("loading_limit") if isinstance(features, dict) else ""
        return str(self.result.get("loading") or beforehand or "")

    @property
    def headline(self) -> str:
        """The honest answer as plain text."""
        return "".join(self.sentence)

    def _promise(self, promise: str) -> str:
        kept = self.verdict.get("kept")
        if kept is None:
            return f"promise {promise} not verified".replace("  ", " ")
        if not kept:
            return f"The promise {promise} is broken".replace("  ", " ")
        return f"{_SAME.get(promise.lower(), 'same model')}: promise {promise} kept"

    def _unfinished(self) -> str:
        best = self.best
        if best is None:
            return "Interrupted before anything faster was found: train as you do"
        found = f"best so far {words.ratio(best.ratio)} by {best.name}"
        return f"Interrupted; {found}, neither confirmed nor verified"

    @property
    def trained(self) -> str:
        """What a training run ended with."""
        last = self.metrics[-1] if self.metrics else {}
        taken = words.real(self.training.get("steps")) or words.real(last.get("step"))
        epochs, metric = self.training.get("epochs"), self.training.get("metric", last.get("metric"))
        metric_data = self.training.get("metric_data", last.get("metric_data"))
        parts = [
            f"Trained {int(taken or 0):,} steps" + (f" in {words.count(epochs, 'epoch')}" if epochs else "")
        ]
        measured = words.real(metric) is not None
        parts += [f"{phrases.metric(metric_data)} {words.number(metric)}"] if measured else []
        loss = words.real(self.training.get("loss", last.get("loss")))
        told = "; ".join(parts + ([f"loss {words.number(loss)}"] if loss is not None else []))
        return ". ".join(filter(None, (told, self._watched())))

    def _watched(self) -> str:
        """What repeating steps of a training run under the reference found."""
        found = self.training.get("watched")
        if not isinstance(found, dict) or not words.real(found.get("steps")):
            return ""
        same = "the same model" if found.get("kept") is True else "not the same model"
        worst, limit = (words.real(found.get(key)) for key in ("worst", "limit"))
        far = f"; worst {worst:.1f} of {limit:.0f}" if worst is not None and limit is not None else ""
        cost = words.percent(found.get("share"))
        return f"Watched {words.count(found['steps'], 'step')}: {same}{far}; it cost {cost}"

    @property
    def job_steps(self) -> float | None:
        """The steps of one whole training, where the plan's warm-up costs more of them."""
        after, steps = (words.real(self.result.get(key)) for key in ("break_even_steps", "job_steps"))
        return steps if after is not None and steps is not None and after > steps else None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The few figures that stand under the sentence."""
        pays = phrases.steps(self.result.get("break_even_steps")) if self.plan else words.UNKNOWN
        late = f"; the job takes {self.job_steps:,.0f}" if self.job_steps else ""
        speeds = [
            ("over PyTorch's defaults", words.times(self.over_default)),
            ("pays for itself after" + late, pays),
            *self._training_facts(),
            ("more, if loading data cost nothing", words.times(self.without_loader)),
        ]
        told = [
            *(speeds if not self.broken else ()),
            ("peak memory", words.size(self.final.peak_bytes) if self.final else words.UNKNOWN),
            ("trials, " + words.duration(self.result.get("seconds")), str(len(self.trials) or words.UNKNOWN)),
        ]
        trained = [
            ("training took", words.duration(self.training.get("seconds"))),
            ("samples a second", words.number(self.training.get("samples_per_second") or None)),
            ("resumed from step", words.number(self.training.get("resumed_from_step") or None)),
        ]
        facts = [(n.removesuffix(f", {words.UNKNOWN}"), v) for n, v in (told if self.tuned else []) + trained]
        return [(name, value) for name, value in facts if value != words.UNKNOWN]

    def _training_facts(self) -> list[tuple[str, str]]:
        """What one whole training takes, and the warm-up where nothing is compiled, where that is longer."""
        found = self.result.get("training_seconds") or {}
        before, after = words.real(found.get("reference")), words.real(found.get("plan"))
        told = []
        if before is not None and after is not None:
            steps = words.number(self.result.get("job_steps"))
            name = f"steps and warm-up of one training ({steps} steps)"
            told.append((name, f"{words.duration(before)} → {words.duration(after)}"))
        warm, cold = (words.real(self.result.get(f"{key}warmup_seconds")) for key in ("", "cold_"))
        if warm is not None and cold is not None and cold > 2 * warm + 1:
            name = f"warm-up on this machine; {words.duration(cold)} where nothing is compiled yet"
            told.append((name, words.duration(warm)))
        return told


def _ratio(document: Any) -> Ratio | None:
    if not isinstance(document, dict):
        return None
    values = [words.real(document.get(key)) for key in ("estimate", "low", "high")]
    estimate, low, high = values
    return Ratio(estimate, low, high) if None not in values else None  # type: ignore[arg-type]


def _break_even(trial: Trial) -> float | None:
    """Steps until the warm-up is gained back; infinite for a slower trial, None where noise hides it."""
    if trial.warmup_seconds is None or trial.ratio is None or trial.role.startswith("baseline"):
        return None
    if trial.ratio.low <= 1 <= trial.ratio.high:
        return None
    saved = statistics.median(reference - candidate for reference, candidate in trial.pairs)
    return trial.warmup_seconds / saved if saved > 0 else math.inf
