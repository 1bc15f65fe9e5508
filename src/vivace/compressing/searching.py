"""The search over forms: which is tried when, until when, and what an interruption leaves."""

from __future__ import annotations

import dataclasses
import math
import time

from vivace.compressing.bench import PATIENCE_SECONDS, Bench
from vivace.compressing.further import Further
from vivace.compressing.journal import Journal
from vivace.compressing.order import Order
from vivace.compressing.result import Beside, Tried, choose
from vivace.errors import Unsteady, VivaceError
from vivace.events import Tell
from vivace.serving.forms import BESIDE, REFERENCE, TRAINED_PLAN, Form, form_named
from vivace.words import count, fast_between, times


class Search:
    """Tries forms in the order that the first results teach.

    Args:
        forms: all that may be tried, without the reference.
        by_size: the smallest form is wanted, and not the fastest.
        every: no form is passed over, and each is judged to the end.
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
    ) -> None:
        self.bench, self.forms, self.journal, self._tell = bench, forms, journal, tell
        self.by_size, self.every = by_size, every or by_size
        self.order = Order(forms, every=self.every)
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
            found = self._whole()
            self._settle(found)
        except KeyboardInterrupt:
            self.interrupted = True
            if not self._measured:
                raise
            self.bench.renew()
            found = self._whole()
        return found

    def train_further(self, tried: list[Tried], way: Further) -> None:
        """Add a model that is trained further to what was tried.

        The best is measured again in fresh processes.

        Ctrl-C leaves what was tried before it.
        """
        if self.interrupted:
            return
        try:
            one = way.tried(tried, choose(tried, by_size=self.by_size))
            if one is None:
                return
            tried.append(one)
            if choose(tried, by_size=self.by_size) is one:
                self._settle(tried)
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
    def ended_early(self) -> bool:
        """Did the budget end before all that was worth it was tried?"""
        return bool(self.order.worth_it()) or any(one.status == "untried" for one in self.tried.values())

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
        one = self.bench.attempt(form, by_size=self.by_size, best=None if self.every else self._best())
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
                one = Tried(form.name, form.does, form.runtime, form.numbers, "untried", self._why(form))
            found.append(one)
        return found

    def _why(self, form: Form) -> str:
        if form.name in self.order.worth_it():
            return "the budget ended first"
        guess, best = self.order.expected(form.name), self.order.best
        return f"by what the others gave {fast_between(guess.low, guess.high)}, and the best is {times(best)}"

    def _settle(self, tried: list[Tried]) -> None:
        """The best form measured again in fresh processes; one that is not faster there, or not as fast as
        it was, gives way to the next.
        """
        self.bench.deadline = math.inf
        while (best := choose(tried, by_size=self.by_size)).name not in (REFERENCE, *self._confirmed):
            assert best.ratio is not None
            self._tell("phase", {"name": f"{best.name} again, in fresh processes"})
            place = tried.index(best)
            try:
                again = self.bench.confirmed(form_named(best.name), best.ratio)
            except Unsteady as error:
                tried[place] = dataclasses.replace(best, status="unmeasured", reason=str(error))
                continue
            except VivaceError as error:
                tried[place] = dataclasses.replace(best, status="failed", reason=str(error))
                continue
            tried[place] = dataclasses.replace(best, ratio=again)
            if self.by_size or again.low > 1.0:
                self._confirmed.add(best.name)
                continue
            reason = "not faster when measured again in fresh processes"
            tried[place] = dataclasses.replace(best, ratio=again, status="refused", reason=reason)
