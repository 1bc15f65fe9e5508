"""What a script pays for being looked at, by a clock that the tests turn, and by counting calls."""

import contextlib
import dataclasses
import itertools
import json
import mmap
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.ledger import Ratio
from vivace.live import candidates, conductor, course, loop, spending
from vivace.live.candidates import additions
from vivace.live.conductor import Conductor
from vivace.live.copies import times_on_copies
from vivace.live.ending import document_of, tell
from vivace.live.errand import Errand
from vivace.live.hosted import Hosted
from vivace.live.kept import CannotKeep, Kept, KeptCall
from vivace.live.loop import Loop
from vivace.live.pairs import Comparison, Pair, Timing, compared
from vivace.live.proof import FEW_SHADOWS, SHADOWS
from vivace.live.spending import Clock, Spending, search_seconds
from vivace.plan import Plan
from vivace.profiling.record.guard import Guard
from vivace.technique import Card, Numerics, Stage, Technique, registry

PACKAGE = str(Path(vivace.__file__).parent)
HIDING = Path(__file__).parents[1] / "scenes" / "edits" / "hiding.py"
GAIN = {"planted_gain": {}}


@dataclasses.dataclass(frozen=True)
class PlantedGain(Technique):
    """Changes nothing but what `Timed` makes of it; it is timed on copies as what acts on a model is."""

    name: ClassVar[str] = "planted_gain"
    card: ClassVar[Card] = Card(stage=Stage.MODEL, numerics=Numerics.EXACT, summary="planted", source="tests")

    def apply(self, build):
        """Nothing."""


class Timed(nn.Module):
    """Its forward pass takes `seconds`, or fewer under a plan; of `gains`, by what acts, on which step."""

    turned: ClassVar[type]
    seconds = 0.01
    acting = 0
    steps = 0
    gain = staticmethod(lambda step: 1.0)

    def forward(self, inputs):
        gain = Timed.gain(Timed.steps) if Timed.acting else 1.0
        if self.training:
            Timed.turned.current.now += Timed.seconds / gain
        return inputs


@pytest.fixture
def timed(tmp_path, monkeypatch, one_thread, turned):
    """``timed(train, seconds, gain)``: a script whose steps take so long; returns loop and clock."""
    monkeypatch.setitem(registry._registered, PlantedGain.name, PlantedGain)
    monkeypatch.setattr(candidates, "FEWEST_FAULTS", 0)
    turned()
    Timed.turned = turned
    monkeypatch.setattr(course, "later", lambda root: None)
    begun, ended = Hosted.__init__, Hosted.close

    def begin(self, *arguments, **keywords):
        begun(self, *arguments, **keywords)
        Timed.acting += bool(self.plan.techniques)
        self.counted = bool(self.plan.techniques)

    def end(self):
        ended(self)
        Timed.acting -= getattr(self, "counted", False)
        self.counted = False

    monkeypatch.setattr(Hosted, "__init__", begin)
    monkeypatch.setattr(Hosted, "close", end)
    monkeypatch.setattr(
        course, "additions", lambda *_: [[technique] for technique in Plan.from_dict(GAIN).techniques]
    )

    def run(train, seconds=0.01, gain=lambda step: 1.0, plan=None):
        turned()
        Timed.turned, Timed.seconds, Timed.gain = turned, seconds, staticmethod(gain)
        Timed.acting = Timed.steps = 0
        watching = Loop(
            Errand(str(tmp_path), "runs/run", "python train.py", plan), turned.current.clock, tell=tell
        )
        watching.install()
        try:
            train()
        finally:
            watching.finish()
        return watching

    return run


def plain(steps, before_step=lambda step: None):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            before_step(step)
            Timed.steps = step
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    return train


def in_passes(passes, batches):
    """Passes over a loader of so few batches, each followed by an evaluation."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.ones(2 * batches, 4))
        for _ in range(passes):
            model.train()
            for (inputs,) in DataLoader(data, batch_size=2):
                Timed.steps += 1
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))

    return train


def accumulating(steps, calls):
    """Steps of so many calls each, but for the first ones, which have one."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            for _ in range(calls if step > 5 else 1):
                model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    return train


class Again(DataLoader):
    """Goes through one iterator for ever, a pass at a time, as those do whose workers live on."""

    source = None

    def __iter__(self):
        self.source = self.source or itertools.cycle(super().__iter__())
        yield from itertools.islice(self.source, len(self))


def test_a_copy_of_an_accumulating_step_is_one_call(timed):
    """Calls are counted anew, as some scripts accumulate over more batches later."""
    watching = timed(accumulating(140, 8), 0.02)
    assert watching.conductor is not None
    assert watching.copy_seconds == pytest.approx(0.02, rel=0.1)


def test_steps_that_become_longer_took_what_they_took(timed):
    watching = timed(accumulating(20, 8), 0.02)  # 118 calls
    assert document_of(watching)["reason"].startswith("its steps took 2.7 s in all")


def test_passes_over_a_loader_that_keeps_its_iterator_are_seen(timed):
    data = TensorDataset(torch.ones(40, 4))
    seen = []

    def train():
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader, held_out = Again(data, batch_size=2), Again(data, batch_size=8)
        for _ in range(3):
            for (inputs,) in loader:
                model(inputs).mean().backward()
                optimizer.step()
            with torch.no_grad():
                Timed.turned.current.now += sum(1.0 for _ in held_out)
            seen.append(loops[-1]._pass)

    loops, begin = [], Loop.install
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "install", lambda self: loops.append(self) or begin(self))
        own = Again.__iter__
        watching = timed(train)
    assert seen[1:] == [(20, 20), (40, 20)]
    assert max(watching.step_seconds) < 1.0, "evaluating is no part of a step"
    assert Again.__iter__ is own


