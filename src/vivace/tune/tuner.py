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
from vivace.engine.launch import Source
from vivace.errors import AnswerIsNo, ChildFailed, InputError, Refused
from vivace.inspect import inspect
from vivace.inspect.gather import require_torch
from vivace.job import Job
from vivace.ledger import Ledger, Ratio, Trial
from vivace.machine import Machine
from vivace.measure.paired import UNSTEADY, without_loader
from vivace.plan import Plan
from vivace.registry import find
from vivace.report import report
from vivace.report.words import size
from vivace.technique import Numerics, Stage
from vivace.tune.bench import Bench, OnEvent, one
from vivace.tune.budget import parse_memory
from vivace.tune.folder import claim_folder
from vivace.tune.loading import sentence
from vivace.tune.result import Result
from vivace.tune.search import Search
from vivace.verify.equivalence import judge_by_metric
from vivace.verify.verdict import Verdict, Verifier

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

    Ctrl-C ends the search and keeps the best so far (`Result.interrupted`). Raises JobError where the job
    itself is at fault, FolderError where `out` cannot be used, AnswerIsNo where nothing fits into `memory`.
    """
    require_torch()
    begin = time.monotonic()
    seconds, limit, allowed = parse_budget(budget), parse_memory(memory), parse_allow(allow)
    folder = claim_folder(Path(out))
    machine, ledger = inspect(), Ledger(folder / "ledger.jsonl")
    tell = on_event or _silent
    tell("phase", {"name": "checking the job"})
    bench = Bench(Source(job), machine, ledger, tell, allow=allowed, memory=limit)
    try:
        profile = bench.check()
        document = _run_document(bench, machine, seconds, allowed, limit, command)
        bench.recall()
        ledger.append("run", document)
        ledger.append("profile", dataclasses.asdict(profile))
        return _Tuning(bench, machine, folder, begin, seconds).run(profile)
    finally:
        bench.close()


class _Tuning:
    """One run of `tune`, after the job has been checked."""

    def __init__(self, bench: Bench, machine: Machine, folder: Path, begin: float, seconds: float) -> None:
        self.bench, self.machine, self.folder = bench, machine, folder
        self.begin, self.seconds = begin, seconds
        self.interrupted = False
        self.reason = ""
        self.verdict: Verdict | None = None
        self.baselines: dict[str, float | None] = {}
        self.notes: dict[str, str] = {}
        self.limit = ""  # of loading

    def run(self, profile: Any) -> Result:
        bench = self.bench
        search = None
        plan, speedup = bench.base, one()
        self.limit = profile.features.get("loading_limit", "")
        if self.limit:
            bench.on_event("notice", {"text": self.limit})
        try:
            bench.on_event("phase", {"name": "measuring the baselines"})
            bench.open_reference()
            step = bench.reference.step_seconds
            self._baselines(profile.device)
            if bench.memory is not None:
                bench.measure_batches(0.05 * self.seconds)
            reserve = min(0.45 * self.seconds, self._verify_seconds(step) + 21 + 50 * step)
            search = Search(bench, profile, self.machine, deadline=self.begin + self.seconds - reserve)
            bench.on_event("phase", {"name": "searching"})
            search.run()
            plan, speedup = self._settle(search)
        except KeyboardInterrupt:
            self.interrupted = True
            if search is not None:
                plan, speedup = search.best, search.best_ratio
        return self._finish(plan, speedup, search)

    def _baselines(self, device: str) -> None:
        bench = self.bench
        if self.seconds >= BUDGETS["balanced"]:
            bench.input_pipeline["reference"] = without_loader(bench.reference, seconds=0.02 * self.seconds)
        default = bench.measure(
            bench.base, seconds=0.05 * self.seconds, role="baseline_default", strict=False
        )
        reference = sorted(pair[0] for pair in default.pairs)
        size = bench.facts["batch_size"]
        step = reference[len(reference) // 2] if reference else bench.reference.step_seconds
        self.baselines = {"strict_fp32": size / step, "default": default.samples_per_second, "tf32": None}
        if device != "cuda":
            self.notes["tf32"] = "this device has no TF32"
            return
        trial = bench.measure(Plan([find("tf32")()]), seconds=0.05 * self.seconds, role="baseline_tf32")
        self.baselines["tf32"] = trial.samples_per_second
        if trial.reason:
            self.notes["tf32"] = trial.reason

    def _verify_seconds(self, step: float) -> float:
        return min(0.3 * self.seconds, 6 + 300 * step)

    def _settle(self, search: Search) -> tuple[Plan, Ratio]:
        """The fastest plan that keeps its promise and wins in fresh processes too, else the reference."""
        bench = self.bench
        if not search.ranking():
            unsteady = sum(UNSTEADY in trial.reason for trial in bench.trials if trial.techniques)
            noisy = f"; {UNSTEADY} on {unsteady} of the trials" if unsteady else ""
            return self._reference(search, "no technique was faster beyond noise" + noisy)
        judged = list[Plan]()
        reason = ""
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
            if found is None:
                return self._reference(search, reason or broken)
            plan, verdict = found
            bench.on_event("phase", {"name": "confirming"})
            trial = bench.confirm(plan, seconds=max(6.0, self._left()))
            if trial.ratio is not None and (trial.ratio.low > 1.0 or not search.reference_fits):
                self.verdict = verdict
                return plan, trial.ratio
            judged.append(plan)
            reason = f"{plan} was not faster again in fresh processes {trial.reason}".strip()
            if self._left() <= 0:
                return self._reference(search, reason)

    def _first_kept(
        self, verifier: Verifier, search: Search, judged: list[Plan]
    ) -> tuple[tuple[Plan, Verdict] | None, str]:
        """The fastest plan not yet `judged` that keeps its promise; the guilty of others are banned."""
        reason = ""
        while True:
            ranking = [plan for plan in search.ranking() if plan not in judged]
            if not ranking or (judged and self._left() <= 0):
                return None, reason
            plan = ranking[0]
            verdict = self._judge(verifier, plan)
            if verdict.kept:
                return (plan, verdict), ""
            found = "and not the same model: " if verdict.judged else "but "
            reason = reason or f"{plan} was faster, {found}{verdict.reason}"
            judged.append(plan)
            alone = [Plan([technique]) for technique in plan.techniques] if len(plan) > 1 else []
            guilty = {t for one in alone if not self._judge(verifier, one).kept for t in one.techniques}
            search.ban(guilty or set(plan.techniques if len(plan) == 1 else ()), self._left() / 2)

    def _reference(self, search: Search, reason: str) -> tuple[Plan, Ratio]:
        if not search.reference_fits:
            assert self.bench.memory is not None
            peaks = [t.peak_bytes for t in self.bench.trials if t.peak_bytes is not None]
            raise AnswerIsNo(
                f"no plan fits into {size(self.bench.memory)} and keeps its promise; "
                f"the smallest peak measured is {size(min(peaks))}{self.bench.no_blocks}"
            )
        self.reason = reason
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
        if any(technique.card.stage == Stage.COMPILE for technique in plan.techniques):
            _leave_compiled(Path(bench.environment["TORCHINDUCTOR_CACHE_DIR"]))
        chosen = [t for t in bench.trials if t.plan_id == plan.id and t.ratio is not None]
        result = Result(
            plan=plan,
            plan_path=str(path),
            speedup=speedup,
            baselines=self.baselines,
            baseline_notes=self.notes,
            verdict=self.verdict,
            break_even_steps=_break_even(chosen) if len(plan) and chosen else None,
            input_pipeline=bench.input_pipeline,
            waterfall=search.waterfall(plan) if search else [],
            trials=bench.trials,
            report_path=str(self.folder / "report.html"),
            seconds=time.monotonic() - self.begin,
            interrupted=self.interrupted,
            reason=self.reason,
            reference=bench.base,
            has_metric=bench.facts["has_metric"],
            job_steps=bench.facts["epochs"] * (bench.facts["steps_per_epoch"] or 0) or None,
            loading=sentence(self.limit, bench.trials),
        )
        document = {key: value for key, value in result.to_dict().items() if key != "trials"}
        bench.ledger.append("result", document)
        report(self.folder)
        return result


def _leave_compiled(cache: Path) -> None:
    """Copy what was compiled to where torch looks for it, so that `train` need not compile it again."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
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


def _break_even(trials: list[Trial]) -> int | None:
    """Steps after which the longest warm-up of a plan's trials has paid for itself; None where never."""
    pairs = trials[-1].pairs
    reference = sorted(pair[0] for pair in pairs)[len(pairs) // 2]
    candidate = sorted(pair[1] for pair in pairs)[len(pairs) // 2]
    if candidate >= reference:
        return None
    return int(max(trial.warmup_seconds or 0.0 for trial in trials) / (reference - candidate)) + 1


def _silent(kind: str, payload: dict[str, Any]) -> None:
    """The default where nobody listens."""
