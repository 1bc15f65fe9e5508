"""The public function: check the job, search, verify, confirm, report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import vivace
from vivace.errors import AnswerIsNo, ChildFailed, InputError, Refused
from vivace.events import OnEvent, teller
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.ledger import Code, Ledger, Outcome, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.measuring.paired import without_loader
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.reporting import report
from vivace.technique import Numerics, registry
from vivace.torch_internals.compiler import cache_folder
from vivace.training.stopping import ends_like_ctrl_c
from vivace.tuning.bench import Bench, one
from vivace.tuning.budget import parse_memory
from vivace.tuning.ending import ending
from vivace.tuning.folder import LONG_PLAN, claim_folder
from vivace.tuning.loading import sentence
from vivace.tuning.objective import Length
from vivace.tuning.result import LongPlan, Result
from vivace.tuning.search import Search
from vivace.verifying.equivalence import judge_by_metric
from vivace.verifying.verdict import Verdict
from vivace.verifying.verifier import Verifier
from vivace.words import duration, size

SEMANTICS_SEEDS = 3
BUDGETS = {"fast": 120.0, "balanced": 600.0, "max": 3600.0}


def tune(
    job: Job | str,
    *,
    budget: str | float = "balanced",
    memory: str | int | None = None,
    allow: str = "rounding",
    out: str | Path = "runs/tune",
    on_event: OnEvent | None = None,
    command: str | None = None,
) -> Result:
    """Find the fastest plan for `job` on this machine that keeps its promise; the empty plan where nothing
    wins.

    Args:
        job: a Job, or a reference such as ``train.py:job``.
        budget: ``fast`` (2 minutes), ``balanced`` (10), ``max`` (60), or seconds; kept within 10 %.
        memory: the largest peak a plan may need, such as ``"20GiB"`` or bytes; ``"auto"``: what is free on
            the device, less a tenth. Measured on the largest batch. A job that does not fit as it is starts
            from the fastest of a few smaller plans that does (`Result.reference`).
        allow: the largest change of numbers: ``exact``, ``rounding`` or ``semantics``.
        out: folder for plan, ledger and report. An earlier run there on the same job and machine is built
            upon.
        on_event: called with a `vivace.Event` as the search goes on.

    Ctrl-C or SIGTERM ends the search and keeps the best so far (`Result.interrupted`). Raises JobError where
    the job itself is at fault, FolderError where `out` cannot be used, AnswerIsNo where nothing fits into
    `memory`.
    """
    require_torch()
    begin = time.monotonic()
    seconds, limit, allowed = parse_budget(budget), parse_memory(memory), parse_allow(allow)
    folder, source = claim_folder(Path(out)), Source(job)
    machine, ledger = inspect(), Ledger(folder / "ledger.jsonl")
    tell = teller(on_event)
    if machine.passed_over:
        tell("notice", {"text": machine.passed_over})
    tell("phase", {"name": "checking the job"})
    bench = Bench(source, machine, ledger, tell, allow=allowed, memory=limit)
    with ends_like_ctrl_c(), contextlib.closing(bench):
        profile = bench.check()
        document = _run_document(bench, machine, seconds, allowed, limit, command)
        bench.recall()
        ledger.append("run", document)
        ledger.append("profile", dataclasses.asdict(profile))
        return _Tuning(bench, machine, folder, begin, seconds).run(profile)


class _Tuning:
    """One run of `tune`, after the job has been checked."""

    def __init__(self, bench: Bench, machine: Machine, folder: Path, begin: float, seconds: float) -> None:
        self.bench, self.machine, self.folder = bench, machine, folder
        self.begin, self.seconds = begin, seconds
        self.interrupted = False
        self.outcome, self.reason = Outcome.NOTHING_TRIED, ""
        self.verdict: Verdict | None = None
        self.baselines: dict[str, float | None] = {}
        self.notes: dict[str, str] = {}
        self.limit = ""  # of loading
        self.long_plan: LongPlan | None = None

    def run(self, profile: Profile) -> Result:
        bench = self.bench
        search = None
        plan, speedup = bench.base, one()
        self.limit = profile.features.get("loading_limit", "")
        if self.limit:
            bench.on_event("notice", {"text": self.limit})
        try:
            bench.on_event("phase", {"name": "measuring the baselines"})
            opening = time.monotonic()
            bench.open_reference()
            cost = time.monotonic() - opening + 0.05 * self.seconds  # of a baseline
            step = bench.reference.step_seconds
            size = bench.facts["batch_size"]
            self.baselines = {"strict_fp32": size / step, "default": None, "tf32": None}
            short = self.seconds < BUDGETS["balanced"]
            if not short:
                bench.input_pipeline["reference"] = without_loader(
                    bench.reference, seconds=0.02 * self.seconds
                )
                self._baselines(profile.device)
            if bench.memory is not None:
                bench.measure_batches(0.05 * self.seconds)
            search = self._search(profile, kept_for_baselines=min(cost, 0.1 * self.seconds) if short else 0.0)
            bench.on_event("phase", {"name": "searching"})
            search.run()
            if short:  # what may help comes before what it is compared with
                self._late_baselines(profile.device, cost)
            plan, speedup = self._settle(search)
        except KeyboardInterrupt:
            self.interrupted = True
            self.outcome, self.reason = Outcome.INTERRUPTED, ""
            if search is not None and search.ranking():
                plan = search.ranking()[0]
                speedup = search.measured[plan.id].ratio or one()
        return self._finish(plan, speedup, search)

    def _search(self, profile: Profile, *, kept_for_baselines: float) -> Search:
        step = self.bench.reference.step_seconds
        reserve = min(0.45 * self.seconds, self._verify_seconds(step) + 21 + 50 * step)
        return Search(
            self.bench,
            profile,
            self.machine,
            end=self.begin + self.seconds,
            reserve=reserve + kept_for_baselines,
            steps=self._job_steps(),
        )

    def _late_baselines(self, device: str, cost: float) -> None:
        """The baselines after the search, where one costs less than a tenth of the budget, and it is left."""
        if cost <= 0.1 * self.seconds and cost < self._left():
            self.bench.on_event("phase", {"name": "measuring the baselines"})
            self._baselines(device)
        else:
            self.notes["default"] = "the budget is too short to measure it"

    def _job_steps(self) -> int | None:
        """Of a whole training, where its length is known."""
        facts = self.bench.facts
        return facts["epochs"] * (facts["steps_per_epoch"] or 0) or None

    def _baselines(self, device: str) -> None:
        bench = self.bench
        default = bench.measure(
            bench.base, seconds=0.05 * self.seconds, role="baseline_default", strict=False
        )
        reference = sorted(pair[0] for pair in default.pairs)
        size = bench.facts["batch_size"]
        step = reference[len(reference) // 2] if reference else bench.reference.step_seconds
        self.baselines = {"strict_fp32": size / step, "default": default.samples_per_second, "tf32": None}
        if device != "cuda":
            self.notes["tf32"] = "this device has no TF32"
        for cls in registry.baselines(device):
            name = cls.card.baseline
            trial = bench.measure(Plan([cls()]), seconds=0.05 * self.seconds, role=f"baseline_{name}")
            self.baselines[name] = trial.samples_per_second
            if trial.reason:
                self.notes[name] = trial.reason

    def _verify_seconds(self, step: float) -> float:
        return min(0.3 * self.seconds, 6 + 300 * step)

    def _settle(self, search: Search) -> tuple[Plan, Ratio]:
        """The fastest plan that keeps its promise and wins in fresh processes too, else the reference."""
        bench = self.bench
        self._warm_again(search)
        if not search.ranking():
            return self._reference(search, *self._none_found(search))
        judged = list[Plan]()
        last: tuple[Outcome, str] | None = None
        while True:
            bench.on_event("phase", {"name": "verifying"})
            bench.park()
            with Verifier(
                bench.source,
                self.machine,
                log=bench.log,
                environment=bench.environment,
                reference=bench.base,
            ) as verifier:
                found, broken = self._first_kept(verifier, search, judged)
                long_verified = found is not None and self._long_kept(verifier, search, found[0])
            if found is None:
                return self._reference(search, *(last or broken))
            plan, verdict = found
            bench.on_event("phase", {"name": "confirming"})
            trial = bench.confirm(plan, seconds=max(6.0, self._left()))
            if trial.ratio is not None and search.wins(trial.ratio, trial.warmup_seconds or 0.0):
                self.verdict = verdict
                self.outcome = Outcome.FASTER if trial.ratio.low > 1.0 else Outcome.FITS
                self._name_long_plan(search, plan, long_verified)
                return plan, trial.ratio
            judged.append(plan)
            last = _not_confirmed(trial, search)
            if self._left() <= 0:
                return self._reference(search, *last)

    def _first_kept(
        self, verifier: Verifier, search: Search, judged: list[Plan]
    ) -> tuple[tuple[Plan, Verdict] | None, tuple[Outcome, str]]:
        """The first plan not yet `judged` that keeps its promise; the guilty of others are banned.

        Where there is none, the outcome and the reason are of the first that did not.
        """
        why: tuple[Outcome, str] | None = None
        while True:
            ranking = [plan for plan in search.ranking() if plan not in judged]
            if not ranking or (judged and self._left() <= 0):
                return None, why or (Outcome.NOTHING_HELPS, "")
            plan = ranking[0]
            verdict = self._judge(verifier, plan)
            if verdict.kept:
                return (plan, verdict), (Outcome.FASTER, "")
            found = "and not the same model: " if verdict.judged else "but "
            outcome = Outcome.NONE_KEPT if verdict.judged else Outcome.COULD_NOT_MEASURE
            why = why or (outcome, f"{plan} was faster, {found}{verdict.reason}")
            judged.append(plan)
            alone = [Plan([technique]) for technique in plan.techniques] if len(plan) > 1 else []
            guilty = {t for one in alone if not self._judge(verifier, one).kept for t in one.techniques}
            if self.bench.apart:
                verifier.close()
            search.ban(guilty or set(plan.techniques if len(plan) == 1 else ()), self._left() / 2)

    def _warm_again(self, search: Search) -> None:
        """Open the plan with the fastest step again where its warm-up with all compiled decides its rank.

        That is the warm-up which `train` meets on this machine; the first one is met elsewhere.
        """
        plan, leading = search.fastest(), search.ranking()[:1]
        if plan is None or plan in leading or self._left() < 20:
            return
        length, ratio = search.length(), search.measured[plan.id].ratio
        assert ratio is not None
        known = [search.measured[one.id] for one in leading]
        least = [length.seconds(t.ratio, t.warmup_seconds or 0.0) for t in known if t.ratio is not None]
        if length.pays(ratio, 0.0) and all(length.seconds(ratio, 0.0) < seconds for seconds in least):
            self.bench.on_event("phase", {"name": f"warming up again: {plan}"})
            warmup = self.bench.warm_again(plan, seconds=max(20.0, 0.3 * self._left()))
            if warmup is not None:
                search.warm[plan.id] = warmup

    def _none_found(self, search: Search) -> tuple[Outcome, str]:
        """Why no plan is worth verifying; one whose warm-up does not pay is named as one for longer runs."""
        fastest = search.fastest()
        if fastest is None:
            return ending(self.bench.trials, self.seconds)
        trial = search.measured[fastest.id]
        self._name_long_plan(search, self.bench.base, False)
        return Outcome.NOTHING_HELPS, f"{fastest}{_does_not_pay(trial, search)}"

    def _long_kept(self, verifier: Verifier, search: Search, plan: Plan) -> bool:
        """Does a plan with faster steps than `plan` keep its promise? No, where there is no time to ask."""
        fastest = search.fastest()
        if fastest is None or fastest == plan:
            return False
        warmups = 3 * (search.measured[fastest.id].warmup_seconds or 0.0)
        needed = self._verify_seconds(self.bench.reference.step_seconds) + warmups + 20
        if self._left() < needed:
            return False
        verdict = self._judge(verifier, fastest)
        if verdict.judged and not verdict.kept:
            search.banned |= set(fastest.techniques) - set(plan.techniques)
        return bool(verdict.kept)

    def _name_long_plan(self, search: Search, plan: Plan, verified: bool) -> None:
        """Save the plan that wins where the training is longer, if there is one beside `plan`."""
        fastest, length = search.fastest(), search.length()
        if fastest is None or fastest == plan or search.steps is None:
            return
        trial, own = search.measured[fastest.id], search.measured.get(plan.id)
        assert trial.ratio is not None
        later = (trial.ratio, trial.warmup_seconds or 0.0)
        chosen = (own.ratio, own.warmup_seconds or 0.0) if own is not None and own.ratio is not None else None
        steps = length.wins_from(later, chosen) if chosen is not None else length.wins_from(later)
        if steps is not None and steps > search.steps:
            path = self.folder / LONG_PLAN
            fastest.save(path)
            self.long_plan = LongPlan(fastest, str(path), trial.ratio, later[1], steps, verified)

    def _reference(self, search: Search, outcome: Outcome, reason: str) -> tuple[Plan, Ratio]:
        if not search.reference_fits:
            assert self.bench.memory is not None
            measured = [t.peak_bytes for t in self.bench.trials if t.peak_bytes is not None]
            peaks = [self.bench.observed["peak_bytes"], *measured]
            raise AnswerIsNo(
                f"no plan fits into {size(self.bench.memory)} and keeps its promise; "
                f"the smallest peak measured is {size(min(peaks))}{self.bench.no_blocks}"
            )
        self.outcome, self.reason = outcome, reason
        return self.bench.base, one()

    def _judge(self, verifier: Verifier, plan: Plan) -> Verdict:
        step = self.bench.reference.step_seconds
        seconds = max(3.0, min(self._left() - 10, self._verify_seconds(step)))
        try:
            verdict = verifier.judge(plan, seconds=seconds)
        except (ChildFailed, Refused) as error:
            reason = f"it could not be verified: {error}"
            verdict = Verdict(None, plan.promise.name.lower(), 0.0, 0.0, 0, 0, reason)
        if verdict.promise == Numerics.SEMANTICS.name.lower():
            if self.bench.apart:
                verifier.close()
            verdict = self._judge_semantics(plan, verdict)
        self.bench.ledger.append("verdict", {"plan": plan.to_dict(), **verdict.to_dict()})
        self.bench.on_event("verdict", {"plan": str(plan), "verdict": verdict})
        return verdict

    def _judge_semantics(self, plan: Plan, verdict: Verdict) -> Verdict:
        """By the metric over a few seeds, where the job has one and the budget lets it train to the end."""
        facts, step = self.bench.facts, self.bench.reference.step_seconds
        needed = 2 * SEMANTICS_SEEDS * facts["epochs"] * (facts["steps_per_epoch"] or math.inf) * step
        if facts["has_metric"] and needed < self._left():
            return judge_by_metric(self.bench.source, plan, verdict, seeds=SEMANTICS_SEEDS, margin=None)
        lacks = (
            f"the budget is too short for it ({needed:.0f} s)" if facts["has_metric"] else "the Job has none"
        )
        reason = f"it promises SEMANTICS, which only the metric can judge, and {lacks}"
        return dataclasses.replace(verdict, kept=None, reason=reason)

    def _left(self) -> float:
        return self.begin + self.seconds - time.monotonic()

    def _finish(self, plan: Plan, speedup: Ratio, search: Search | None) -> Result:
        bench = self.bench
        path = self.folder / "plan.toml"
        plan.save(path)
        if self.long_plan is None:
            (self.folder / LONG_PLAN).unlink(missing_ok=True)
        if any(technique.card.compiles for technique in plan.techniques):
            _leave_compiled(Path(bench.environment["TORCHINDUCTOR_CACHE_DIR"]))
        chosen = [t for t in bench.trials if len(plan) and t.plan_id == plan.id and t.ratio is not None]
        warmups = [trial.warmup_seconds or 0.0 for trial in chosen]
        length = search.length() if search is not None else None
        result = Result(
            plan=plan,
            plan_path=str(path),
            speedup=speedup,
            baselines=self.baselines,
            baseline_notes=self.notes,
            verdict=self.verdict,
            break_even_steps=_break_even(chosen[-1]) if chosen else None,
            warmup_seconds=warmups[-1] if chosen else None,
            cold_warmup_seconds=max(warmups) if chosen else None,
            training_seconds=_training_seconds(length, speedup, warmups[-1]) if chosen and length else {},
            long_plan=self.long_plan,
            input_pipeline=bench.input_pipeline,
            waterfall=search.waterfall(plan, speedup) if search else [],
            trials=bench.trials,
            report_path=str(self.folder / "report.html"),
            seconds=time.monotonic() - self.begin,
            outcome=self.outcome,
            interrupted=self.interrupted,
            reason=self.reason,
            reference=bench.base,
            has_metric=bench.facts["has_metric"],
            metric_data=bench.facts["metric_data"],
            job_steps=self._job_steps(),
            loading=sentence(self.limit, bench.trials),
        )
        document = {key: value for key, value in result.to_dict().items() if key != "trials"}
        bench.ledger.append("result", document)
        report(self.folder)
        return result


def _leave_compiled(cache: Path) -> None:
    """Copy what was compiled to where torch looks for it, so that `train` need not compile it again."""
    usual = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_folder()
    with contextlib.suppress(OSError):  # a full disk costs only the time that this would spare
        shutil.copytree(cache, usual, dirs_exist_ok=True)


def parse_budget(budget: str | float) -> float:
    """Seconds of a budget word or number. Raises InputError."""
    if isinstance(budget, str) and budget in BUDGETS:
        return BUDGETS[budget]
    try:
        seconds = float(budget)
    except ValueError:
        seconds = 0.0
    if not 5 <= seconds < float("inf"):
        raise InputError(f"the budget is {budget!r}; it must be fast, balanced, max, or seconds from 5 on")
    return seconds


def parse_allow(allow: str) -> Numerics:
    """The promise of a word. Raises InputError."""
    if allow.upper() not in Numerics.__members__:
        raise InputError(f"allow is '{allow}'; it must be exact, rounding or semantics")
    return Numerics[allow.upper()]


def _run_document(
    bench: Bench, machine: Machine, seconds: float, allow: Numerics, memory: int | None, command: str | None
) -> dict[str, Any]:
    return {
        "command": command or f"vivace.tune(job, budget={seconds:.0f}, allow='{allow.name.lower()}')",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": vivace.__version__,
        "machine": machine.to_dict(),
        "job": {"name": bench.source.name, **bench.facts},
        "budget_seconds": seconds,
        "allow": allow.name.lower(),
        "memory_bytes": memory,
    }


def _not_confirmed(trial: Trial, search: Search) -> tuple[Outcome, str]:
    """Why a plan that won in the search is not the result."""
    plan = Plan.from_dict(trial.techniques)
    if trial.ratio is None:
        steady = trial.code != Code.UNSTEADY
        outcome = Outcome.NOTHING_HELPS if steady else Outcome.COULD_NOT_MEASURE
        return outcome, f"{plan} was faster, and could not be confirmed: {trial.reason}"
    if trial.ratio.low > 1.0:
        return Outcome.NOTHING_HELPS, f"{plan}{_does_not_pay(trial, search)}"
    return Outcome.NOTHING_HELPS, f"{plan} was not faster again in fresh processes"


def _does_not_pay(trial: Trial, search: Search) -> str:
    return (
        f" has faster steps, and its warm-up of {duration(trial.warmup_seconds)} does not pay in the "
        f"{search.steps or 0:,} steps of this training"
    )


def _training_seconds(length: Length, ratio: Ratio, warmup_seconds: float) -> dict[str, float]:
    """A whole training's steps under the reference, and with the warm-up under a plan."""
    if length.steps is None:
        return {}
    reference = length.steps * length.step_seconds
    return {"reference": reference, "plan": warmup_seconds + reference / ratio.counts}


def _break_even(trial: Trial) -> int | None:
    """Steps after which a trial's warm-up has paid for itself; None where never."""
    pairs = trial.pairs
    reference = sorted(pair[0] for pair in pairs)[len(pairs) // 2]
    candidate = sorted(pair[1] for pair in pairs)[len(pairs) // 2]
    if candidate >= reference:
        return None
    return int((trial.warmup_seconds or 0.0) / (reference - candidate)) + 1