def test_a_look_into_another_loader_is_no_pass(timed):
    data = TensorDataset(torch.ones(40, 4))
    seen = []

    def train():
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader, held_out = DataLoader(data, batch_size=2), DataLoader(data, batch_size=8)
        for _ in range(3):
            next(iter(held_out))
            for (inputs,) in loader:
                model(inputs).mean().backward()
                optimizer.step()
            seen.append(loops[-1]._pass)

    loops, begin = [], Loop.install
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "install", lambda self: loops.append(self) or begin(self))
        timed(train)
    assert seen == [(0, 20), (20, 20), (40, 20)]


@pytest.mark.parametrize("gain", [0.6, 0.97, 1.0])
@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 400), (0.01, 60), (0.01, 900), (1.0, 700)])
def test_what_gains_nothing_costs_little(timed, seconds, steps, gain):
    """Never more than 1 %, what copies may fall short, and once a start-up, whenever the script ends."""
    watching = timed(plain(steps), seconds, lambda step: gain)
    alone = seconds * steps
    start = max(spending.START_SECONDS, search_seconds(seconds))
    share = spending.SHARE + spending.HOPED_SHARE * spending.CLOSE
    assert Timed.turned.current.now - alone <= share * alone + start
    assert Timed.turned.current.now <= alone * (1 + share + 1.2 / spending.PATIENCE) + 0.01
    assert watching.conductor is None or not watching.conductor.course.plan.techniques


@pytest.mark.parametrize("seconds", [0.01, 0.2])
def test_what_gains_is_found_and_pays(timed, seconds):
    watching = timed(plain(1500), seconds, lambda step: 1.5)
    assert watching.conductor.course.plan.names == tuple(GAIN)
    assert Timed.turned.current.now < 0.9 * 1500 * seconds


def test_a_short_script_is_only_counted(timed):
    watching = timed(plain(200), 0.01)
    assert watching.num_steps == 200
    assert watching.conductor is None
    assert watching.spending.waited < 0.001


def test_a_loop_too_short_for_a_search_to_pay_is_left_as_it_is(timed):
    """One that does not say its length may be longer."""
    assert timed(plain(800), 0.01, lambda step: 1.5).conductor is None
    assert timed(without_a_range(800), 0.01, lambda step: 1.5).conductor is not None
    assert timed(plain(1500), 0.01, lambda step: 1.5).conductor is not None


