"""The public function: check the job, search, verify, confirm, report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import vivace
from vivace.errors import AnswerIsNo, InputError, RankLost, Refused, VivaceError
from vivace.events import OnEvent, Tell, teller
from vivace.files import LOCK, output_folder, take_lock
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job, require_job
from vivace.ledger import Code, Ledger, Outcome, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.measuring.budget import BUDGETS, parse_budget
from vivace.measuring.pace import compiling_pace, compiling_seconds, learn_pace
from vivace.pages.notebook import listening
from vivace.plan import Plan
from vivace.processes.launch import Source, enough_memory_to
from vivace.reporting import report
from vivace.technique import Numerics, registry
from vivace.torch_internals.compiler import cache_folder
from vivace.training.crew import Company, company_of, lead_or_follow, num_ranks
from vivace.training.stopping import ends_like_ctrl_c
from vivace.tuning.bench import ENDS, Bench
from vivace.tuning.budget import parse_memory
from vivace.tuning.candidates import candidates, known_best, waits_for_data
from vivace.tuning.loading import sentence
from vivace.tuning.objective import ONE, Beside, Length
from vivace.tuning.ranks import here, joined, require_searchable
from vivace.tuning.requests import (
    Answer,
    ChooseBlocks,
    Confirm,
    Done,
    LeaveOut,
    Measure,
    MeasureBaselines,
    Request,
    Verify,
    WarmAgain,
)
from vivace.tuning.result import LongPlan, Result, waterfall
from vivace.tuning.search import Search
from vivace.tuning.setting import Conclusion, Setting
from vivace.tuning.times import (
    PATIENCE_SECONDS,
    auto_budget,
    beforehand,
    check_length,
    late,
    least_seconds,
    too_short,
)
from vivace.verifying.equivalence import judge_by_metric
from vivace.verifying.verdict import Verdict
from vivace.verifying.verifier import Verifier
from vivace.words import real, size

SEMANTICS_SEEDS = 3
LATE = 0.1  # of the budget: an end so much later is said before
LONG_PLAN = "plan-long.toml"
OWN = ("ledger.jsonl", "plan.toml", LONG_PLAN, "report.html", "children.log", LOCK)


def tune(
    job: Job | str,
    *,
    budget: str | float = "auto",
    runs: int = 1,
    steps: int | None = None,
    memory: str | int | None = None,
    allow: str = "rounding",
    out: str | Path = "runs/tune",
    on_event: OnEvent | None = None,
    command: str | None = None,
) -> Result:
    """Find the fastest plan for `job` on this machine that keeps its promise; else the empty plan.

    Args:
        job: a Job, or a reference such as ``train.py:job``.
        budget: ``auto``, ``fast`` (2 minutes), ``balanced`` (10), ``max`` (60), a time such as ``5m``, or
            seconds; it is for the search, and verifying and confirming what it finds late go on beyond it.
            ``auto`` is a tenth of the training's length, up to an hour; where that is less than a minute
            nothing is searched (`Outcome.TOO_SHORT`), unless there is a limit of `memory`.
        runs: how often the job will be trained with the plan; ``auto`` takes a tenth of all of them, and what
            compiles has to do so in the first one only.
        steps: how long one training is, where its data have no length, or another is meant than the Job's.
        memory: the largest peak a plan may need, such as ``"20GiB"`` or bytes; ``"auto"``: what is free,
            less a tenth. Each of several ranks may need as much. A job that does not fit as it is starts
            from a smaller plan (`Result.reference`).
        allow: the largest change of numbers: ``exact``, ``rounding`` or ``semantics``.
        out: folder for plan, ledger and report; an earlier run there on the same job is built upon.
        on_event: called with a `vivace.Event` as the search goes on.

    Started by torchrun, all ranks together train under each plan, which holds ``ddp``, with their shares of
    every batch; rank 0 searches, and every rank returns the result.

    Ctrl-C or SIGTERM ends the search and keeps the best so far (`Result.interrupted`). Raises JobError of the
    job's own faults, FolderError where `out` cannot be used, AnswerIsNo where nothing fits into `memory`.
    """
    require_torch()
    require_job(job)
    begin, source = time.monotonic(), Source(job)

    def lead() -> dict[str, Any]:
        given, limit, allowed = parse_budget(budget), parse_memory(memory), parse_allow(allow)
        check_length(steps, runs)
        if company.world_size > 1:
            require_searchable(company.world_size, allowed)
        call = command or as_called(budget, runs, steps, memory, allow, out)
        folder = output_folder(Path(out), OWN)
        if not Ledger(folder / "ledger.jsonl").read("run"):  # which tells a search, also where it was copied
            output_folder(folder, OWN, locked=True)
        asked = _Asked(given, limit, allowed, runs, steps, folder, call)
        found.append(_tuned(asked, company, teller(listening(on_event)), begin))
        return found[0].to_dict()

    found = list[Result]()
    with ends_like_ctrl_c(once=num_ranks() > 1), company_of(source) as company:
        document = lead_or_follow(company, lead)
        return found[0] if found else _of_rank_0(document, source)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What `tune` was asked for, checked; `budget` is None for ``auto``."""

    budget: float | None
    memory: int | None
    allow: Numerics
    runs: int
    steps: int | None
    folder: Path
    command: str


