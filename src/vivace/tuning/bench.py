"""The bench: turns plans into trials, each paired with the reference and isolated in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from vivace.errors import (
    AnswerIsNo,
    ChildFailed,
    Code,
    InputError,
    JobError,
    RankLost,
    Refused,
    Unsteady,
    VivaceError,
)
from vivace.events import Tell
from vivace.inspection.energy import Meter
from vivace.ledger import Ledger, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.measuring.paired import Comparison, Contestant, across, compare, compare_in_turns, without_loader
from vivace.plan import Plan
from vivace.processes.launch import Source, preload
from vivace.profiling.together import ENTRY as LAW
from vivace.profiling.together import TIMEOUT_SECONDS as LAW_TIMEOUT
from vivace.technique import Numerics, registry
from vivace.training.crew import ALONE, Company, needed_by, num_ranks_here
from vivace.tuning.budget import smaller_plans
from vivace.tuning.ranks import here, joined, of_ranks, require_allowed

MOST_ROUNDS, SETTLED_WIDTH = 5, 0.04
MOST_LATE_ROUNDS = 8  # of a confirmation that was undecided when its time was over
FIRST_ROUND = 1  # the seed of a confirmation's first pair of processes, in which the metric is timed, too
CROWDED = (
    "others compute on this processor: plans are timed and verified on one thread, by the time that it "
    "works, since several would mostly wait for each other"
)
LAW_SECONDS = 2.0  # of each of its parts, of which there are a few
ENDS = (Refused, ChildFailed, RankLost, JobError)  # what ends a trial, and nothing else
# Of a plan; what was asked for, the time or the machine decided.
_TELLING_NOTHING = (
    Code.RULED_OUT,
    Code.TOO_COARSE,
    Code.NOT_TRIED,
    Code.CANNOT_PAY,
    Code.UNSTEADY,
    Code.BUSY,
)


class Bench:
    """Holds the reference open and measures plans against it. Every trial goes to the ledger at once."""

    def __init__(
        self,
        source: Source,
        machine: Machine,
        ledger: Ledger,
        on_event: Tell,
        *,
        allow: Numerics,
        memory: int | None,
        company: Company | None = None,
    ) -> None:
        self.source, self.machine, self.ledger, self.on_event = source, machine, ledger, on_event
        self.allow, self.memory = allow, memory
        self.trials: list[Trial] = []
        self.log = ledger.path.with_name("children.log")
        self._caches: list[tempfile.TemporaryDirectory[str]] = []
        self._renew_cache()
        self.company = company or Company(source)
        self.smaller = Plan()  # what makes the job fit into memory, where it does not as it is
        self.needed = needed_by(self.company.world_size)
        self.alone = "compute_mode" in machine.device.state  # may one process at a time use the GPU?
        self.apart = self.alone  # or do reference and candidate lack the memory to be open together?
        self.meter = Meter(gpus=num_ranks_here() if machine.device.kind == "cuda" else 0)
        self.threads = self.company.few_threads(machine.device.kind)
        if self.threads:
            on_event("notice", {"text": CROWDED})
        self.reference = self._lone()
        self.law: dict[str, Any] = {}  # what several ranks bring to the job as it is: `Together`'s answer
        self.observed: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self._page_faults = 0.0  # a step of the job as it is, while it was profiled
        self._mean_batch = 0.0  # samples a step of the reference, where batches may differ in size
        self.known: dict[str, Trial] = {}
        self.only_here: set[str] = set()  # techniques that this process knows, and the job's processes do not
        self.input_pipeline: dict[str, Ratio] = {}  # what a perfect one would bring: to reference and plan
        self.evidence: dict[
            str, dict[str, str]
        ] = {}  # by the plan's id: how its techniques proved that they act
        alone = self.company.world_size == 1
        self.no_blocks = "" if alone else ", and ranks get no decisions block by block"  # why none fit
        self.effects: dict[tuple[tuple[str, ...], str], Plan] = {}

    @property
    def base(self) -> Plan:
        """The reference: nothing but what several ranks need, or a job that does not fit as it is."""
        return joined(self.needed, self.smaller)

    def check(self) -> Profile:
        """Run the job as it is once and profile it. Raises JobError in the person's nouns.

        Where its memory does not suffice, it gets the first smaller plan under which it runs. Several ranks
        are checked and profiled by what one has to do, and then together.
        """
        profile = self._check(Plan())
        if profile is None:
            self.source.load()  # it may register what saves memory
        for plan in smaller_plans(self.machine.device.kind, self.allow):
            if profile is not None:
                break
            self.reference.close()
            self.reference = self._lone()
            profile = self._check(plan)
        if profile is None:
            raise AnswerIsNo(
                "the job does not fit into the device's memory, not even recomputed or one sample at a time: "
                "give it a smaller model, or a device with more memory"
            )
        preload(self.reference.ask("libraries"))
        in_children = set(self.facts.pop("registered"))
        if in_children - set(registry.names()):
            self.source.load()
        self.only_here = {cls.name for cls in registry.registered()} - in_children
        return profile if self.company.world_size == 1 else self._check_together(profile)

    def _check_together(self, profile: Profile) -> Profile:
        """The profile of the job on all ranks. Raises JobError or Refused where they cannot train it."""
        self.reference.close()
        self.reference = self._contestant()
        self.reference.ask("same_data")
        arguments = {"machine": self.machine.to_dict()}
        with self.company.child(LAW, arguments, log=self.log, meeting=True) as crew:
            plan = self.base.to_dict()
            self.law = crew.ask("measure", LAW_TIMEOUT, plan=plan, strict=True, seconds=LAW_SECONDS)
        require_allowed(self.company.world_size, Numerics[self.law["promise"].upper()], self.allow)
        return of_ranks(profile, here(self.law), num_ranks_here())

    def _check(self, plan: Plan) -> Profile | None:
        """Check and profile the job under a plan; None where it does not fit or the plan cannot act."""
        try:
            asked = {"plan": plan.to_dict(), "num_ranks": self.company.world_size}
            self.facts = self.reference.ask("check", **asked)
            folder = str(self.ledger.path.parent)
            profile = Profile(**self.reference.ask("profile", **asked, folder=folder))
            if self.threads:
                profile.features.update(crowded=True, num_threads=self.machine.num_cores)
        except (ChildFailed, Refused) as failed:
            if isinstance(failed, Refused) or (isinstance(failed, ChildFailed) and failed.lacked_memory):
                return None
            raise JobError(f"the job cannot run as it is, before any technique: {failed}") from None
        self.smaller, self._page_faults = plan, profile.page_faults
        return profile

    def open_reference(self) -> None:
        """Open strict fp32, warm it up and observe one step; each comparison finds it as it is then."""
        self.reference.open(self.base)
        self.observed = self.reference.ask("observe", evaluated=self.memory is not None)
        # They come and go, from process to process and from second to second.
        self.observed["page_faults"] = max(self._page_faults, self.observed["page_faults"])
        self.reference.ask("remember")
        if len(self.needed) and not self.effects:  # which a candidate may have other settings of
            effect = self.reference.ask("confirm", reference=self.observed)["effect"]
            self._refuse_duplicate(self.base, effect)

    def choose_blocks(self, seconds: float) -> Plan | None:
        """The cheapest plan that decides block by block within the memory budget; None where there is none,
        or finding it takes more than `seconds`.

        Its curve of memory against time goes to the ledger.
        """
        assert self.memory is not None
        self.park()
        contestant = self._contestant(seconds)
        try:
            arguments = {"memory": self.memory, "allow": self.allow.name, "base": self.base.to_dict()}
            chosen = contestant.ask("choose", **arguments, seconds=seconds / 3)
        except VivaceError as error:
            self.no_blocks = f", and {error}"
            self.ledger.append("memory", {"budget_bytes": self.memory, "reason": str(error)})
            return None
        finally:
            contestant.close()
        self.ledger.append("memory", {"budget_bytes": self.memory, **chosen})
        return Plan.from_dict(chosen["plan"])

    def measure_batches(self, seconds: float) -> None:
        """How speed and peak depend on the batch's size, for about `seconds`: a curve for the ledger."""
        steps = 80  # of the job's own batch: four rounds over all sizes, and their peaks
        if steps * self.reference.step_seconds > seconds:
            return
        self.park()
        contestant = self._contestant(max(20.0, 2 * seconds), limited=True)
        try:
            arguments = {"plan": self.base.to_dict(), "memory": self.memory, "seconds": seconds / 2}
            self.ledger.append("batches", contestant.ask("batches", **arguments))
        except VivaceError as error:
            self.ledger.append("batches", {"reason": str(error)})
        finally:
            contestant.close()

    def measure_input_pipeline(self, seconds: float) -> None:
        """What a perfect input pipeline would bring to the reference."""
        self.input_pipeline["reference"] = without_loader(self._resident(), seconds=seconds)

    def recall(self) -> None:
        """Take over what the ledger knows of this job on this machine, but for what broke a promise."""
        verdicts = [one for one in self.ledger.read("verdict") if isinstance(one.get("plan"), dict)]
        broken = [verdict["plan"] for verdict in verdicts if verdict.get("kept") is False]
        needed = self.needed.to_dict()
        added = [{name: v for name, v in plan.items() if needed.get(name) != v} for plan in broken]
        guilty = [plan.items() for plan in added if len(plan) == 1]
        here = (self.machine.fingerprint, self.facts["signature"])
        for trial in self.ledger.trials():
            innocent = not any(one <= trial.techniques.items() for one in guilty)
            trusted = innocent and trial.techniques not in broken
            strict = trial.role != "baseline_default"  # which is no plan of its own
            telling = trial.code not in _TELLING_NOTHING  # else what was measured before still holds
            if (trial.machine, trial.job) == here and trusted and strict and telling:
                self.known[trial.plan_id] = trial

    def refuse(self, plan: Plan, reason: str, code: Code, predicted: tuple[float, float]) -> Trial:
        """Record that a plan gets no process, and why."""
        fields = {"status": "refused", "reason": reason, "code": code, "predicted": predicted}
        return self._record(self._trial(plan, **fields))

    def measure(
        self,
        plan: Plan,
        *,
        seconds: float,
        comparing: float,
        predicted: tuple[float, float] | None = None,
        target: float | None = None,
        role: str = "candidate",
        strict: bool = True,
    ) -> Trial:
        """Measure one plan; whatever happens to it becomes a trial. `target` is the ratio to beat.

        It may take `seconds` in all, of which `comparing` for the timing itself.
        """
        begin = time.monotonic()
        self.on_event("trial_begin", {"plan": str(plan), "role": role})
        confirmed: dict[str, Any] = {}

        def opened() -> Contestant:
            options = {"strict": strict, "warm_seconds": min(1.0, 0.05 * seconds)}
            contestant = self._open(plan, timeout=seconds, limited=True, **options)
            with self._ended(contestant, only_on_error=True):
                confirmed.update(self._admit(contestant, plan, role))
            return contestant

        def compared() -> dict[str, Any]:
            left = max(2.0, min(comparing, seconds - _since(begin)))
            contestant, comparison = self._compared(opened, seconds=left, target=target)
            return self._measured(contestant, [comparison], confirmed)

        outcome: dict[str, Any]
        try:
            try:
                outcome = compared()
            except (ChildFailed, InputError) as failed:
                if not self._crowded(failed):
                    raise
                self.apart = True
                self.alone = self.alone or failed.code == Code.BUSY
                outcome = compared()
        except ENDS as error:
            outcome = _without_ratio(plan, error)
            out_of_memory = isinstance(error, ChildFailed) and error.lacked_memory
            self.apart = self.alone or (self.apart and not out_of_memory)
            if isinstance(error, JobError):  # it may be the reference's, whose data then give no more batches
                self.park()
        return self._record(
            self._trial(plan, role=role, predicted=predicted, seconds=_since(begin), **outcome)
        )

    def _compared(
        self,
        candidate: Callable[[], Contestant],
        *,
        seconds: float,
        target: float | None = None,
        seed: int | None = None,
    ) -> tuple[Contestant, Comparison]:
        """A candidate against the resident reference, or with a `seed` against a fresh one.

        Both are open together, or in turns where the device lacks the memory for that or serves one process.
        """
        used, beside = list[Contestant](), list[Contestant]()

        def fresh() -> Contestant:
            beside.append(self._open(self.base, seed=seed or 0))
            return beside[-1]

        def noted() -> Contestant:
            used.append(candidate())
            return used[-1]

        if self.apart or seed is not None:
            self.park()
        if self.apart:
            comparison = compare_in_turns([fresh, noted, fresh], seconds=seconds)
        else:
            reference = self._resident() if seed is None else fresh()
            beside, full = [reference], reference.full
            with contextlib.nullcontext() if seed is None else self._ended(reference), self._ended(noted()):
                comparison = compare(reference, used[0], seconds=seconds, target=target)
                if seed == FIRST_ROUND and self.facts["has_metric"] and self.company.world_size == 1:
                    both = reference.evaluate(), used[0].evaluate()
                    comparison = dataclasses.replace(comparison, evaluations=_positive(both))
            if reference.full - full + used[0].full and not self._roomy():
                self.apart = True  # one took memory that the other lacked, and steps were slow for it
                return self._compared(candidate, seconds=seconds, target=target, seed=seed)
        before, after = beside[-1].joules_per_sample, used[0].joules_per_sample
        if before is not None and after is not None:
            comparison = dataclasses.replace(comparison, joules=(before, after))
        return used[0], comparison

    def _resident(self) -> Contestant:
        """The reference, as little trained as a candidate; opened again where it was parked or died."""
        if self.reference.child.alive:
            self.reference.ask("again")
        else:
            self.park()
            self.reference = self._contestant()
            self.open_reference()
        return self.reference

    def _crowded(self, failed: ChildFailed | InputError) -> bool:
        """Did it lack memory, or a device for one process, that the reference holds at the same time?"""
        if failed.code == Code.BUSY:
            return not self.apart
        lacked = isinstance(failed, ChildFailed) and failed.lacked_memory
        return lacked and not self.apart and not self._roomy()

    def _roomy(self) -> bool:
        """Has the device room for the memory budget twice?"""
        return self.memory is not None and 2 * self.memory <= (self.machine.device.memory_bytes or 0)

    def warm_again(self, plan: Plan, *, seconds: float) -> float | None:
        """Seconds of a plan's warm-up where all that it compiles is compiled already; None where it fails."""
        try:
            contestant = self._open(plan, timeout=seconds, limited=True)
        except ENDS:
            return None
        contestant.close()
        return contestant.warmup_seconds

    def park(self) -> None:
        """Give the device's memory back that the reference holds; the next comparison opens it again."""
        self.reference.close()

    def confirm(self, plan: Plan, *, seconds: float, round_seconds: float) -> Trial:
        """Measure a plan afresh: several pairs of new processes, each on batches in another order.

        Two processes of the same job differ by a few percent in speed, by where their memory lies, so the
        interval rests on the spread between the pairs as well. As many pairs as `seconds` allow, up to five,
        each timed for `round_seconds`; where the plan is faster on the whole, and not in all of the interval,
        once as many again, up to eight in all. A pair during which the machine was too unsteady is replaced
        by the next. That the techniques act was proven in the search.
        """
        begin = time.monotonic()
        self.on_event("trial_begin", {"plan": str(plan), "role": "confirmation"})
        rounds: list[Comparison] = []
        outcome: dict[str, Any] = {}
        tried = 0
        wanted: int | None = None  # pairs, once the time is over
        try:
            while tried != wanted:
                started = time.monotonic()
                tried += 1
                try:
                    comparison, outcome = self._confirm_once(plan, rounds, seconds=round_seconds)
                    rounds.append(comparison)
                except Unsteady as error:
                    outcome = outcome or _without_ratio(plan, error)
                settled = len(rounds) >= 3 and across(rounds).width < SETTLED_WIDTH
                late = seconds - _since(begin) < _since(started)
                if wanted is None and (settled or late or tried == MOST_ROUNDS):
                    more = min(MOST_LATE_ROUNDS, max(3, 2 * tried))
                    wanted = tried if settled or _decided(rounds) else more
        except ENDS as error:
            outcome = _without_ratio(plan, error)
        return self._record(self._trial(plan, role="confirmation", seconds=_since(begin), **outcome))

    def _confirm_once(
        self, plan: Plan, earlier: list[Comparison], *, seconds: float
    ) -> tuple[Comparison, dict[str, Any]]:
        """One pair of new processes; the outcome of it and all `earlier` ones together."""
        found: dict[str, Any] = {"evidence": self.evidence.get(plan.id, {})}

        def opened() -> Contestant:
            contestant = self._open(plan, seed=FIRST_ROUND + len(earlier), limited=True)
            with self._ended(contestant, only_on_error=True):
                if len(earlier) == 2:  # the least that an interval across processes needs
                    self.input_pipeline["plan"] = without_loader(contestant, seconds=seconds / 2)
                seen = contestant.ask("observe", evaluated=self.memory is not None)
            found["peak_bytes"] = seen["peak_bytes"]
            return contestant

        contestant, comparison = self._compared(opened, seconds=seconds, seed=FIRST_ROUND + len(earlier))
        return comparison, self._measured(contestant, [*earlier, comparison], found)

    def _admit(self, contestant: Contestant, plan: Plan, role: str) -> dict[str, Any]:
        """Let an opened plan prove that it acts, as allowed and unlike any other. Raises Refused."""
        if Numerics[contestant.promise.upper()] > self.allow:
            promised = contestant.promise.upper()
            reason = f"on this job it promises {promised}, and {self.allow.name} is allowed"
            raise Refused(reason, code=Code.TOO_COARSE)
        confirmed: dict[str, Any] = contestant.ask(
            "confirm", reference=self.observed, evaluated=self.memory is not None
        )
        self.evidence[plan.id] = confirmed["evidence"]
        if role == "candidate":
            self._refuse_duplicate(plan, confirmed["effect"])
        return confirmed

    def _measured(
        self, contestant: Contestant, comparisons: list[Comparison], confirmed: dict[str, Any]
    ) -> dict[str, Any]:
        self._mean_batch = self.reference.samples_a_step or self._mean_batch
        size = self._mean_batch or self.facts["batch_size"]
        pairs = [pair for comparison in comparisons for pair in comparison.pairs]
        joules = [comparison.joules for comparison in comparisons if comparison.joules]
        return {
            "status": "measured",
            "ratio": across(comparisons),
            "rounds": len(comparisons),
            "pairs": tuple((a * size, b * size) for a, b in pairs),
            "samples_per_second": 1 / statistics.median(pair[1] for pair in pairs),
            "peak_bytes": confirmed["peak_bytes"],
            "warmup_seconds": contestant.warmup_seconds,
            "promise": contestant.promise,
            "evidence": confirmed["evidence"],
            "foreign_share": max(comparison.foreign_share for comparison in comparisons),
            "joules": tuple(map(statistics.fmean, zip(*joules, strict=True))) if joules else None,
            "full": contestant.full,
            "evaluations": next((one.evaluations for one in comparisons if one.evaluations), None),
        }

    def close(self) -> None:
        """End the reference's process and remove what was compiled."""
        self.reference.close()
        for cache in self._caches:
            cache.cleanup()

    def _open(self, plan: Plan, *, timeout: float = 600, limited: bool = False, **options: Any) -> Contestant:
        """A new process with a plan open and warm in it."""
        contestant = self._contestant(timeout, limited)
        with self._ended(contestant, only_on_error=True):
            contestant.open(plan, **options)
        return contestant

    @contextlib.contextmanager
    def _ended(self, contestant: Contestant, *, only_on_error: bool = False) -> Iterator[None]:
        """End a process after its use; where it died meanwhile, later ones compile into another folder."""
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed and not contestant.child.alive:
                self._renew_cache()
            if failed or not only_on_error:
                contestant.close()

    def _contestant(self, timeout: float = 600, limited: bool = False) -> Contestant:
        """A new process; where `limited`, a GPU gives it no more than the memory budget."""
        limit = {"VIVACE_MEMORY_BYTES": str(self.memory)} if limited and self.memory else {}
        return Contestant(
            self.source,
            self.machine,
            log=self.log,
            timeout=timeout,
            environment=self.environment | limit,
            company=self.company,
            meter=self.meter if num_ranks_here() >= self.company.world_size else None,
            threads=self.threads,
        )

    def _lone(self) -> Contestant:
        """A new process that works for itself, also where there are several ranks."""
        alone = ALONE if self.company.world_size > 1 else {}
        environment = self.environment | alone
        return Contestant(
            self.source, self.machine, log=self.log, environment=environment, threads=self.threads
        )

    def _renew_cache(self) -> None:
        """Let later children compile into a new folder: a killed child may leave torn files behind."""
        self._caches.append(
            tempfile.TemporaryDirectory(prefix="vivace-compiled-", ignore_cleanup_errors=True)
        )
        self.environment = {"TORCHINDUCTOR_CACHE_DIR": self._caches[-1].name}

    def _refuse_duplicate(self, plan: Plan, effect: str) -> None:
        """Settings of the same techniques that make the step do the very same are measured once."""
        earlier = self.effects.setdefault((plan.names, effect), plan)
        if earlier != plan:
            changes = ", ".join(line.removeprefix("~ ") for line in plan.diff(earlier))
            raise Refused(f"it does the same as a plan measured already ({changes})")

    def _trial(self, plan: Plan, **fields: Any) -> Trial:
        fields.setdefault("promise", plan.promise.name.lower())
        return Trial(
            techniques=plan.to_dict(),
            plan_id=plan.id,
            machine=self.machine.fingerprint,
            job=self.facts["signature"],
            **fields,
        )

    def _record(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        self.ledger.append("trial", trial.to_dict())
        self.on_event("trial_end", {"trial": trial})
        return trial


def _without_ratio(plan: Plan, error: VivaceError) -> dict[str, Any]:
    """The fields of a trial that ended with an error, which names no technique that is the whole plan."""
    return {
        "status": "refused" if isinstance(error, Refused) else "failed",
        "reason": error.unnamed if error.unnamed and len(plan) == 1 else str(error),
        "code": error.code,
        "technique": error.technique,
        "foreign_share": error.foreign_share if isinstance(error, Unsteady) else 0.0,
    }


def _decided(rounds: list[Comparison]) -> bool:
    """Do they say that a plan is faster, or that it is not faster on the whole?"""
    if not rounds:
        return False
    ratio = across(rounds)
    return ratio.low > 1.0 or ratio.estimate <= 1.0


def _positive(both: tuple[float | None, float | None]) -> tuple[float, float] | None:
    """Two times, where both are known and took any time at all."""
    before, after = both
    return (before, after) if before and after else None


def _since(begin: float) -> float:
    return time.monotonic() - begin