def without_a_range(steps):
    """A loop that does not say how long it is going to be."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        left = iter(range(steps))
        while next(left, None) is not None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    return train


def test_what_is_said_to_come_need_not_be_waited_for(timed):
    """By the length of a pass over the data, and by a loop over a range."""
    began = {}
    trains = {"pass": in_passes(1, 1500), "range": plain(1500), "open": without_a_range(1500)}
    for name, train in trains.items():
        began[name] = timed(train, 0.01, lambda step: 1.5).conductor.course.tried[0]["step"]
    assert began["pass"] < 300
    assert began["range"] < 300
    assert 400 < began["open"] < 900


def test_it_is_looked_often_whether_a_search_may_go_on(timed, monkeypatch):
    """A run of 72 s; what candidates there are is known, and not yet afforded, after a few steps of it."""
    (technique,) = Plan.from_dict(GAIN).techniques
    monkeypatch.setattr(course, "additions", lambda *_: [[technique]] * 7)
    watching = timed(plain(360), 0.2, lambda step: 1.5)
    (ranked,) = watching.conductor.course.ledger.read("ranked")
    assert ranked["step"] < 90
    assert Timed.turned.current.now < 0.9 * 360 * 0.2


def test_what_is_to_come_is_foretold_by_the_newest_steps(timed):
    """Beside others who stop using the processor, the rest of a run is as short as its steps have become."""
    foretold = []

    def before(step):
        Timed.seconds = 0.5 if step < 60 else 0.05
        if loops and loops[-1].conductor is not None:
            foretold.append((step, loops[-1].spending.coming()))

    loops, begin = [], Loop.install
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "install", lambda self: loops.append(self) or begin(self))
        timed(plain(600, before), 0.5, lambda step: 1.5)
    slow, fast = (next(seconds for step, seconds in foretold if step > first) for first in (30, 100))
    assert slow == pytest.approx(0.5 * 570, rel=0.1)
    assert 0.05 / 1.5 * 400 < fast < 1.1 * 0.05 * 500


def test_copies_that_take_far_longer_than_steps_wait_until_that_can_be_afforded(timed, monkeypatch):
    """As where others use the processor: nothing was begun that could not be afforded."""
    others = [type(f"Other{num}", (PlantedGain,), {"name": f"planted_{num}"}) for num in range(4)]
    for other in others:
        monkeypatch.setitem(registry._registered, other.name, other)
    monkeypatch.setattr(course, "additions", lambda *_: [[kind()] for kind in (PlantedGain, *others)])
    stepped, beyond = course.Proof._stepped, []

    def slowly(self, plan, things, noise, **keywords):
        turned = Timed.turned.current
        turned.now += 7 * Timed.seconds
        found = stepped(self, plan, things, noise, **keywords)
        return dataclasses.replace(found, wall_seconds=found.wall_seconds + 7 * Timed.seconds)

    def looked(self, plan, things):
        found = times(self, plan, things)
        spent = loops[-1].spending
        beyond.append(spent.spent - spent.allowed(Timed.seconds))
        return found

    loops, begin, times = [], Loop.install, course.Proof.times
    monkeypatch.setattr(Loop, "install", lambda self: loops.append(self) or begin(self))
    monkeypatch.setattr(course.Proof, "_stepped", slowly)
    monkeypatch.setattr(course.Proof, "times", looked)
    timed(plain(1500), 0.2, lambda step: 1.5)
    assert len(beyond) > 5
    assert max(beyond) <= 0.05


def test_where_looking_on_takes_all_that_may_be_spent_it_ends(timed, monkeypatch):
    """As where a model is called many times a step, for moments: waiting would never come to an end."""
    (technique,) = Plan.from_dict(GAIN).techniques
    monkeypatch.setattr(course, "additions", lambda *_: [[technique]] * 30)
    updated, left = Conductor.updated, []

    def slowly(self, optimizer):
        self.spending.waited += Timed.seconds
        left.append(self.spending.lacks(0.0, Timed.seconds))
        return updated(self, optimizer)

    monkeypatch.setattr(Conductor, "updated", slowly)
    loop = timed(plain(3000), 0.05, lambda step: 1.05)
    assert loop.left_alone == course.STARVED
    assert len(left) < 2500


def test_a_plan_that_acts_is_kept_where_looking_on_takes_all_that_may_be_spent(timed, monkeypatch):
    updated = Conductor.updated

    def slowly(self, optimizer):
        self.spending.waited += Timed.seconds if self.course.plan.techniques else 0.0
        return updated(self, optimizer)

    monkeypatch.setattr(Conductor, "updated", slowly)
    loop = timed(plain(6000), 0.05, lambda step: 1.5)
    assert loop.left_alone == ""
    assert loop.conductor.course.plan.names == tuple(GAIN)


def test_steps_that_become_shorter_do_not_end_a_search_that_waits(timed, monkeypatch):
    """As where others have stopped using the processor: less may be spent then, and less is needed."""
    (technique,) = Plan.from_dict(GAIN).techniques
    monkeypatch.setattr(course, "additions", lambda *_: [[technique]] * 30)

    def before(step):
        Timed.seconds = 0.5 if step < 40 else 0.1

    loop = timed(plain(4000, before), 0.5, lambda step: 1.5)
    assert loop.rest == ""
    assert loop.conductor.course.plan.names == tuple(GAIN)


def test_a_loop_that_ends_before_it_said_costs_little(timed):
    """`for step in range(100_000)`, left after a few steps: what is said counts no more than what passed."""

    def train():
        with contextlib.suppress(StopIteration):
            plain(100_000, stopping)()

    def stopping(step):
        if step == 150:
            raise StopIteration

    timed(train, 0.01)
    assert Timed.turned.current.now - 1.5 <= (1 + spending.TRUSTED) * 1.5 / spending.PATIENCE + 0.05


def test_steps_that_are_too_small_are_left_alone(timed):
    watching = timed(plain(40), 0.0001)
    assert "less than 0.2 ms" in watching.left_alone
    assert watching.num_steps < 30


def calls_of_ours(train_on, steps):
    """Calls into the package while the last of so many steps run."""
    found = []

    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)

    def before_step(step):
        if step == train_on:
            sys.setprofile(look)

    def train():
        try:
            plain(train_on + steps, before_step)()
        finally:
            sys.setprofile(None)

    return train, found


def test_once_nothing_is_faster_no_hook_is_left(timed):
    names = (
        (nn.Module, "__call__"),
        (torch.autograd, "backward"),
        (torch, "compile"),
        (DataLoader, "__iter__"),
    )
    before = [getattr(owner, name) for owner, name in names]
    after = []
    alone, known = calls_of_ours(5, 10)
    alone()  # hooks that other tests have silenced are called, too
    train, found = calls_of_ours(1400, 10)

    def watched():
        train()
        after.extend(getattr(owner, name) for owner, name in names)

    watching = timed(watched, 0.01)
    assert watching.conductor.course.tried[-1]["answer"] == "not_faster"
    assert after == before
    assert len(found) == len(known) + 2 * 10, found  # torch's two hooks of an update, which now do nothing


def test_while_a_script_is_only_counted_a_step_costs_two_hooks(timed, monkeypatch):
    monkeypatch.setattr(loop.Length, "look", lambda *_: None)  # at the loops of what runs the tests, too
    alone, known = calls_of_ours(5, 10)
    alone()  # hooks that other tests have silenced are called, too
    train, found = calls_of_ours(30, 10)
    watching = timed(train, 0.01)
    assert watching.conductor is None
    assert not [name for name in found if "conductor" in name.lower() or "_call." in name]
    assert found.count("Loop._updated") == 10
    assert found.count("Loop._backward.<locals>.backward") <= 2, "of each eighth step alone"
    assert found.count("Loop._is_recorded") == 10, "asked once a step"
    assert len(found) - len(known) <= 22 * 10


def test_a_script_that_compiles_late_differentiates_by_torch_alone(timed):
    seen, own = [], torch.autograd.backward

    def before(step):
        if step == 12:
            torch.compile(torch.sin)
        seen.append(torch.autograd.backward is own)

    timed(plain(40, before), 0.01)
    assert False in seen[:12]
    assert all(seen[13:])


def test_passes_shorter_than_a_segment_do_not_keep_it_from_deciding(timed):
    """A segment goes on over passes and evaluations, whose own steps are left out."""
    watching = timed(in_passes(230, 5), 0.01, lambda step: 1.5)
    assert watching.conductor.course.plan.names == tuple(GAIN)
    assert len(watching.conductor.course.verdicts) >= 2  # watched, too


def test_a_script_that_begins_anew_at_each_step_is_left_alone(timed):
    watching = timed(in_passes(60, 1), 0.01, lambda step: 1.5)
    assert "at nearly every step" in watching.left_alone or watching.conductor is None
    assert Timed.acting == 0


def test_what_becomes_slower_is_taken_back_over_short_passes(timed, monkeypatch):
    monkeypatch.setattr(spending, "PATIENCE", 1.0)
    watching = timed(in_passes(240, 5), 0.01, lambda step: 1.5 if step < 400 else 0.7)
    assert "it became slower" in watching.conductor.course.reason
    assert Timed.acting == 0


def test_a_gain_that_the_hooks_eat_up_is_none(timed, monkeypatch, turned):
    monkeypatch.setattr(spending, "PATIENCE", 1.0)
    of_a_step = 2 * turned.LOOK  # what the clock says of a hook that looks at it three times
    monkeypatch.setattr(conductor, "HOOKS", 0.0)
    assert timed(plain(300), 0.01, lambda step: 1.05).conductor.course.plan.techniques
    monkeypatch.setattr(conductor, "HOOKS", 0.001 / of_a_step)
    watching = timed(plain(300), 0.01, lambda step: 1.05)
    assert watching.conductor.course.tried[-1]["answer"] == "not_faster"


def test_watching_stays_within_its_share(timed):
    watching = timed(plain(3000), 0.3, lambda step: 1.3)
    assert watching.conductor.course.plan.techniques
    assert len(watching.conductor.course.verdicts) >= 2
    assert watching.spending.waited <= watching.spending.allowed(0.3) * 1.1


def test_a_candidate_that_is_much_slower_on_real_steps_is_stopped_after_two_pairs(timed, monkeypatch):
    """Copies of the step may be faster than the steps themselves."""
    stepped = course.Proof._stepped

    def quick(self, *arguments, **keywords):
        before, Timed.seconds = Timed.seconds, 0.001
        try:
            return stepped(self, *arguments, **keywords)
        finally:
            Timed.seconds = before

    monkeypatch.setattr(course.Proof, "_stepped", quick)
    monkeypatch.setattr(course, "HOPELESS", 0.0)
    watching = timed(plain(1600), 0.01, lambda step: 0.2)
    assert watching.conductor.course.tried[-1]["answer"] == "much slower on the script's own steps"
    assert watching.spending.lost < 2.5


def test_spending_is_what_it_says(turned):
    turned = turned()
    coming = [0.0]
    spent = Spending(turned.clock, coming=lambda: coming[0])
    turned.now += 8.0
    assert spent.affords(0.5, 0.001)
    assert not spent.affords(0.6, 0.001)
    coming[:] = [4.0]
    assert spent.affords(0.8, 0.001)
    assert not spent.affords(0.9, 0.001)
    coming[:] = [1000.0]
    assert spent.affords(1.0, 0.001)
    assert spent.affords(2.5, 1.0)
    assert not spent.affords(2.7, 1.0)
    turned.now += 1000.0
    spent.waited, spent.lost = 5.0, 5.0
    assert spent.affords(1.0, 0.001)
    assert not spent.affords(1.2, 0.001)
    assert not spent.pays(1.0, 640.0)
    assert spent.pays(1.0, 650.0)
    assert Spending(turned.clock, free_seconds=60.0).affords(1e9, 1.0)


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.0, course.WATCH_STEPS), (0.25, 4), (3.0, 1), (1e-4, course.WATCH_STEPS)]
)
def test_a_search_that_waits_looks_again_after_a_second(step_seconds, steps):
    """Where no step was timed, as none was like the others: after as many as between two looks at a plan."""
    waiting = SimpleNamespace(step_seconds=step_seconds, plan=Plan())
    assert course.Course._a_moment(waiting).steps == steps


def test_what_a_run_will_afford_it_is_not_yet_said_to_have(turned):
    turned = turned()
    spent = Spending(turned.clock, coming=lambda: 152.0)
    turned.now += 8.0
    assert not spent.affords(2.6, 1.0)  # of 8 s, and four times as many of what is to come
    assert spent.will_afford(10.0, 1.0)
    assert not spent.will_afford(10.2, 1.0)
    assert Spending(turned.clock, free_seconds=60.0).will_afford(1e9, 1.0)


def test_a_promise_must_be_twice_what_it_costs_and_may_cost_a_quarter_of_it(turned):
    turned = turned()
    spent = Spending(turned.clock, waited=1.0)
    assert spent.waited == 1.0
    turned.now += 100.0
    left, close = 100.0, 1.0 - 1.0 / (1.0 + spending.CLOSE)
    assert spent.promises(0.9, 0.4 * close * left, left)
    assert not spent.promises(0.9, 0.6 * close * left, left)
    spent.hoped = 0.0
    before = spent.allowed(0.001)
    assert spent.promises(1.2, 1.0, left)
    assert spent.hoped == pytest.approx(left * (1.0 - 1.0 / (1.2 + spending.CLOSE)))
    assert spent.allowed(0.001) - before == pytest.approx(spending.HOPED_SHARE * spent.hoped, rel=1e-3)
    spent.promises(1e9, 1.0, 1e9)  # however much: no more than the run has earned
    assert spent.allowed(0.001) - before <= 101.0 / spending.PATIENCE
    assert Spending(turned.clock, free_seconds=60.0).promises(1.0, 1e9, 0.0)


def test_what_compiling_took_too_long_is_paid_from_the_rest(turned):
    turned = turned()
    spent = Spending(turned.clock)
    turned.now += 100.0
    before = spent.allowed(0.001)
    spent.compiled(30.0)
    assert spent.allowed(0.001) - before == pytest.approx(2.0, rel=1e-3)
    assert spent.compiling_until(1.0) - turned.now == pytest.approx(100.0 / 16.0, rel=1e-3)
    spent.waited = 50.0
    assert spent.compiling_until(1.0) - turned.now == pytest.approx(2.0, rel=1e-3)
    searching = Spending(turned.clock, free_seconds=60.0)
    assert searching.compiling_until(1.0) - turned.now == pytest.approx(60.0, rel=1e-3)


def test_candidates_that_are_refused_one_after_the_other_wait_for_each_other(timed, monkeypatch):
    """Also where all could have been judged between the same two steps."""
    judged, late = [], []
    names = [f"planted_{number}" for number in range(6)]
    planted = [type(name.title(), (PlantedGain,), {"name": name}) for name in names]
    for one in planted:
        monkeypatch.setitem(registry._registered, one.name, one)
    monkeypatch.setattr(course, "additions", lambda *_: [[one()] for one in planted])
    monkeypatch.setattr(course.Proof, "expected_seconds", lambda self, plan: 0.4)

    def judge(self, plan):
        Timed.turned.current.now += 0.4
        judged.append(plan)
        late.extend([plan] * (loops[-1].spending.spent > 1.02 * loops[-1].spending.allowed(0.01)))
        return course.Verdict(False, "it is another step")

    loops, begin = [], Loop.install
    monkeypatch.setattr(Loop, "install", lambda self: loops.append(self) or begin(self))
    monkeypatch.setattr(course.Proof, "judge", judge)
    timed(plain(4000), 0.01, lambda step: 1.5)
    assert len(judged) > 2
    assert not late


def test_between_plans_that_are_slow_on_copies_the_script_goes_on(timed, monkeypatch):
    ran, times = {}, course.Proof.times

    def noted(self, plan, things):
        ran.setdefault(plan.names, Timed.steps)
        return times(self, plan, things)

    monkeypatch.setattr(course.Proof, "times", noted)
    other = type("Other", (PlantedGain,), {"name": "planted_other"})
    monkeypatch.setitem(registry._registered, other.name, other)
    monkeypatch.setattr(course, "additions", lambda *_: [[PlantedGain()], [other()]])
    timed(plain(3000), 0.01, lambda step: 0.02)
    assert ran["planted_gain",] < ran["planted_other",]


def proof_of(name, turned):
    """Of a kept step of a training in `HIDING`."""
    torch.manual_seed(0)
    model = runpy.run_path(str(HIDING))[name]().model()
    return proof_of_model(model, torch.randn(16, 8), turned)


def proof_of_model(model, values, turned):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = KeptCall(model, [optimizer], (values,), {})
    outputs = model(values)
    kept.returned(outputs)
    outputs.sum().backward()
    kept.end()
    return course.Proof(kept, course.inspect(), turned().clock)


class Attending(nn.Module):
    """Attention that leaves nothing out, whose operators are tagged as if they drew."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, inputs):
        heads = self.into(inputs).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(2))