def _of_rank_0(document: dict[str, Any], source: Source) -> Result:
    """The result on another rank."""
    if not set(document["plan"]) <= set(registry.names()):
        source.load()  # it registers techniques of its own
    return Result.from_dict(document)


def _tuned(asked: _Asked, company: Company, tell: Tell, begin: float) -> Result:
    folder, steps, limit = asked.folder, asked.steps, asked.memory
    machine, ledger = inspect(), Ledger(folder / "ledger.jsonl")
    if machine.passed_over:
        tell("notice", {"text": machine.passed_over})
    tell("phase", {"name": "checking the job"})
    with take_lock(folder, "tune"), contextlib.ExitStack() as stack:
        bench = Bench(company.source, machine, ledger, tell, allow=asked.allow, memory=limit, company=company)
        stack.callback(bench.close)
        profile = bench.check()
        bench.facts |= {"steps": steps, "runs": asked.runs}
        length, given = job_length(bench.facts, profile), asked.budget
        seconds = given if given is not None else auto_budget(length)
        if given is None and limit is not None:  # whether it fits is worth a search in any case
            seconds = max(seconds, BUDGETS["fast"])
        document = _run_document(bench, machine, seconds, asked.allow, limit, asked.command)
        bench.recall()
        ledger.append("run", document)
        ledger.append("profile", dataclasses.asdict(profile))
        if bench.law:
            ledger.append("ranks", bench.law)
        tuning = _Tuning(bench, machine, profile, folder, begin, seconds, auto=given is None)
        unlimited = given is None and limit is None
        if unlimited and length.steps is not None and seconds < least_seconds(length.step_seconds):
            return tuning.finish(Conclusion(bench.base, ONE, Outcome.TOO_SHORT, too_short(length)))
        if told := beforehand(length, seconds, given=given is not None):
            tell("notice", {"text": told})
        return tuning.run()


