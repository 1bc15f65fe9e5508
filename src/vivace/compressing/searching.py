"""The search over forms: which is tried when, until when, and what an interruption leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

from vivace.compressing.bench import PATIENCE_SECONDS, Bench, outcome_of
from vivace.compressing.further import Further
from vivace.compressing.journal import Journal
from vivace.compressing.order import Order
from vivace.compressing.result import Beside, Tried, choose
from vivace.errors import Unsteady, VivaceError
from vivace.events import Tell
from vivace.ledger import Ratio
from vivace.serving.forms import BESIDE, REFERENCE, TRAINED_PLAN, Form, form_named
from vivace.words import count, fast_between, times

ATTEMPTS = 3  # to measure the best again


class Search:
    """Tries forms in the order that the first results teach.

    Args:
        forms: all that may be tried, without the reference.
        by_size: the smallest form is wanted, and not the fastest.
        every: no form is passed over, and each is judged to the end.
        matrix_units: does the processor have them, for bfloat16 and int8?
        deadline: of the budget, by `time.monotonic`; a form that is begun goes on beyond it for a minute, and
            so long is tried at least until one is measured.
    """

    def __init__(
        self,
        bench: Bench,
        forms: tuple[Form, ...],
        journal: Journal,
        tell: Tell,
        *,
        by_size: bool,
        every: bool,
        deadline: float,
        matrix_units: bool = True,
    ) -> None:
        self.bench, self.forms, self.journal, self._tell = bench, forms, journal, tell
        self.by_size, self.every = by_size, every or by_size
        self.order = Order(forms, every=self.every, matrix_units=matrix_units)
        self.tried: dict[str, Tried] = {}
        self.interrupted = False
        self._deadline = deadline
        self._patient = deadline  # as long as nothing is measured
        self._confirmed: set[str] = set()  # forms that were as fast again in fresh processes
        self.bench.deadline = deadline

    def run(self, known: list[Tried]) -> list[Tried]:
        """The reference and every form, in the order of `forms`; `known` were tried before.

        Ctrl-C ends it with what was tried until then; KeyboardInterrupt is raised where that is nothing.
        """
        self._patient = max(self.bench.deadline, time.monotonic() + PATIENCE_SECONDS)
        for one in known:
            self._learn(one)
        for form in self.forms:
            if form.missing():
                self._learn(self.bench.attempt(form, by_size=self.by_size))
        try:
            self._try_all()
            self._try_again()
            while not self._holds(found := self._whole()):
                self._try_all()  # what was passed over beside a best that did not hold
        except KeyboardInterrupt:
            self.interrupted = True
            if not self._measured:
                raise
            self.bench.renew()
            found = self._whole()
        return found

    def train_further(self, tried: list[Tried], way: Further) -> None:
        """Add a model that is trained further to what was tried; the best is measured again in fresh
        processes. Ctrl-C leaves what was tried before it.
        """
        if self.interrupted:
            return
        self.bench.deadline = math.inf  # the person gave it a time of its own
        try:
            one = way.tried(tried, choose(tried, by_size=self.by_size))
            if one is None:
                return
            tried.append(one)
            if choose(tried, by_size=self.by_size) is one:
                while not self._holds(tried):
                    pass
        except KeyboardInterrupt:
            self.interrupted = True
            self.bench.renew()

    def beside(self, tried: list[Tried], batches: tuple[int, ...]) -> list[Beside]:
        """The best form, torch.compile as it comes and the plan that trained the model, in calls of each of
        these sizes beside the model as it is.

        Each may take as long to open as one that was tried. Ctrl-C leaves the sizes that were done.
        """
        best = choose(tried, by_size=self.by_size)
        forms = [form for form in BESIDE if form.name != TRAINED_PLAN or self.bench.facts["trained"]["plan"]]
        forms += [form_named(best.name)] if best.name != REFERENCE else []
        found: list[Beside] = []
        self.bench.deadline = self._deadline
        try:
            for batch in () if self.interrupted else batches:
                names = ", ".join(form.name for form in forms)
                self._tell("phase", {"name": f"{names}: {count(batch, 'sample')} a call"})
                found += self.bench.beside(forms, batch)
        except KeyboardInterrupt:
            self.interrupted = True
        return found

    def is_settled(self, tried: list[Tried]) -> bool:
        """Was the best measured again in fresh processes, if there is one?"""
        return choose(tried, by_size=self.by_size).name in (REFERENCE, *self._confirmed)

    @property
    def num_left(self) -> int:
        """How many forms are worth it that have not been tried, or were begun as the budget ended."""
        return len(self.order.worth_it()) + sum(one.status == "untried" for one in self.tried.values())

    @property
    def left(self) -> float:
        """Seconds of the budget that are left; negative once it is spent."""
        return self.bench.deadline - time.monotonic()

    def _try_all(self) -> None:
        while True:
            form = self.order.ask(self.left if self._measured else self._patient - time.monotonic())
            if form is None:
                return
            begun = {"form": form.name, "does": form.does, "left_seconds": self._expected}
            self._tell("form_begin", begun)
            self._try(form)

    def _try_again(self) -> None:
        """What others' work kept from being measured, once, while the budget lasts."""
        for name, one in list(self.tried.items()):
            if one.status != "unmeasured" or self.left < self.order.seconds_of(name):
                continue
            self._tell("phase", {"name": f"{name} again, as the machine was busy"})
            self._try(form_named(name))

    def _try(self, form: Form) -> None:
        best = None if self.every else self._best()
        one = self.bench.attempt(form, by_size=self.by_size, best=best, brief=not self.every)
        self._learn(one)
        self.journal.add(one)
        self._tell("form_end", {"form": one, "left_seconds": self._expected})

    @property
    def _measured(self) -> bool:
        return any(one.ratio is not None for one in self.tried.values())

    @property
    def _expected(self) -> float:
        """Seconds until nothing is left to try, or the budget ends."""
        return max(0.0, min(self.order.left_seconds(), self.left))

    def _learn(self, one: Tried) -> None:
        self.tried[one.name] = one
        self.order.tell(one.name, one.ratio, kept=one.status == "kept", seconds=one.seconds)

    def _best(self) -> Tried | None:
        kept = [one for one in self.tried.values() if one.status == "kept" and one.ratio]
        return max(kept, key=lambda one: one.ratio.counts if one.ratio else 0.0, default=None)

    def _whole(self) -> list[Tried]:
        """The reference, what was tried, and why the rest was not, in the order of `forms`."""
        found = [self.bench.reference()]
        for form in self.forms:
            one = self.tried.get(form.name)
            if one is None and self.interrupted:
                continue
            if one is None:
                one = outcome_of(form, "untried", self._why(form))
            found.append(one)
        return found

    def _why(self, form: Form) -> str:
        if form.name in self.order.worth_it():
            return "the budget ended first"
        guess, best = self.order.expected(form.name), self.order.best
        likely = fast_between(guess.low, guess.high)
        return f"by what the others gave {likely}, and the best is {times(best)}: not worth its time"

    def _holds(self, tried: list[Tried]) -> bool:
        """Is the best form as fast when measured again in fresh processes? One that is not faster there, or
        not as fast as it was, gives way.
        """
        if self.is_settled(tried):
            return True
        best = choose(tried, by_size=self.by_size)
        again = self._measured_again(best)
        tried[tried.index(best)] = again
        if best.name in self.tried:
            self.tried[best.name] = again
            self.order.tell(best.name, again.ratio, kept=again.status == "kept")
        return self.is_settled(tried)

    def _measured_again(self, best: Tried) -> Tried:
        assert best.ratio is not None
        self._tell("phase", {"name": f"{best.name} again, in fresh processes"})
        deadline, self.bench.deadline = self.bench.deadline, math.inf
        try:
            again = self._confirmed_ratio(best.name, best.ratio)
        except Unsteady as error:
            return dataclasses.replace(best, status="unmeasured", reason=str(error))
        except VivaceError as error:
            return dataclasses.replace(best, status="failed", reason=str(error))
        finally:
            self.bench.deadline = deadline
        if self.by_size or again.low > 1.0:
            self._confirmed.add(best.name)
            return dataclasses.replace(best, ratio=again)
        reason = "not faster when measured again in fresh processes"
        return dataclasses.replace(best, ratio=again, status="refused", reason=reason)

    def _confirmed_ratio(self, name: str, first: Ratio) -> Ratio:
        """The form and the reference in fresh processes; where others' work hinders, up to `ATTEMPTS` times,
        as a form that was measured once should not give way to a slower one for that. Raises Unsteady.
        """
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(Unsteady):
                return self.bench.confirmed(form_named(name), first)
        return self.bench.confirmed(form_named(name), first)