def test_attention_without_dropout_may_be_in_16_bits(turned):
    torch.manual_seed(0)
    verdict = proof_of_model(Attending(), torch.randn(4, 12, 16), turned).judge(
        Plan.from_dict({"bf16_autocast": {}})
    )
    assert verdict.kept, verdict.reason


def test_where_kernels_draw_masks_of_their_own_no_step_is_held_against_another(turned):
    """Nothing is said of a kept step that its masks explain."""
    proof = proof_of("job", turned)
    verdict = proof.judge(Plan.from_dict({"bf16_autocast": {}}))
    assert not verdict.kept
    assert "drawn inside of kernels" in verdict.reason
    assert proof.judge(Plan.from_dict({"fused_optimizer": {}})).kept


def test_attention_leaves_nothing_out_where_steps_are_held_against_each_other(turned):
    """On a GPU its kernels draw other masks in 16 bits, from the same stream."""
    verdict = proof_of("attending", turned).judge(Plan.from_dict({"bf16_autocast": {}}))
    assert verdict.kept, verdict.reason


def test_a_proof_that_takes_too_long_is_interrupted_and_goes_on_with_what_it_has(monkeypatch, turned):
    """As where others have begun to use the processor: each step takes far longer than the one before."""
    turned, steps = turned(), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = torch.randn(6, 8)
    kept = KeptCall(model, [optimizer], (values,), {})
    outputs = model(values)
    kept.returned(outputs)
    outputs.sum().backward()
    kept.end()
    proof = course.Proof(kept, course.inspect(), turned.clock)
    plan, rounded, stepped = Plan.from_dict({"bf16_autocast": {}}), [], course.Proof._stepped

    def slowly(self, plan, *arguments, **keywords):
        found = stepped(self, plan, *arguments, **keywords)
        steps.append(plan)
        turned.now += 1.0
        return found

    def counted(self, plan, noise):
        found = distances(self, plan, noise)
        rounded.append(plan)
        return found

    distances = course.Proof._rounded
    monkeypatch.setattr(course.Proof, "_stepped", slowly)
    monkeypatch.setattr(course.Proof, "_rounded", counted)
    before = proof.expected_seconds(plan)
    assert proof.judge_until(plan, turned.now + 3.5) is None
    assert len(steps) == 4
    assert len(rounded) == 2
    assert proof.expected_seconds(plan) > before, "now it is told for the longest"
    assert proof.judge_until(plan, float("inf")) is not None
    shadows = [each for each in rounded if not each.techniques]
    assert len(shadows) in (FEW_SHADOWS, SHADOWS), "what was run is not run again"


