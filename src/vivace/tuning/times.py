"""How long things take: what a tuning is worth, and the one model of what a search's parts cost."""

from __future__ import annotations

import math
import statistics

from vivace.errors import InputError
from vivace.ledger import Trial
from vivace.measuring.budget import BUDGETS, SHARE
from vivace.measuring.pace import COMPILING_SECONDS
from vivace.measuring.paired import BLOCK_SECONDS
from vivace.plan import Plan
from vivace.tuning.objective import Length
from vivace.tuning.requests import Answer
from vivace.verifying.effort import Effort
from vivace.verifying.verdict import Verdict
from vivace.words import count, duration

LEAST_SECONDS = 60.0  # to find, verify and confirm a plan whose steps take no time

# Of a warm-up with all compiled: in six recorded confirmations 1.7 to 3.9 s, after first ones of 6 to 43.
AGAIN_SECONDS, AGAIN_SHARE = 2.0, 0.05
PATIENCE_SECONDS = 20.0  # before a process counts as hanging, however little time is left
TIMING_SECONDS = 6.0  # of a comparison that was never seen
LONGEST_COMPARISON = 15.0  # plans undecided by then differ by less than the confirmation can tell
LONGEST_ROUND = 10.0  # of a confirmation: the spread between processes is the larger part of the interval
ROUNDS = 3  # the least that an interval across processes needs


def check_length(steps: int | None, runs: int) -> None:
    """Raises InputError where a training cannot have so many steps, or so many runs."""
    if runs < 1:
        raise InputError(f"runs is {runs}; it must be 1 or more")
    if steps is not None and steps < 1:
        raise InputError(f"steps is {steps}; a training has at least 1, or leave it out")


def auto_budget(length: Length) -> float:
    """Seconds that all runs of a training are worth: a tenth of their length, up to an hour; ten minutes
    where that is not known.
    """
    if length.steps is None:
        return BUDGETS["balanced"]
    return min(BUDGETS["max"], SHARE * length.runs * length.reference().seconds)


def least_seconds(step_seconds: float) -> float:
    """In which one plan can be found, verified and confirmed: a verification runs so many steps at least."""
    return LEAST_SECONDS + ruling_at_least(step_seconds)


def ruling_at_least(step_seconds: float) -> float:
    """Of the steps of a verification with the least effort there is."""
    return Effort.within(0.0, step_seconds).rehearsing(0.0, step_seconds).seconds(step_seconds, step_seconds)


def too_short(length: Length) -> str:
    """Why tuning is not worth its time, where a tenth of the trainings is less than it needs at least."""
    whole, stepping = length.reference().seconds, (length.steps or 0) * length.step_seconds
    beside = f"{duration(whole - stepping)} and " if whole - stepping > 0.05 * whole else ""
    one = f"{beside}{count(length.steps, 'step')} of {duration(length.step_seconds)}"
    repeated = f", {count(length.runs, 'time')}" if length.runs > 1 else ""
    least = least_seconds(length.step_seconds)
    return (
        f"This training takes {duration(whole)} ({one}){repeated}; tuning, at least {duration(least)}. Give "
        f"--runs N for more runs, --budget {math.ceil(least / 60)}m, or train with --tune"
    )


def beforehand(length: Length, budget_seconds: float, *, given: bool) -> str:
    """What a person should know before a search begins; empty where that is nothing.

    `given` says whether the budget is the person's own.
    """
    budget = duration(budget_seconds)
    if length.steps is None:
        return (
            "How long this training is cannot be told from its data: give --steps N. Without that one "
            f"training of any length is meant: the plan with the fastest step is sought for {budget}, and no "
            "warm-up is weighed against it"
        )
    whole = length.runs * length.reference().seconds
    if not given or budget_seconds <= whole:
        return ""
    what = "The training takes" if length.runs == 1 else f"{length.runs} trainings take"
    return (
        f"{what} about {duration(whole)}, the budget is {budget}: tuning may take longer than it can save; "
        "give --runs N if you train it more often, or --budget auto"
    )


def enough(seconds: float) -> str:
    """The next larger budget that a person would give, such as ``5m``."""
    minutes = next((one for one in (1, 2, 5, 10, 20, 30, 60) if 60 * one >= seconds), 0)
    return f"{minutes}m" if minutes else f"{math.ceil(seconds / 3600)}h"


def late(beyond_seconds: float) -> str:
    """What a person should know when settling begins that ends so long after the budget."""
    return (
        f"to verify and confirm what was found takes about {duration(beyond_seconds)} more than the budget; "
        "Ctrl-C ends that with the best so far, not verified"
    )