class _Tuning:
    """One run of `tune`, after the job has been checked: does what the search asks for."""

    def __init__(
        self,
        bench: Bench,
        machine: Machine,
        profile: Profile,
        folder: Path,
        begin: float,
        seconds: float,
        *,
        auto: bool,
    ) -> None:
        self.bench, self.machine, self.profile, self.folder = bench, machine, profile, folder
        self.begin, self.seconds, self.auto = begin, seconds, auto
        self.interrupted = False
        self.search: Search | None = None
        self.asked: Request | None = None  # what the search asked for last
        self.verifier: Verifier | None = None
        self.phase, self.told_late = "", 0.0
        self.foretold_compiling: float | None = None  # seconds, if nothing is known of this machine's pace
        size = bench.facts["batch_size"]
        self.baselines: dict[str, float | None]
        self.baselines = {"strict_fp32": size / profile.step_seconds, "default": None, "tf32": None}
        self.notes: dict[str, str] = {}
        self.limit = profile.features.get("loading_limit", "")
        if self.limit:
            bench.on_event("notice", {"text": self.limit})
        if fault := profile.features.get("metric_fault"):
            text = f"{fault}; train would stop at its first evaluation"
            bench.on_event("notice", {"text": text})

    def run(self) -> Result:
        """Search as long as it asks, and write down what it found.

        Raises AnswerIsNo where nothing fits, and RankLost where a rank does not answer any more.
        """
        conclusion = Conclusion(self.bench.base, ONE, Outcome.NOTHING_TRIED)
        try:
            self.search = self._begun()
            try:
                while (request := self.search.ask()) is not None:
                    self.asked = request
                    self.search.tell(self._done(request))
                    if self.bench.company.lost:
                        raise RankLost(self.bench.company.lost)
            finally:
                self._close_verifier()
            conclusion = self.search.conclusion
            unmeasured = conclusion.outcome == Outcome.COULD_NOT_MEASURE
            if conclusion.verdict is None and not self.search.reference_fits and not unmeasured:
                raise self._nothing_fits()
        except KeyboardInterrupt:
            self.interrupted = True
            conclusion = self._so_far()
        except RankLost as lost:
            if self.search is None:
                raise
            path = self.finish(self._so_far()).plan_path
            raise RankLost(f"{lost}: the search ended; the best so far stands in '{path}'") from None
        return self.finish(conclusion)

    def _so_far(self) -> Conclusion:
        """What a search that ends before its time can say; a trial that stands in the ledger counts, though
        the end came before the search had heard of it.
        """
        if self.search is None:
            return Conclusion(self.bench.base, ONE, Outcome.INTERRUPTED)
        wanted = self.asked.plan.id if isinstance(self.asked, Measure) else ""
        for done in self.bench.trials[-1:]:
            if done.plan_id == wanted and not any(told is done for told in self.search.trials):
                self.search.tell(done)
        left = self.search.not_rejected()
        if not left:
            return Conclusion(self.bench.base, ONE, Outcome.INTERRUPTED)
        return Conclusion(left[0], self.search.measured[left[0].id].ratio or ONE, Outcome.INTERRUPTED)

    def _begun(self) -> Search:
        """Open the reference, rule out what cannot act, and begin to search; the ledger says with what."""
        bench, profile = self.bench, self.profile
        self._enter("opening the reference")
        opening = time.monotonic()
        with enough_memory_to("train a few steps of the job as it is"):
            bench.open_reference()
        opening = time.monotonic() - opening
        self.baselines["strict_fp32"] = bench.facts["batch_size"] / bench.reference.step_seconds
        if bench.memory is not None and bench.company.world_size == 1:
            bench.measure_batches(0.05 * self.seconds)
        self._enter("searching")
        offered, ruled_out = candidates(
            profile, self.machine, allow=bench.allow, memory=bench.memory, unknown=bench.only_here
        )
        for one in ruled_out:
            bench.refuse(Plan([one.technique]), one.reason, Code.RULED_OUT, one.predicted)
        length = job_length(bench.facts, profile)
        operators = profile.features.get("distinct_operators", 0)
        foretold = compiling_seconds(operators, self.machine.num_cores)
        if operators and bench.company.world_size == 1:  # ranks compile at the same time
            self.foretold_compiling = foretold
        setting = Setting(
            candidates=tuple(offered),
            budget_seconds=self.seconds,
            left_seconds=self.begin + self.seconds - time.monotonic(),
            step_seconds=bench.reference.step_seconds,
            opening_seconds=opening,
            peak_bytes=bench.observed["peak_bytes"],
            base=bench.base,
            needed=bench.needed,
            auto=self.auto,
            memory=bench.memory,
            steps=length.steps,
            epoch_steps=length.epoch_steps,
            runs=length.runs,
            beside=dataclasses.replace(length.beside, warmup=bench.reference.warmup_seconds),
            first=known_best(bench.known.values(), offered, bench.allow, bench.needed.names),
            feeds_first=waits_for_data(profile),
            num_baselines=1 + len(registry.baselines(profile.device)),
            compiling_seconds=foretold * compiling_pace(self.machine.fingerprint),
        )
        bench.ledger.append("search", setting.to_dict())
        self.notes["default"] = "the budget is too short to measure it"
        return Search(setting)

    def _done(self, request: Request) -> Answer:
        """Do what the search asks for."""
        bench, begin = self.bench, time.monotonic()
        together = bench.company.world_size > 1  # whose children are not to wait for each other idly
        if not isinstance(request, Verify) and (bench.apart or together or isinstance(request, Confirm)):
            self._close_verifier()
        match request:
            case Measure(plan, seconds, comparing, predicted, target):
                self._enter("searching")
                return bench.measure(
                    plan, seconds=seconds, comparing=comparing, predicted=predicted, target=target
                )
            case LeaveOut(plan, reason, predicted, code):
                return self._left_out(plan, reason, predicted, code)
            case Confirm(plan, seconds, round_seconds):
                self._enter("confirming")
                return bench.confirm(plan, seconds=seconds, round_seconds=round_seconds)
            case Verify():
                self._enter("verifying")
                self._tell_late(request)
                return self._judged(request)
        chosen, warmup = None, None
        match request:
            case ChooseBlocks(seconds):
                chosen = bench.choose_blocks(seconds)
            case WarmAgain():
                self._enter(f"warming up again: {request.plan}")
                warmup = bench.warm_again(request.plan, seconds=request.seconds)
            case MeasureBaselines(seconds, comparing):
                self._enter("measuring the baselines")
                self._measure_baselines(seconds, comparing)
        done = Done(time.monotonic() - begin, chosen, warmup)
        bench.ledger.append("done", {"asked": type(request).__name__, **done.to_dict()})
        return done

    def _tell_late(self, request: Verify) -> None:
        """Where verifying begins whose end, confirmed, is long after the budget, and after what was told."""
        assert self.search is not None
        beyond = self.search.times.settling_at_least(request.plan, request.more) - request.left
        if beyond > self.told_late + LATE * self.seconds:
            self.told_late = beyond
            self.bench.on_event("notice", {"text": late(beyond)})

    def _left_out(self, plan: Plan, reason: str, predicted: tuple[float, float], code: Code) -> Trial:
        first = not any(trial.code == code for trial in self.bench.trials)
        if self.search is not None and self.search.cannot_pay_more and first:
            text = "the search stops: what is left to try can save less of this training than trying it costs"
            self.bench.on_event("notice", {"text": text})
        return self.bench.refuse(plan, reason, code, predicted)

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.bench.on_event("phase", {"name": phase, "budget_seconds": self.seconds})

    def _measure_baselines(self, seconds: float, comparing: float) -> None:
        bench = self.bench
        if self.seconds >= BUDGETS["balanced"]:
            bench.measure_input_pipeline(0.02 * self.seconds)
        measure = partial(bench.measure, seconds=max(PATIENCE_SECONDS, seconds), comparing=comparing)
        default = measure(bench.base, role="baseline_default", strict=False)
        if default.pairs and default.samples_per_second:
            reference, own = (statistics.median(side) for side in zip(*default.pairs, strict=True))
            self.baselines["strict_fp32"] = default.samples_per_second * own / reference
        self.baselines["default"] = self._beside_strict(default)
        self.notes.pop("default")
        if self.profile.device != "cuda":
            self.notes["tf32"] = "this device has no TF32"
        for cls in registry.baselines(self.profile.device):
            name = cls.card.baseline
            trial = measure(joined(bench.base, Plan([cls()])), role=f"baseline_{name}")
            self.baselines[name] = self._beside_strict(trial)
            if trial.reason:
                self.notes[name] = trial.reason

    def _beside_strict(self, trial: Trial) -> float | None:
        """A baseline's samples a second: strict fp32's, times what was measured in turn with it."""
        strict = self.baselines["strict_fp32"]
        return strict * trial.ratio.counts if strict and trial.ratio else trial.samples_per_second

    def _nothing_fits(self) -> AnswerIsNo:
        """The answer, which ledger and report hold too."""
        bench = self.bench
        assert bench.memory is not None
        measured = [trial.peak_bytes for trial in bench.trials if trial.peak_bytes is not None]
        looked_at = bench.no_blocks or ", and the budget ended before its blocks could be looked at"
        reason = (
            f"no plan fits into {size(bench.memory)} and keeps its promise; "
            f"the smallest peak measured is {size(min([bench.observed['peak_bytes'], *measured]))}{looked_at}"
        )
        told = {"plan": {}, "outcome": Outcome.NOTHING_FITS, "reason": reason}
        bench.ledger.append("result", {**told, "seconds": time.monotonic() - self.begin})
        report(self.folder)
        return AnswerIsNo(reason)

    def _judged(self, request: Verify) -> Verdict:
        bench, plan, begin = self.bench, request.plan, time.monotonic()
        bench.park()
        if self.verifier is None:
            self.verifier = Verifier(
                bench.source,
                self.machine,
                log=bench.log,
                environment=bench.environment,
                reference=bench.smaller,
                company=bench.company,
                threads=bench.threads,
            )
        try:
            verdict = self.verifier.judge(plan, seconds=request.seconds)
        except ENDS as error:
            if bench.company.world_size > 1 or not isinstance(error, Refused):
                self._close_verifier()  # the next plan has processes of its own: ranks part at any error
            reason = f"it could not be verified: {error}"
            verdict = Verdict(None, plan.promise.name.lower(), 0.0, 0.0, 0, 0, reason)
        if verdict.promise == Numerics.SEMANTICS.name.lower():
            if bench.apart:
                self._close_verifier()
            verdict = self._judge_semantics(request, verdict)
        verdict = dataclasses.replace(verdict, seconds=time.monotonic() - begin)
        bench.ledger.append("verdict", {"plan": plan.to_dict(), **verdict.to_dict()})
        bench.on_event("verdict", {"plan": str(plan), "verdict": verdict})
        return verdict

    def _judge_semantics(self, request: Verify, verdict: Verdict) -> Verdict:
        """By the metric over a few seeds, where the job has one and the budget lets it train to the end."""
        facts, step = self.bench.facts, self.bench.reference.step_seconds
        whole = facts["epochs"] * (facts["steps_per_epoch"] or 0)  # what is trained, whatever --steps says
        needed = 2 * SEMANTICS_SEEDS * (whole or math.inf) * step
        if facts["has_metric"] and needed < request.left:
            try:
                company = self.bench.company
                found = judge_by_metric(company, request.plan, verdict, seeds=SEMANTICS_SEEDS, margin=None)
            except VivaceError as error:
                reason = f"its metric could not be judged: {error}"
                return dataclasses.replace(verdict, kept=None, reason=reason)
            if found.metric is not None and found.metric["interrupted"]:
                raise KeyboardInterrupt
            return found
        lacks = (
            f"the budget is too short for it ({needed:.0f} s)" if facts["has_metric"] else "the Job has none"
        )
        reason = f"it promises SEMANTICS, which only the metric can judge, and {lacks}"
        return dataclasses.replace(verdict, kept=None, reason=reason)

    def _close_verifier(self) -> None:
        if self.verifier is not None:
            self.verifier.close()
        self.verifier = None

    def _whole(self, speedup: Ratio, trial: Trial | None) -> dict[str, Any]:
        """What a whole training takes with the plan of a trial, and without it; all fields of `Result`."""
        length = job_length(self.bench.facts, self.profile) if self.search is None else self.search.length()
        if length.steps is None:
            return {}
        parts = {"reference": length.reference()}
        if self.search is None or trial is None:
            totals = {"reference": length.reference().seconds}
        else:
            beside = self.search.warmup(trial), trial.evaluating
            totals = length.foretold(speedup, *beside)
            parts["plan"] = length.under(speedup.estimate, *beside)
        told = {name: dataclasses.asdict(part) for name, part in parts.items()}
        return {"training_seconds": totals, "training_parts": told}

    def _save_plans(self, conclusion: Conclusion, path: Path) -> LongPlan | None:
        """Write what was found; where nothing was, as the search ended too soon, an earlier plan stays."""
        if conclusion.plan == self.bench.base and not conclusion.outcome.searched and path.exists():
            self.bench.on_event("notice", {"text": f"'{path}' stays as an earlier search left it"})
            return None
        conclusion.plan.save(path)
        long_path, long_plan = self.folder / LONG_PLAN, conclusion.long_plan
        if long_plan is None:
            long_path.unlink(missing_ok=True)
            return None
        long_plan.plan.save(long_path)
        return dataclasses.replace(long_plan, plan_path=str(long_path))

    def finish(self, conclusion: Conclusion) -> Result:
        """Write plan, ledger and report."""
        bench, plan, speedup = self.bench, conclusion.plan, conclusion.speedup
        path = self.folder / "plan.toml"
        long_plan = self._save_plans(conclusion, path)
        if self.foretold_compiling is not None:
            learn_pace(self.machine.fingerprint, self.foretold_compiling, bench.trials)
        if plan.compiles:
            _leave_compiled(Path(bench.environment["TORCHINDUCTOR_CACHE_DIR"]))
        chosen = [t for t in bench.trials if len(plan) and t.plan_id == plan.id and t.ratio is not None]
        warmups = [trial.warmup_seconds or 0.0 for trial in chosen]
        after = real(chosen[-1].break_even_steps) if chosen else None
        measured = self.search.measured if self.search is not None else {}
        result = Result(
            plan=plan,
            plan_path=str(path),
            speedup=speedup,
            baselines=self.baselines,
            baseline_notes=self.notes,
            verdict=conclusion.verdict,
            break_even_steps=None if after is None else math.ceil(after),
            warmup_seconds=warmups[-1] if chosen else None,
            cold_warmup_seconds=max(warmups) if chosen else None,
            **self._whole(speedup, chosen[-1] if chosen else None),
            long_plan=long_plan,
            input_pipeline=bench.input_pipeline,
            waterfall=waterfall(plan, speedup, measured, bench.needed),
            trials=bench.trials,
            report_path=str(self.folder / "report.html"),
            seconds=time.monotonic() - self.begin,
            outcome=conclusion.outcome,
            interrupted=self.interrupted,
            reason=conclusion.reason,
            reference=bench.base,
            has_metric=bench.facts["has_metric"],
            metric_data=bench.facts["metric_data"],
            job_steps=job_steps(bench.facts),
            loading=sentence(self.limit, bench.trials),
            ranks=bench.company.world_size,
            over_one_rank=here(bench.law)["speedup"] if bench.law else None,
            memory_bytes=bench.memory,
            more_time=conclusion.more_time,
            crowded=bench.threads == 1,
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


def job_length(facts: dict[str, Any], profile: Profile) -> Length:
    """How long a training is by what was seen of it before the search; its first steps are not known yet."""
    steps, epoch_steps, epochs = job_steps(facts), facts["steps_per_epoch"], facts["epochs"]
    if facts.get("steps") and epoch_steps:
        epochs = math.ceil(facts["steps"] / epoch_steps)
    found = profile.features
    beside = Beside(
        start=facts.get("start_seconds", 0.0),
        evaluation=found.get("evaluation_seconds") or 0.0,
        evaluations=epochs if facts["has_metric"] else 0,
        checkpoint=found.get("checkpoint_seconds", 0.0),
        end=found.get("end_seconds", 0.0) + facts.get("exit_seconds", 0.0),
    )
    return Length(steps, profile.step_seconds, beside, facts.get("runs", 1), epoch_steps)


def job_steps(facts: dict[str, Any]) -> int | None:
    """Of a whole training, as the person said or the job shows; None where its length is not known."""
    return facts.get("steps") or facts["epochs"] * (facts["steps_per_epoch"] or 0) or None


def as_called(
    budget: str | float, runs: int, steps: int | None, memory: str | int | None, allow: str, out: str | Path
) -> str:
    """The call of `tune` in Python, with what is not its default."""
    given = {"budget": budget, "runs": runs, "steps": steps, "memory": memory, "allow": allow}
    given["out"] = str(out)
    usual = tune.__kwdefaults__ or {}
    told = [f"{name}={value!r}" for name, value in given.items() if value != usual[name]]
    return f"vivace.tune({', '.join(['job', *told])})"


def parse_allow(allow: str) -> Numerics:
    """The promise of a word. Raises InputError."""
    if allow.upper() not in Numerics.__members__:
        raise InputError(f"allow is '{allow}'; it must be exact, rounding or semantics")
    return Numerics[allow.upper()]


def _run_document(
    bench: Bench, machine: Machine, seconds: float, allow: Numerics, memory: int | None, command: str
) -> dict[str, Any]:
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": vivace.__version__,
        "machine": machine.to_dict(),
        "job": {"name": bench.source.name, **bench.facts},
        "budget_seconds": seconds,
        "allow": allow.name.lower(),
        "memory_bytes": memory,
        "energy": bench.meter.sources,
    }