def test_what_a_plan_makes_the_first_time_does_not_count_against_it(timed):
    """Kernels are made where a plan's copy of a step first runs: as long as several steps of these."""
    ran = itertools.count()  # which a copy does not put back

    def gain(step):
        return 0.2 if next(ran) == 0 else 1.5

    watching = timed(plain(1500), 0.05, gain)
    assert watching.conductor.course.plan.names == tuple(GAIN), watching.conductor.course.tried
    (ranked,) = watching.conductor.course.ledger.read("ranked")
    assert ranked["on_copies"][0]["ratio"] == pytest.approx(1.5, rel=0.01)


class Taken:
    """A proof whose copies' steps take so long, by the wall's and the processor's seconds."""

    def __init__(self, **seconds):
        self.seconds, self.kept = seconds, self
        self.device = torch.device("cpu")

    def copies(self):
        return ()

    def times(self, plan, things):
        return self.seconds[str(plan)].pop(0)


def ratios(proof, plan):
    """As `times_on_copies` finds them, where the script never goes on meanwhile."""
    found = times_on_copies(proof, [plan], 2)
    while True:
        try:
            next(found)
        except StopIteration as ended:
            return ended.value[0]


def test_steps_of_copies_beside_which_something_else_ran_are_taken_once_more():
    plan = Plan((PlantedGain(),))
    beside = [(1.2, 1.9), (0.8, 1.3)]  # as beside the script's own loaders, on two processors
    proof = Taken(planted_gain=[*beside, (0.4, 0.8), (0.5, 1.0)], reference=[(0.6, 1.2), (0.7, 1.3)])
    assert ratios(proof, plan) == {plan: pytest.approx(1.5)}
    proof = Taken(planted_gain=[(0.4, 0.8), (0.5, 1.0)], reference=[*beside, (0.6, 1.2), (0.7, 1.3)])
    assert ratios(proof, plan) == {plan: pytest.approx(1.5)}
    proof = Taken(planted_gain=[*beside, *beside], reference=[(0.6, 1.2), (0.7, 1.3)])  # it stays so
    assert ratios(proof, plan)[plan] < 1.0
    proof = Taken(planted_gain=[(0.4, 0.8), (0.5, 0.9)], reference=[(0.6, 1.1), (0.7, 1.3)])
    assert ratios(proof, plan)[plan] == pytest.approx(1.5)