class Times:
    """What the parts of a search take, in seconds: guessed from the reference, then learned from answers.

    Args:
        budget_seconds: of the whole tuning.
        step_seconds: of the reference.
        opening_seconds: that the reference's process took until it was warm.
        compiling_seconds: of a warm-up that compiles, as long as none was seen.
    """

    def __init__(
        self,
        budget_seconds: float,
        step_seconds: float,
        opening_seconds: float,
        compiling_seconds: float = COMPILING_SECONDS,
    ) -> None:
        self.budget_seconds, self.step_seconds = budget_seconds, step_seconds
        self._opening_seconds, self._compiling_seconds = opening_seconds, compiling_seconds
        self._openings: list[float] = []
        self._timings: list[float] = []
        self._rounds: list[float] = []
        self._verifications: list[float] = []
        self._warmups: dict[Plan, float] = {}

    def learn(self, answer: Answer) -> None:
        """Take over how long something took."""
        if isinstance(answer, Verdict):
            if answer.metric is None:  # which whole trainings may have gone into
                self._verifications.append(answer.seconds)
        elif isinstance(answer, Trial) and answer.status == "measured":
            if answer.role == "confirmation":
                self._rounds.append(answer.seconds / answer.rounds)
                return
            warmup = answer.warmup_seconds or 0.0
            timed = sum(max(BLOCK_SECONDS, a) + max(BLOCK_SECONDS, b) for a, b in answer.pairs)
            timed = min(timed, answer.seconds)
            self._warmups[Plan.from_dict(answer.techniques)] = warmup
            self._timings.append(timed)
            self._openings.append(max(0.0, answer.seconds - timed - warmup))

    @property
    def opening(self) -> float:
        """A new process with a plan open in it, less what the plan needs to warm up."""
        return statistics.median(self._openings) if self._openings else self._opening_seconds

    def warmup(self, plan: Plan) -> float:
        """Of a plan; where it was not seen yet, the longest of those that compile alike."""
        if plan in self._warmups:
            return self._warmups[plan]
        slow = {technique for technique in plan.techniques if technique.card.compiles}
        alike = [seconds for other, seconds in self._warmups.items() if slow & set(other.techniques)]
        return max(alike, default=self._compiling_seconds) if slow else 0.0

    def warmup_again(self, plan: Plan) -> float:
        """Of a plan in a new process, once this machine has compiled it."""
        first = self.warmup(plan)
        return min(first, AGAIN_SECONDS + AGAIN_SHARE * first)

    def start(self, plan: Plan) -> float:
        """Until a plan can be timed."""
        return self.opening + self.warmup(plan)

    def trial(self, plan: Plan) -> float:
        """One whole trial of a plan."""
        return self.start(plan) + (statistics.median(self._timings) if self._timings else TIMING_SECONDS)

    def limit(self, plan: Plan, left: float) -> float:
        """The most that a trial may take: half of the time left, or twice what one that compiles should."""
        expected = min(left, 2.0 * self.start(plan)) if plan.compiles else 0.0
        return max(PATIENCE_SECONDS, 0.5 * left, expected)

    def comparing(self, plan: Plan, left: float) -> float:
        """The most that a trial's timing may take: a tenth of the time left, within bounds."""
        enough = max(LONGEST_COMPARISON, 30 * self.step_seconds)
        wanted = max(TIMING_SECONDS, min(0.1 * left, enough))
        return max(2.0, min(wanted, left - self.start(plan)))

    def baselines(self) -> tuple[float, float]:
        """One further baseline: in all, and its timing."""
        timing = max(2.0, 0.05 * self.budget_seconds - self.opening)
        return self.opening + timing, timing

    def ruling(self) -> float:
        """What the ruler is given for a plan."""
        return min(0.3 * self.budget_seconds, 6 + 300 * self.step_seconds)

    def verification(self) -> float:
        """Of one plan, the reference's own run included."""
        return max(self._verifications, default=self.ruling())

    def round(self, left: float) -> float:
        """The timing of one pair of processes of a confirmation."""
        return min(max(4.0, left / 5), max(LONGEST_ROUND, 20 * self.step_seconds))

    def one_round(self) -> float:
        """Of a confirmation of a plan that warms up at once."""
        return max(self._rounds, default=2 * self.opening + max(4.0, 10 * self.step_seconds))

    def confirmation(self) -> float:
        """Of a plan that warms up at once."""
        return ROUNDS * self.one_round()

    def settling_at_least(self, plan: Plan, more: int = 0) -> float:
        """To verify a plan, and as many `more`, and confirm it by one pair of processes: that is done though
        the time is over.
        """
        ruling = max(self._verifications, default=self.opening + ruling_at_least(self.step_seconds))
        return (1 + more) * ruling + self.one_round() + self.warmup_again(plan)

    def settling(self, plan: Plan) -> float:
        """To verify and confirm a plan, which warms up again in each round: what is kept for that."""
        base = min(0.45 * self.budget_seconds, self.verification() + self.confirmation())
        return base + ROUNDS * self.warmup_again(plan)
