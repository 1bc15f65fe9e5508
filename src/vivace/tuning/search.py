"""The search: what to measure next, by what was measured so far; forward selection, with interactions.

It asks and is told, and touches no process, clock or file: time is what the answers say that they took. So
the same answers lead to the same questions and to the same plan, also from a ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator
from typing import TypeVar

from vivace.ledger import Code, Outcome, Trial
from vivace.plan import Plan
from vivace.technique import Stage, Technique
from vivace.technique.registry import asked
from vivace.tuning.candidates import Candidate, stricter
from vivace.tuning.ending import cannot_pay, does_not_pay, ending, not_confirmed
from vivace.tuning.objective import ONE
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
from vivace.tuning.result import LongPlan, prefixes
from vivace.tuning.setting import (
    BETTER,
    CLEARLY_BETTER,
    Conclusion,
    Setting,
    as_fast,
    is_coarse,
    lacks_what_varies,
)
from vivace.tuning.standing import Standing
from vivace.tuning.times import PATIENCE_SECONDS, TIMING_SECONDS, enough
from vivace.verifying.verdict import Verdict
from vivace.words import real

JUDGED_LATE = 2  # plans that are verified and confirmed although the budget is over

Found = TypeVar("Found")
Steps = Generator[Request, Answer, Found]


class Search(Standing):
    """Finds the fastest plan that keeps its promise: do what `ask` says, `tell` what came of it, and again.

    `conclusion` stands where `ask` returns None. `ranking` may be read at any time. `cannot_pay_more` says
    that the search stopped because nothing that was left could save what trying it costs.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.conclusion = Conclusion(setting.base, ONE, Outcome.NOTHING_TRIED)
        self.cannot_pay_more = False
        self._made_less: set[str] = set()  # plans out of which nothing is to be dropped any more
        self._too_slow: dict[Technique, float] = {}  # seconds after which it had not started yet
        self._cannot_pay: dict[Technique, str] = {}  # why what could still be tried is not
        self._too_coarse: set[str] = set()  # techniques that promise more on this job than is allowed
        self._slow_precision: Trial | None = None  # of all together with a lower one, no faster than fp32
        self._ranks_kept: Verdict | None = None  # of the reference of several ranks
        self._course = self._everything()
        self._request: Request | None = next(self._course, None)

    def ask(self) -> Request | None:
        """What to do next; None at the end. The same until `tell` is called."""
        return self._request

    def tell(self, answer: Answer) -> None:
        """Take what came of the last request, and the time that it took."""
        self.left -= answer.seconds
        self.times.learn(answer)
        if isinstance(answer, Trial):
            self.trials.append(answer)
        try:
            self._request = self._course.send(answer)
        except StopIteration:
            self._request = None

    def _everything(self) -> Steps[None]:
        """Each candidate on top of the best plan, after a success the others again; then what was found."""
        setting = self.setting
        if setting.first is not None:
            yield from self._try(setting.first)
        if not self.reference_fits:
            yield from self._try_blocks()
        if setting.feeds_first and self.best == setting.base:
            yield from self._try_feeding()
        yield from self._try_together()
        yield from self._select()
        yield from self._try_unsteady()
        yield from self._explain()
        yield from self._list_untried()
        seconds, comparing = self.times.baselines()
        if setting.num_baselines and self._baselines_seconds and seconds < self.left:
            yield MeasureBaselines(seconds, comparing)
        yield from self._settle()

    # Finding

    def _try_blocks(self) -> Steps[None]:
        """Decisions for the model's blocks, where the job does not fit into the memory budget as it is. They
        are timed in one process; several ranks divide the weights instead.
        """
        for candidate in self.setting.candidates if len(self.setting.needed) else ():
            if candidate.technique.card.shards_weights:
                yield from self._try(candidate.on(self.setting.base), candidate)
        if self._free() <= 0 or len(self.setting.needed):
            return
        done = yield ChooseBlocks(max(PATIENCE_SECONDS, 0.5 * self._free()))
        assert isinstance(done, Done)
        if done.plan is not None:
            yield from self._try(done.plan)

    def _try_feeding(self) -> Steps[None]:
        """The most promising technique that acts on data, alone; while none is faster, the next one."""
        tried = set[str]()
        for candidate in self.setting.candidates:
            technique = candidate.technique
            if technique.card.stage != Stage.DATA or technique.name in tried:
                continue
            tried.add(technique.name)
            plan = candidate.on(self.setting.base)
            if self._may_pay(plan, [candidate]) and (yield from self._try(plan, candidate)):
                break

    def _try_together(self) -> Steps[None]:
        """All that is likely to help and quick to start, at once: some techniques only pay in company.

        On a CPU, for example, bfloat16 convolutions are slower than fp32 ones unless their layout is
        channels-last; on a GPU, what launches many small kernels pays in a graph alone.
        """
        refused = {plan for plan, trial in self.measured.items() if trial.status == "refused"}
        plan, taken = self.setting.base, list[Candidate]()
        for candidate in self.setting.candidates:
            technique = candidate.technique
            likely = candidate.promise >= 1.0 and candidate.on(self.setting.needed).id not in refused
            if not technique.card.compiles and likely and len(plan.adding(technique)) > len(plan):
                plan = candidate.on(plan)
                taken.append(candidate)
        several = 2  # at first; one alone has its turn later, unless it is what is left of several
        while len(self.setting.chosen(plan)) >= several and plan.id not in self.measured:
            several = 1
            if not self._may_pay(plan, [one for one in taken if one.technique in plan.techniques]):
                return
            found = yield from self._try(plan)
            trial = self.measured.get(plan.id)
            plan = self.setting.needed if found or trial is None else self._without_fault(plan, trial)

    def _without_fault(self, plan: Plan, trial: Trial) -> Plan:
        """What to try together instead: all but what refused; where they failed, all but what captures the
        step; where they were no faster than a plan in fp32, all but the coarser precision, which slows some
        models down whatever its company.
        """
        if trial.status == "refused":
            spared = trial.technique and trial.technique not in self.setting.needed.names
            return plan.without(trial.technique) if spared else self.setting.needed
        captures = [one.name for one in self.setting.chosen(plan) if one.card.captures]
        if trial.status == "failed" and trial.code != Code.UNSTEADY and captures:
            for name in captures:
                plan = self.setting.less(plan, name)
            return plan
        faulty = [one.name for one in self.setting.chosen(plan) if is_coarse(plan, one.name)]
        timed, coarser = trial.ratio is not None and self.reference_fits, self._slow_precision
        if coarser and coarser.ratio and trial.ratio and trial.ratio.low <= coarser.ratio.high:
            self._slow_precision = None  # without it they are as slow
        if not (timed and faulty) or set(faulty) & set(self.best.names):
            return self.setting.needed
        self._slow_precision = trial
        for name in faulty:
            plan = self.setting.less(plan, name)
        return plan

    def _select(self) -> Steps[None]:
        """Add to the best plan what makes it faster, then drop what adds nothing."""
        offered = [c for c in self.setting.candidates if not self._banned & set(c.techniques)]
        changed = True
        while changed and self._free() > 0:
            changed = False
            for candidate in self._in_turn(offered):
                plan = candidate.on(self.best)
                if plan != self.best and not self._hopeless(plan, candidate):
                    changed |= yield from self._try(plan, candidate)
        yield from self._drop()
        yield from self._refine()

    def _in_turn(self, candidates: list[Candidate]) -> Iterator[Candidate]:
        """First what can be added, then what displaces a technique of the best plan, then what is not likely
        to help, and last what can help longer trainings only; of each the one first that promises most for
        the time that it takes.
        """

        def rank(candidate: Candidate) -> tuple[int, float]:
            adds = len(self.best.adding(candidate.technique)) > len(self.best)
            seconds = self.times.trial(candidate.on(self.best))
            slow = self._slow_precision is not None and is_coarse(
                candidate.on(self.best), candidate.technique.name
            )
            kind = 2 if slow or candidate.promise < 1.0 else 0 if adds else 1
            kind = 3 if self._warms_up_too_long(candidate) else kind
            gain = math.log(max(candidate.promise, 1e-9))  # a card may bound it by 0
            return kind, -gain / seconds if gain > 0 else -gain * seconds

        left = list(candidates)
        while left:
            left.sort(key=rank)  # anew: the best plan changes, and what trials take is learned
            yield left.pop(0)

    def _warms_up_too_long(self, candidate: Candidate) -> bool:
        """Does it compile, and warm up longer in each run, with all compiled before, than it can save?"""
        length = self.length()
        if length.steps is None or not candidate.technique.card.compiles or not self._fits(self.best_peak):
            return False
        saved = length.at_most_saved(self.best_ratio.counts, candidate.predicted[1])
        return length.runs * self.times.warmup_again(candidate.on(self.best)) > saved

    def _drop(self) -> Steps[None]:
        """Drop what adds nothing from the best plan, and from the one with which this training ends first."""
        least = yield from self._least(self.best)
        if least != self.best:
            self._keep(least, self.measured[least.id])
        for plan in self.ranking()[:1]:
            if plan != self.best and plan.id not in self._spared:
                yield from self._least(plan)

    def _least(self, plan: Plan) -> Steps[Plan]:
        """A plan without what adds nothing to it, what changes numbers most left out first; both are then in
        `_made_less`.

        Where that spares a promise or a precision it is tried whatever the time; where time is lacking, those
        of the others that round are left out at once, and those that are exact.
        """
        self._made_less.add(plan.id)
        names = self.setting.coarsest_first(plan) if plan != self.setting.base else []  # which nobody timed
        waiting = list[str]()
        for name in names:
            without = self.setting.less(plan, name)
            if not self.setting.chosen(without):
                continue
            left = self.left - self.times.settling(plan)
            if without.id not in self.measured and left <= 0 and not self.setting.spares(plan, name):
                waiting.append(name)
                continue
            plan = yield from self._less(plan, without)
        for exact in (False, True):
            without = self.setting.without(plan, waiting, exact=exact)
            if without != plan:
                plan = yield from self._less(plan, without)
        for name in self.setting.coarsest_first(plan) if names else ():  # in what company is left
            without = self.setting.less(plan, name)
            if without.id in self.measured and self.setting.chosen(without):
                plan = yield from self._less(plan, without)
        self._made_less.add(plan.id)
        return plan

    def _less(self, plan: Plan, without: Plan) -> Steps[Plan]:
        """The lesser of two plans where it is as fast; it is measured unless it was."""
        fastest = self.measured[plan.id].ratio
        assert fastest is not None
        if without.id not in self.measured:
            needed = 2 * self.times.start(without) + TIMING_SECONDS
            left = max(needed, self.left - self.times.settling(plan))
            yield from self._measure(without, left, fastest.counts)
        trial = self.measured[without.id]
        if trial.ratio is None or not self._fits(trial.peak_bytes):
            return plan
        if trial.ratio.counts >= as_fast(fastest, plan, without):
            self._spared.add(plan.id)
            return without
        if lacks_what_varies(without, plan):
            self._spared.add(without.id)
        return plan

    def _refine(self) -> Steps[None]:
        """Try each technique of the best plan refined, and again, while that is clearly faster."""
        for name in self.best.names:
            found = True
            while found:
                own = next(one for one in self.best.techniques if one.name == name)
                refined = asked(own, "what would refine it", own.refined, None)
                if refined is None:
                    break
                found = yield from self._try(self.best.adding(refined), by=CLEARLY_BETTER)

    def _try_unsteady(self) -> Steps[None]:
        """While nothing was found, time again what the machine was too unsteady for."""
        if self.ranking():
            return
        asked = True
        while asked and not self.ranking():
            asked = False
            unsteady = [name for name, trial in self.measured.items() if trial.code == Code.UNSTEADY]
            for plan in [self._plans[name] for name in unsteady]:
                if self._time_for(plan) and not self.ranking():
                    asked = True
                    yield from self._attempt(plan, None, BETTER)
        if self.ranking():
            yield from self._select()

    def _explain(self) -> Steps[None]:
        """Measure what each technique adds to the ones before it, while there is time."""
        base = prefixes(self.setting.base, self.setting.needed)
        for plan in prefixes(self.best, self.setting.needed):
            if plan.id not in self.measured and plan not in base and self._time_for(plan):
                yield from self._measure(plan, self._free())

    def _list_untried(self) -> Steps[None]:
        """Say of each technique that was timed neither alone nor with others that it cannot pay, or that the
        time ended first.
        """
        names = [(trial, self.setting.chosen_names(trial.techniques)) for trial in self.trials]
        tried = {name for t, own in names if t.status != "failed" or len(own) == 1 for name in own}
        untried = dict[str, Candidate]()
        for candidate in self.setting.candidates:
            if candidate.technique.name not in tried:
                untried.setdefault(candidate.technique.name, candidate)
        reasons = {name: self._cannot_pay.get(one.technique, "") for name, one in untried.items()}
        self.cannot_pay_more = bool(reasons) and all(reasons.values())
        for name, candidate in untried.items():
            code = Code.CANNOT_PAY if reasons[name] else Code.NOT_TRIED
            reason = reasons[name] or "the time for the search ended before it could be tried"
            yield LeaveOut(self.setting.alone(candidate.technique), reason, candidate.predicted, code)

    def _try(self, plan: Plan, candidate: Candidate | None = None, by: float = BETTER) -> Steps[bool]:
        """Measure a plan unless that was done or there is no time; is it the best one now?"""
        if plan.id in self.measured or not self._time_for(plan):
            return False
        return (yield from self._attempt(plan, candidate, by))

    def _attempt(self, plan: Plan, candidate: Candidate | None, by: float) -> Steps[bool]:
        now = self.best_ratio.counts
        predicted = (candidate.predicted[0] * now, candidate.predicted[1] * now) if candidate else None
        target = by * now if self._fits(self.best_peak) else None
        trial = yield from self._measure(plan, self._free(), target, predicted)
        if candidate is not None and trial.code == Code.TOO_COARSE:
            self._too_coarse.add(candidate.technique.name)
        return self._judge_trial(trial, by)

    def _measure(
        self,
        plan: Plan,
        left: float,
        target: float | None = None,
        predicted: tuple[float, float] | None = None,
    ) -> Steps[Trial]:
        limit, comparing = self.times.limit(plan, left), self.times.comparing(plan, left)
        trial = yield Measure(plan, limit, comparing, predicted, target)
        assert isinstance(trial, Trial)
        self.measured[plan.id], self._plans[plan.id] = trial, plan
        if trial.code == Code.TIMED_OUT:
            slow = [technique for technique in plan.techniques if technique.card.compiles]
            self._too_slow.update(dict.fromkeys(slow, limit))
        return trial

    def _judge_trial(self, trial: Trial, by: float) -> bool:
        """Keep the trial's plan where it is better: the faster one within the memory budget, else the
        smaller one.
        """
        if trial.ratio is None or trial.peak_bytes is None:
            return False
        if not self._fits(trial.peak_bytes):
            better = not self._fits(self.best_peak) and trial.peak_bytes < 0.98 * self.best_peak
        elif not self._fits(self.best_peak):
            better = True
        else:
            beats = trial.ratio.low > 1.0 or not self.reference_fits
            better = beats and trial.ratio.counts >= by * self.best_ratio.counts
        if better:
            self._keep(self._plans[trial.plan_id], trial)
        return better

    def _keep(self, plan: Plan, trial: Trial) -> None:
        assert trial.ratio is not None
        self.best, self.best_ratio, self.best_peak = plan, trial.ratio, trial.peak_bytes or 0

    def _hopeless(self, plan: Plan, candidate: Candidate) -> bool:
        """Was it refused for good, is it much slower than what it would displace, or slower to start than
        the time left allows?
        """
        name = candidate.technique.name
        if name in self._too_coarse or self._too_slow.get(candidate.technique, 0.0) > 0.7 * max(
            0.0, self._free()
        ):
            return True
        if candidate.technique.card.stage == Stage.MEMORY and self._milder_is_slow(plan, candidate):
            return True
        if not self._may_pay(plan, [candidate]):
            return True
        alone = self.measured.get(candidate.on(self.setting.needed).id)
        if alone is None:
            return False
        if alone.status == "refused" or (alone.status == "failed" and alone.code != Code.UNSTEADY):
            return True
        displaced = len(plan) <= len(self.best)
        return displaced and alone.ratio is not None and alone.ratio.high < 0.9 * self.best_ratio.counts

    def _milder_is_slow(self, plan: Plan, candidate: Candidate) -> bool:
        """Was another setting, milder because it was offered earlier, far slower on the same techniques?"""
        name = candidate.technique.name
        return any(
            trial.ratio is not None
            and trial.ratio.high < 0.9 * self.best_ratio.counts
            and self._plans[trial.plan_id].without(name) == plan.without(name)
            for trial in self.measured.values()
            if name in trial.techniques
        )

    def _may_pay(self, plan: Plan, added: list[Candidate]) -> bool:
        """Can what is added to the best plan save more of this training than trying it costs?

        Of a budget that the person gave only what can save nothing at all is not tried.
        """
        if self.setting.steps is None or not self._fits(self.best_peak):
            return True
        high = math.prod(candidate.predicted[1] for candidate in added)
        saved = self.length().at_most_saved(self.best_ratio.counts, high)
        price = self.times.trial(plan) if self.setting.auto else 0.0
        if saved > price:
            return True
        if len(added) == 1:
            self._cannot_pay[added[0].technique] = cannot_pay(saved, price, high)
        return False

    # Settling

    def _settle(self) -> Steps[None]:
        """The first plan that keeps its promise and wins in fresh processes too, else the reference."""
        yield from self._warm_again()
        if not self.ranking():
            return self._found_none()
        last: tuple[Outcome, str] | None = None
        while True:
            plan, verdict, why = yield from self._first_kept()
            if plan is None or verdict is None:
                return self._end(*(last or why))
            long_kept = yield from self._long_kept(plan)
            seconds = max(TIMING_SECONDS, self.left)
            trial = yield Confirm(plan, seconds, self.times.round(seconds))
            assert isinstance(trial, Trial)
            ratio, fits = trial.ratio, self._fits(trial.peak_bytes)
            if fits and ratio is not None and self._wins(ratio, self.warmup(trial), trial.evaluating):
                outcome = Outcome.FASTER if ratio.low > 1.0 else Outcome.FITS
                long_plan = self._long_plan(plan, verified=long_kept)
                self.conclusion = Conclusion(plan, ratio, outcome, "", verdict, long_plan)
                return None
            self._judged.append(plan)
            last = not_confirmed(trial, self.setting.steps, memory=None if fits else self.setting.memory)

    def _first_kept(self) -> Steps[tuple[Plan | None, Verdict | None, tuple[Outcome, str]]]:
        """The first plan not yet judged that keeps its promise, made less before; the guilty of others are
        banned.

        Where there is none, the outcome and the reason are of the first that did not.
        """
        why: tuple[Outcome, str] | None = None
        while True:
            ranking = self.not_rejected()
            if not ranking or (len(self._judged) >= JUDGED_LATE and self.left <= 0):
                return None, None, why or (Outcome.NOTHING_HELPS, "")
            plan = ranking[0]
            if plan.id not in self._made_less:
                yield from self._least(plan)
                continue
            verdict = yield from self._verify(plan)
            if verdict.kept:
                return plan, verdict, (Outcome.FASTER, "")
            found = "and not the same model: " if verdict.judged else "but "
            outcome = Outcome.NONE_KEPT if verdict.judged else Outcome.COULD_NOT_MEASURE
            why = why or (outcome, f"{plan} was faster, {found}{verdict.reason}")
            self._judged.append(plan)
            if self._ranks_kept is None and len(self.setting.needed):
                self._ranks_kept = yield from self._verify(self.setting.base)
                if self._ranks_kept.kept is False:
                    told = (
                        f"not the same model with nothing but {self.setting.base}: {self._ranks_kept.reason}"
                    )
                    return None, None, (Outcome.NONE_KEPT, told)
            chosen, guilty = self.setting.chosen(plan), set[Technique]()
            for number, technique in enumerate(chosen if len(chosen) > 1 else (), 1):
                if not (yield from self._verify(self.setting.alone(technique), len(chosen) - number)).kept:
                    guilty.add(technique)
            found_guilty = guilty or set(chosen if len(chosen) == 1 else ())
            self._ban(found_guilty)
            kinder = stricter(plan, found_guilty)
            if kinder is not None and kinder.id not in self.measured:
                yield from self._try(kinder)
            yield from self._select()

    def _ban(self, techniques: set[Technique]) -> None:
        """Leave techniques with these settings out from now on; half of what is left goes into finding."""
        self._banned |= techniques
        self.best, self.best_ratio, self.best_peak = self.setting.base, ONE, self.setting.peak_bytes
        for plan in self.not_rejected()[:1]:
            self._keep(plan, self.measured[plan.id])
        self._kept_seconds = 0.5 * self.left

    def _verify(self, plan: Plan, more: int = 0) -> Steps[Verdict]:
        seconds = max(3.0, min(self.left - self.times.one_round(), self.times.ruling()))
        verdict = yield Verify(plan, seconds, self.left, more)
        assert isinstance(verdict, Verdict)
        return verdict

    def _warm_again(self) -> Steps[None]:
        """Open the plan with the fastest step again where its warm-up with all compiled decides its rank.

        That is the warm-up which `train` meets on this machine; the first one is met elsewhere.
        """
        plan, leading = self.fastest(), self.ranking()[:1]
        if plan is None or plan in leading or self.left < self.times.start(plan):
            return
        length, ratio = self.length(), self.measured[plan.id].ratio
        assert ratio is not None
        known = [self.measured[one.id] for one in leading]
        least = [length.seconds(t.ratio, t.warmup_seconds or 0.0) for t in known if t.ratio is not None]
        if length.pays(ratio, 0.0) and all(length.seconds(ratio, 0.0) < seconds for seconds in least):
            done = yield WarmAgain(plan, self.times.limit(plan, 0.6 * self.left))
            assert isinstance(done, Done)
            if done.warmup_seconds is not None:
                self._warm[plan.id] = done.warmup_seconds

    def _long_kept(self, plan: Plan) -> Steps[bool]:
        """Does a plan with faster steps than `plan` keep its promise? No, where there is no time to ask."""
        fastest = self.fastest()
        if fastest is None or fastest == plan:
            return False
        if self.left < self.times.settling(plan) + self.times.ruling() + self.times.start(fastest):
            return False
        verdict = yield from self._verify(fastest)
        if verdict.judged and not verdict.kept:
            self._judged.append(fastest)
        return bool(verdict.kept)

    def _long_plan(self, plan: Plan, *, verified: bool) -> LongPlan | None:
        """The plan that wins where the training is longer, if there is one beside `plan`."""
        fastest, length = self.fastest(), self.length()
        if fastest is None or fastest == plan or length.steps is None:
            return None
        trial, own = self.measured[fastest.id], self.measured.get(plan.id)
        assert trial.ratio is not None
        later = (trial.ratio, trial.warmup_seconds or 0.0)
        chosen = (own.ratio, own.warmup_seconds or 0.0) if own is not None and own.ratio is not None else None
        steps, repaid = length.wins_from(later, chosen), real(trial.break_even_steps) or 0.0
        if steps is None or (steps := max(steps, math.ceil(repaid))) <= length.steps:
            return None
        return LongPlan(fastest, "", trial.ratio, later[1], steps, verified)

    def _found_none(self) -> None:
        """No plan is worth verifying; one whose warm-up does not pay is named as one for longer runs."""
        fastest = self.fastest()
        if fastest is None:
            waiting = self._waiting()
            names = [candidate.technique.name for candidate in waiting]
            outcome, reason = ending(self.trials, self.setting.budget_seconds, names)
            self._end(outcome, reason)
            if waiting or outcome == Outcome.NOTHING_TRIED:
                more = self._more_time(waiting or list(self.setting.candidates))
                self.conclusion = dataclasses.replace(self.conclusion, more_time=more)
            return None
        reason = f"{fastest}{does_not_pay(self.measured[fastest.id], self.setting.steps)}"
        long_plan = self._long_plan(self.setting.base, verified=False)
        return self._end(Outcome.NOTHING_HELPS, reason, long_plan)

    def _waiting(self) -> list[Candidate]:
        """What is likely to bring more than noise, and was not tried by itself because the time ended.

        That all together was slower says nothing of each.
        """
        waiting, tried = dict[str, Candidate](), set[str]()
        for candidate in self.setting.candidates:
            plan, name = candidate.on(self.setting.base), candidate.technique.name
            if plan.id in self.measured or plan == self.setting.base:
                tried.add(name)
            likely = candidate.promise >= CLEARLY_BETTER and not self._banned & set(candidate.techniques)
            if likely and not self._hopeless(plan, candidate) and not self._warms_up_too_long(candidate):
                waiting.setdefault(name, candidate)
        return [candidate for name, candidate in waiting.items() if name not in tried]

    def _more_time(self, waiting: list[Candidate]) -> str:
        """A budget in which these can be tried as well, and the best of them settled."""
        plans = [candidate.on(self.setting.base) for candidate in waiting]
        seen = max((trial.seconds for trial in self.trials), default=0.0)  # warm-up included
        seconds = self.setting.budget_seconds - self.left
        seconds += sum(max(seen, self.times.trial(plan)) for plan in plans)
        seconds += max(map(self.times.settling, plans), default=0.0)
        return enough(max(seconds, 1.5 * self.setting.budget_seconds))

    def _end(self, outcome: Outcome, reason: str, long_plan: LongPlan | None = None) -> None:
        self.conclusion = Conclusion(self.setting.base, ONE, outcome, reason, None, long_plan)