@pytest.mark.parametrize(("gain", "steps_are_taken"), [(1.0, False), (3.0, True)])
def test_what_promises_too_little_for_the_steps_that_are_left_is_not_tried(
    timed, monkeypatch, gain, steps_are_taken
):
    monkeypatch.setattr(course.Proof, "expected_seconds", lambda self, plan: 4.0)
    watching = timed(plain(600), 0.1, lambda step: gain)
    assert any("verdict" in entry for entry in watching.conductor.course.tried) is steps_are_taken
    if not steps_are_taken:
        assert "too little for the steps that are left" in watching.conductor.course.tried[-1]["answer"]
        assert watching.conductor.course.reason == course.NOTHING_PROMISED
        assert watching.conductor.course.is_settled


@pytest.mark.parametrize(("gain", "soon"), [(1.05, True), (1.5, False)])
def test_a_small_gain_is_timed_again_soon(timed, gain, soon):
    watching = timed(plain(3000), 0.01, lambda step: gain)
    adopted, again = (watching.conductor.course.ledger.read(kind)[0]["step"] for kind in ("adopted", "timed"))
    assert (again - adopted < course.WATCH_STEPS) is soon


def test_pairs_that_share_a_segment_are_no_pairs_of_their_own():
    """Ratios that rise and fall together tell less than as many that do not."""
    ratios = [1.03, 1.04, 1.05, 1.03, 1.0, 0.99, 1.0, 1.02]
    together, mixed = (
        compared([Pair(Timing(one, one), Timing(1.0, 1.0)) for one in order], by_processor=True)
        for order in (ratios, [ratios[index] for index in (2, 5, 0, 4, 1, 6, 3, 7)])
    )
    for clock in ("wall", "cpu"):
        wide, narrow = getattr(together, clock), getattr(mixed, clock)
        assert wide.high / wide.low > narrow.high / narrow.low


def test_a_plan_whose_later_steps_are_not_faster_is_taken_back(timed, monkeypatch):
    """They are slower, though not beyond noise, in as many pairs as are ever timed at once."""
    adopted, adopt, seen = [], course.Course._adopt, []

    def adopting(self, plan, comparison):
        adopted.append(plan)
        adopt(self, plan, comparison)

    def noisy(pairs, **how):
        found = compared(pairs, **how)
        if not adopted:
            return found
        seen.append(len(pairs))
        ratio = Ratio(0.99, 0.9, 1.09)
        return dataclasses.replace(found, wall=ratio, cpu=ratio)

    monkeypatch.setattr(course.Course, "_adopt", adopting)
    monkeypatch.setattr(course, "compared", noisy)
    watching = timed(plain(2500), 0.01, lambda step: 1.08)
    assert adopted
    assert "its later steps are not faster" in watching.conductor.course.reason
    assert max(seen) == course.WATCHED_PAIRS
    assert Timed.acting == 0


@pytest.mark.parametrize(
    ("wall", "cpu", "nothing"), [(0.99, 0.99, True), (0.99, 1.2, False), (1.01, 0.9, False)]
)
def test_the_processors_clock_may_show_a_gain_that_the_walls_does_not(wall, cpu, nothing):
    ratios = [Ratio(estimate, 0.5, 2.0) for estimate in (wall, cpu)]
    assert Comparison(*ratios, (), by_processor=True).gains_nothing is nothing
    assert Comparison(*ratios, ()).gains_nothing is (wall <= 1.0)


def test_turns_without_a_plan_that_acts_are_counted_as_lost(timed):
    watching = timed(plain(6000), 0.01, lambda step: 1.5)
    assert watching.conductor.course.ledger.read("timed")
    assert watching.spending.lost > 3 * 2 * 0.01 * (1 - 1 / 1.5)


def test_what_is_told_counts_the_start_and_the_page(timed, monkeypatch, tmp_path):
    told = []
    for seconds in (0.0, 5.0):

        def slow(*_, seconds=seconds):
            Timed.turned.current.now += seconds
            return "a page"

        monkeypatch.setattr("vivace.live.page.page", slow)
        watching = timed(plain(1500), 0.01, lambda step: 1.5)
        told.append(json.loads((tmp_path / "run.json").read_text()))
        assert (tmp_path / "run.html").read_text() == "a page"
    assert told[1]["own_seconds"] - told[0]["own_seconds"] == pytest.approx(5.0, abs=0.01)
    assert told[1]["saved_seconds"] - told[0]["saved_seconds"] == pytest.approx(-5.0, abs=0.01)
    assert 0.006 < told[0]["step_seconds"] < 0.011  # of the newest steps, under the plan or alone
    assert told[0]["own_seconds"] > watching.spending.waited  # and what is looked at around the calls
    asked = Loop(Errand(str(tmp_path), "runs/run", "python train.py", launch_seconds=3.0), tell=tell)
    assert asked.spending.waited == 3.0
    assert document_of(asked)["saved_seconds"] == -3.0


@pytest.mark.parametrize(
    ("technique", "stays"),
    [("host_allocator", True), ("fused_optimizer", False), ("flush_denormals", False)],
)
def test_what_is_of_the_process_alone_stays_while_it_evaluates(timed, technique, stays):
    acting = []

    def train():
        model = nn.Sequential(Timed(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(400):
            Timed.steps = step
            optimizer.zero_grad()
            model.train()(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            if step % 100 == 99:
                with torch.no_grad():
                    model.eval()(torch.ones(2, 4))
                acting.append(Timed.acting)

    timed(train, 0.2, lambda step: 1.5, {technique: {}})
    assert acting[-1] == stays
    assert Timed.acting == 0


def test_a_fault_while_giving_up_leaves_no_hook(monkeypatch, tmp_path):
    def fails(*_):
        raise ZeroDivisionError("again")

    before = torch.autograd.backward
    watching = Loop(Errand(str(tmp_path), "runs/run", "python train.py"), tell=tell)
    watching.install()
    watching.conductor = type("Broken", (), {"fail": fails})()
    assert isinstance(watching.guard, Guard)
    watching.guard.fail(ValueError("first"))
    assert torch.autograd.backward is before
    assert loop.nn.Module.__call__ is nn.Module.__call__
    watching._finished = True


def test_copies_that_are_only_timed_are_made_once(timed, monkeypatch):
    """Of a large model to copy it takes as long as a step."""
    made, copies, times = [], Kept.copies, course.times_on_copies

    def counted(proof, plans, rounds):
        monkeypatch.setattr(Kept, "copies", lambda self: made.append(1) or copies(self))
        found = yield from times(proof, plans, rounds)
        monkeypatch.setattr(Kept, "copies", copies)
        assert rounds == 2
        return found

    monkeypatch.setattr(course, "times_on_copies", counted)
    watching = timed(plain(900), 0.05, lambda step: 1.5)
    (ranked,) = watching.conductor.course.ledger.read("ranked")
    assert ranked["on_copies"][0]["ratio"] == pytest.approx(1.5, rel=0.01)
    assert made == [1]


def test_a_plans_copies_follow_each_other(timed, monkeypatch):
    """oneDNN keeps 1,024 kernels: plans in turn would make theirs anew each time."""
    ran, times = [], course.Proof.times

    def noted(self, plan, things):
        ran.append(plan.names)
        return times(self, plan, things)

    monkeypatch.setattr(course.Proof, "times", noted)
    other = type("Other", (PlantedGain,), {"name": "planted_other"})
    monkeypatch.setitem(registry._registered, other.name, other)
    monkeypatch.setattr(course, "additions", lambda *_: [[PlantedGain()], [other()]])
    timed(plain(900), 0.05, lambda step: 1.0)
    assert ran == [("planted_gain",)] * 2 + [("planted_other",)] * 2 + [()] * 2


def test_kernels_of_convolutions_are_made_before_copies_are_timed(timed, monkeypatch):
    """Also where their memory order is the script's own and no other is tried."""
    asked, times = [], course.times_on_copies

    def train():
        model = nn.Sequential(Timed(), nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(200):
            Timed.steps = step
            optimizer.zero_grad()
            model(torch.ones(2, 3, 5, 5)).mean().backward()
            optimizer.step()

    monkeypatch.setattr(course, "additions", additions)
    monkeypatch.setattr(
        course,
        "times_on_copies",
        lambda proof, plans, rounds: asked.append(rounds) or times(proof, plans, rounds),
    )
    watching = timed(train, 0.3)
    assert "channels_last" in watching.conductor.course.own
    assert asked == [2]


@pytest.mark.parametrize(("steps", "rounds"), [(140, 1), (400, 2)])
def test_a_run_that_cannot_pay_for_two_rounds_of_copies_takes_one(timed, monkeypatch, steps, rounds):
    """Five plans and none, 0.5 s each: 6 s in two rounds, of which a run of 70 s may spend at most 5."""
    asked, times = [], course.times_on_copies

    def train():
        model = nn.Sequential(Timed(), nn.Conv2d(3, 4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            Timed.steps = step
            optimizer.zero_grad()
            model(torch.ones(2, 3, 5, 5)).mean().backward()
            optimizer.step()

    others = [type(f"Other{num}", (PlantedGain,), {"name": f"planted_{num}"}) for num in range(4)]
    for other in others:
        monkeypatch.setitem(registry._registered, other.name, other)
    monkeypatch.setattr(course, "additions", lambda *_: [[kind()] for kind in (PlantedGain, *others)])
    monkeypatch.setattr(
        course,
        "times_on_copies",
        lambda proof, plans, rounds: asked.append(rounds) or times(proof, plans, rounds),
    )
    watching = timed(train, 0.5, lambda step: 1.5)
    assert asked == [rounds]
    assert len(watching.conductor.course.ledger.read("ranked")) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("DefaultCPUAllocator: can't allocate memory", "the memory does not hold its model a second time"),
        ("no kernel for it", "a copy of its model fails: RuntimeError"),
    ],
)
def test_copies_that_fail_without_a_plan_are_no_fault_of_ours(timed, monkeypatch, tmp_path, fault, said):
    times = course.Proof.times

    def failing(self, plan, things):
        if not plan.techniques:
            raise RuntimeError(fault)
        return times(self, plan, things)

    monkeypatch.setattr(course.Proof, "times", failing)
    watching = timed(plain(900), 0.1)
    assert not watching.problems
    told = json.loads((tmp_path / "run.json").read_text())
    assert said in told["only_the_rest"]


def test_of_what_acts_on_the_process_alone_no_copies_are_timed(timed, monkeypatch):
    """Only the script's own steps can tell; and to give its memory back and take it again is not free."""
    monkeypatch.setattr(course, "additions", lambda *_: [[registry.find("host_allocator")()]])
    asked, times = [], course.times_on_copies
    monkeypatch.setattr(
        course,
        "times_on_copies",
        lambda proof, plans, rounds: asked.append(list(plans)) or times(proof, plans, rounds),
    )
    watching = timed(plain(1500), 0.01, lambda step: 1.3)
    assert asked == [[]]
    assert watching.conductor.course.plan.names == ("host_allocator",)


@pytest.mark.parametrize(("steps", "looks"), [(500, 0), (4000, 4)])
def test_looking_again_where_nothing_acts_stays_within_its_share(timed, monkeypatch, steps, looks):
    monkeypatch.setattr(course, "additions", lambda *_: [])
    monkeypatch.setattr(course, "later", candidates.later)
    asked, times = [], course.times_on_copies
    monkeypatch.setattr(
        course,
        "times_on_copies",
        lambda proof, plans, rounds: asked.append(plans) or times(proof, plans, rounds),
    )
    watching = timed(plain(steps), 0.1)
    assert [plan.names for plans in asked for plan in plans] == [("flush_denormals",)] * looks
    assert not watching.conductor.course.plan.techniques
    assert watching.spending.spent <= watching.spending.allowed(0.1)


@pytest.mark.parametrize(("megabytes", "is_tried"), [(0, False), (4, True)])
def test_where_no_memory_is_taken_anew_nothing_is_done_to_keep_it(timed, monkeypatch, megabytes, is_tried):
    """Taken by mappings of its own, however the C library keeps its memory."""
    monkeypatch.setattr(candidates, "FEWEST_FAULTS", 256)
    monkeypatch.setattr(course, "additions", additions)

    def take(step):
        if megabytes:
            with mmap.mmap(-1, megabytes * 2**20) as taken:
                taken.write(bytes(len(taken)))

    inspect = course.inspect

    def inspecting():
        with mmap.mmap(-1, 64 * 2**20) as taken:  # as imports do
            taken.write(bytes(len(taken)))
        return inspect()

    monkeypatch.setattr(course, "inspect", inspecting)
    watching = timed(plain(400, take), 0.1, lambda step: 1.0)
    why = [entry["answer"] for entry in watching.conductor.course.tried if "host_allocator" in entry["plan"]]
    assert why
    assert any("hardly any memory anew" in reason for reason in why) is not is_tried


@pytest.mark.parametrize(("name", "on_a_copy"), [("host_allocator", False), ("planted_gain", True)])
def test_what_was_not_timed_on_a_copy_is_not_told_to_be(timed, monkeypatch, name, on_a_copy):
    monkeypatch.setattr(course, "additions", lambda *_: [[registry.find(name)()]])
    monkeypatch.setattr(course.Proof, "expected_seconds", lambda self, plan: 40.0)
    (entry,) = timed(plain(600), 0.1, lambda step: 1.0).conductor.course.tried
    assert entry["answer"].endswith("too little for the steps that are left")
    assert ("on a copy of a step" in entry["answer"]) is on_a_copy


def test_a_gradient_that_finds_no_room_is_told_after_the_scripts_own_step(monkeypatch):
    """Its backward pass goes on, and nothing is proven by what is not there."""
    model, values = nn.Linear(4, 2), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = KeptCall(model, [optimizer], (values,), {})
    outputs = model(values)
    kept.returned(outputs)

    def clone(_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        outputs.sum().backward()
    assert model.weight.grad is not None
    kept.end()
    with pytest.raises(CannotKeep, match="does not hold its model a second time"):
        course.Proof(kept, course.inspect(), None)


def test_the_system_is_asked_for_the_processors_time_only_where_steps_are_compared(
    timed, turned, monkeypatch
):
    """Where others use the processor, that is when the system goes over to them: it counted as our time."""
    asked, compared_steps = [], []
    answered = conductor.Conductor._timed
    monkeypatch.setattr(conductor.Conductor, "_timed", lambda *a: compared_steps.append(1) or answered(*a))
    monkeypatch.setattr(
        turned, "clock", property(lambda self: Clock(self.wall, lambda: asked.append(1) or self.wall()))
    )
    timed(plain(3000), gain=lambda step: 2.0)
    assert 0 < len(compared_steps) < 1000
    assert len(asked) < 2 * len(compared_steps) + 300  # of which those of copies
