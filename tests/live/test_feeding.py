"""Scripts whose steps wait for their data: workers fetch the same batches, or it is said why they may not.

By the tests' clock a sample takes long where it is read: in a worker that clock is a copy.
"""

import json
import logging
import os
import random
import signal
import time

import numpy
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from vivace.exporting.plans import in_words
from vivace.live import conductor, feeding, loop, passes, spending
from vivace.live.conductor import Conductor
from vivace.live.crew import Crew
from vivace.live.errand import Errand
from vivace.live.feeding import Feeding
from vivace.live.loop import Loop
from vivace.live.passes import Pass
from vivace.technique.registry import find

MAIN = os.getpid()
BATCHES, EPOCHS = 40, 5


class Samples(Dataset):
    """Rows of numbers, each of which takes a while; `spoil(data, index)` is what else reading one does."""

    def __init__(self, turned, spoil=None, size=4 * BATCHES):
        self.numbers = torch.arange(8.0 * size).reshape(size, 8) / size
        self.turned, self.spoil = turned, spoil

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        self.turned.current.now += 0.01
        row = self.numbers[index].clone()
        if self.spoil is not None:
            row += self.spoil(self, index) or 0.0
        return row, index % 3


class Slow(nn.Module):
    def __init__(self, turned):
        super().__init__()
        self.turned = turned

    def forward(self, inputs):
        self.turned.current.now += 0.05
        return inputs


def train(loader, epochs=EPOCHS, leave_after=None, first=None):
    """The model, and what the random streams give afterwards. `loader()` is what each pass goes over."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = nn.Sequential(first or nn.Identity(), nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for number, (inputs, labels) in enumerate(loader()):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if number == leave_after:
                break
    return [*model.state_dict().values(), torch.rand(2), random.random(), numpy.random.rand()]


def equal(mine, theirs):
    return all(bool(torch.as_tensor(a == b).all()) for a, b in zip(mine, theirs, strict=True))


@pytest.fixture
def fed(tmp_path, monkeypatch, one_thread, turned):
    """``fed(train, plan)`` trains under `run`, where loaders alone are tried: result, loop, document."""
    monkeypatch.setattr(spending, "PATIENCE", 0.0)
    monkeypatch.setattr(spending, "SHARE", 1e9)
    monkeypatch.setattr(loop, "SMALLEST_STEP_SECONDS", 0.0)
    monkeypatch.setattr(conductor, "SEGMENT_SECONDS", 0.0)
    monkeypatch.setattr(conductor, "WATCH_STEPS", 20)
    monkeypatch.setattr(conductor, "additions", lambda *_: [])
    before = {child.pid for child in psutil.Process().children()}

    def run(train, plan=None):
        turned()
        watching = Loop(Errand(str(tmp_path), "runs/run", "python train.py", plan), turned.current.clock)
        watching.install()
        try:
            found = train()
        finally:
            watching.finish()
        left = {child.pid for child in psutil.Process().children()} - before
        assert not left
        return found, watching, json.loads((tmp_path / "run.json").read_text())

    return run


def loaders(turned, spoil=None, **settings):
    data = Samples(turned, spoil)
    loader = DataLoader(data, **{"batch_size": 4, "shuffle": True, **settings})
    return lambda: loader


def test_workers_fetch_what_steps_wait_for(fed, turned, tmp_path, capsys):
    make = loaders(turned)
    hooks = [(feeding.LoaderIterator, "__next__"), (feeding.FETCHERS[0], "fetch"), (DataLoader, "__iter__")]
    before = [getattr(owner, name) for owner, name in hooks]
    mine, watching, told = fed(lambda: train(make))
    assert told["outcome"] == "faster", (told["reason"], told["tried"], watching.feeding.problems)
    assert list(told["plan"]) == ["loader_workers"]
    assert not told["plan"]["loader_workers"]["persistent"]
    assert told["ratio"]["low"] > 1.5
    assert told["watched"] >= 2
    assert "by loader_workers)" in capsys.readouterr().err
    assert "loader_workers" in (tmp_path / "run.html").read_text()
    assert "[techniques.loader_workers]" in (tmp_path / "plan.toml").read_text()
    assert '"persistent_workers": False' in in_words(tmp_path / "plan.toml")
    assert [getattr(owner, name) for owner, name in hooks] == before
    turned()
    assert equal(mine, train(make))


@pytest.mark.parametrize(
    "settings",
    [
        {"collate_fn": lambda rows: (torch.stack([r for r, _ in rows]), torch.tensor([n for _, n in rows]))},
        {"drop_last": True, "batch_size": 3},
        {"generator": "own"},
        {"shuffle": False, "sampler": range(4 * BATCHES)},
        {"shuffle": False},
    ],
    ids=["lambda", "drop_last", "generator", "list", "in order"],
)
@pytest.mark.parametrize("leave_after", [None, 32])
def test_the_order_and_all_random_streams_are_the_scripts_own(fed, turned, settings, leave_after):
    def run():
        own = dict(settings)
        if "generator" in own:
            own["generator"] = torch.Generator().manual_seed(3)
        found = train(loaders(turned, **own), leave_after=leave_after)
        return [*found, *([own["generator"].get_state()] if "generator" in own else [])]

    mine, _, told = fed(run)
    assert told["outcome"] == "faster", (told["reason"], told["tried"])
    turned()
    assert equal(mine, run())


def test_a_loader_that_is_made_anew_for_each_pass(fed, turned):
    data = Samples(turned)
    mine, _, told = fed(lambda: train(lambda: DataLoader(data, batch_size=4, shuffle=True)))
    assert told["outcome"] == "faster", (told["reason"], told["tried"])
    turned()
    assert equal(mine, train(lambda: DataLoader(data, batch_size=4, shuffle=True)))


def counting(data, index):
    data.count = getattr(data, "count", 0) + 1


def noise(data, index):
    return float(data.generator.normal())


def with_generator(data):
    data.generator = numpy.random.default_rng(0)


def in_a_worker(act):
    return lambda data, index: act() if os.getpid() != MAIN else None


def fails():
    raise ValueError("no such device")


def writing(data, index):
    with open(data.path, "a") as file:
        file.write("read\n")


def reading(data, index):
    return float(len(data.file.read(1)))


SPOILT = {
    "torch": (lambda data, index: torch.rand(1), "draws random numbers from torch's stream"),
    "numpy": (lambda data, index: numpy.random.rand(), "draws random numbers from NumPy's stream"),
    "python": (lambda data, index: random.random(), "draws random numbers from Python's stream"),
    "counter": (counting, "changes what its data set remembers (Samples.count)"),
    "prints": (lambda data, index: 0.0 * os.write(1, b"sample\n"), "it prints while it is fetched"),
    "logs": (lambda data, index: logging.getLogger("data").error("sample"), "it prints while it is fetched"),
    "fails": (in_a_worker(fails), "in a worker it fails with ValueError: no such device"),
    "differs": (in_a_worker(lambda: 1.0), "has other values there"),
    "hangs": (in_a_worker(lambda: time.sleep(600)), "its workers gave nothing in"),
    "dies": (in_a_worker(lambda: os.kill(os.getpid(), signal.SIGKILL)), "one of its workers died"),
    "writes": (writing, "fetching writes, or starts something (open"),
    "open file": (reading, "an open file or connection (Samples.file)"),
    "generator": (noise, "changes what its data set remembers (Samples.generator)"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_workers_would_change_stays_in_the_script(fed, turned, monkeypatch, tmp_path, name, capfd):
    monkeypatch.setattr(feeding, "PATIENCE_SECONDS", 0.2)
    spoil, reason = SPOILT[name]

    def run(place):
        data = Samples(turned, spoil)
        if name == "generator":
            with_generator(data)
        data.path = str(tmp_path / place)
        (tmp_path / "read").write_text("a" * 10_000)
        with open(tmp_path / "read") as file:
            if name == "open file":
                data.file = file
            return train(lambda: DataLoader(data, batch_size=4, shuffle=True), epochs=3)

    mine, watching, told = fed(lambda: run("mine"))
    printed = capfd.readouterr().out
    assert told["outcome"] != "faster"
    assert any(reason in json.dumps(entry) for entry in told["tried"]), told["tried"]
    assert not watching.feeding.problems
    turned()
    assert equal(mine, run("theirs"))
    assert capfd.readouterr().out == printed
    if name == "writes":
        assert (tmp_path / "mine").read_text() == (tmp_path / "theirs").read_text()


class Hardest(Sampler):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size))


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda data: DataLoader(data, batch_size=4, sampler=Hardest(len(data))), "its Hardest may look"),
        (
            lambda data: DataLoader(
                data, batch_sampler=type("Own", (BatchSampler,), {})(range(160), 4, True)
            ),
            "its Own may look",
        ),
        (lambda data: DataLoader(Stream(data), batch_size=4), "its data are a stream"),
        (
            lambda data: DataLoader(
                data, 4, sampler=RandomSampler(data, replacement=True, generator=torch.Generator())
            ),
            "in the middle of a pass",
        ),
    ],
    ids=["sampler", "batch sampler", "stream", "replacement"],
)
def test_loaders_that_cannot_be_asked_ahead_are_refused_by_name(fed, turned, loader, reason):
    _, _, told = fed(lambda: train(lambda: loader(Samples(turned)), epochs=2))
    assert any(reason in json.dumps(entry) for entry in told["tried"]), (told["tried"], told["reason"])


def test_a_loader_with_workers_of_its_own_is_left_to_them(turned):
    loader = DataLoader(Samples(turned), batch_size=4, num_workers=1)
    assert "its loader has 1 worker of its own" in Pass(loader, None).why_not


def test_data_that_nobody_waits_for_are_not_tried(fed, turned):
    data = [(torch.ones(8), 1)] * 160
    _, watching, told = fed(
        lambda: train(lambda: DataLoader(data, batch_size=4), epochs=2, first=Slow(turned))
    )
    assert told["tried"] == []
    assert watching.feeding.waiting < feeding.WORTH


@pytest.mark.parametrize(
    ("share", "first"), [("less than half", "fused_optimizer"), ("most", "loader_workers")]
)
def test_workers_are_tried_last_but_where_steps_wait_most_of_their_time(
    fed, turned, monkeypatch, share, first
):
    """They take many steps to time, in which nothing else helps the script."""
    monkeypatch.setattr(conductor, "additions", lambda *_: [[find("fused_optimizer")()]])
    slow = Slow(turned) if share != "most" else None
    make = loaders(turned)
    _, _, told = fed(lambda: train(make, first=slow))
    order = [name for entry in told["tried"] for name in entry["plan"]]
    assert order[0] == first, told["tried"]
    assert {"fused_optimizer", "loader_workers"} <= set(order)
    assert "loader_workers" in told["plan"]


LATE = [0.0]  # which no look at the data set finds


@pytest.mark.parametrize("kind", ["dies", "draws", "hidden", "seen"])
def test_what_goes_wrong_later_is_taken_back(fed, turned, monkeypatch, kind):
    """Batches that come wrong are read here, and the script does not notice."""
    fed_by, hidden = Feeding._fed, kind == "hidden"

    def checking(self, *arguments):
        self._checks = self._checks or (hidden and LATE[0] > 0.0)
        return fed_by(self, *arguments)

    monkeypatch.setattr(Feeding, "_fed", checking)

    def spoil(data, index):
        if not data.late or index % 4:
            return 0.0
        if kind == "draws":
            return float(torch.rand(1))
        if os.getpid() != MAIN and kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"hidden": LATE[0], "seen": data.more}.get(kind, 0.0)

    def run():
        LATE[0] = 0.0
        data = Samples(turned, spoil)
        data.late, data.more = False, 0.0
        begun = []

        def loader():
            begun.append(1)
            data.late = len(begun) > 6
            return DataLoader(data, batch_size=4, shuffle=True)

        torch.manual_seed(0)
        model, found = nn.Linear(8, 3), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            for number, (inputs, labels) in enumerate(loader()):
                if number == 10 and data.late:
                    LATE[0], data.more = (
                        5.0,
                        5.0 * (kind == "seen"),
                    )  # in the middle of a pass, after workers were forked
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                found.append(inputs)
            data.more = LATE[0] = 0.0
        return [*model.state_dict().values(), torch.rand(2), *found]

    mine, watching, told = fed(run)
    if kind == "seen":  # others are forked
        assert told["outcome"] == "faster", told
    else:
        assert watching.feeding.fault, told
        assert told["outcome"] == "taken_back"
        assert watching.feeding.fault in told["reason"]
    if kind != "hidden":  # what came before that was seen was wrong
        turned()
        assert equal(mine, run())


def test_a_given_plan_is_proven_and_acts(fed, turned):
    plan = {"loader_workers": {"num_workers": 1, "persistent": False}}
    make = loaders(turned)
    mine, _, told = fed(lambda: train(make, epochs=3), plan)
    assert told["outcome"] == "faster", told
    assert told["tried"][0]["answer"] == "given"
    turned()
    assert equal(mine, train(make, epochs=3))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_workers": 1}, "set persistent = false"),
        ({"num_workers": 0, "persistent": False}, "no workers already"),
        ({"num_workers": 4096, "persistent": False}, "cores can be used"),
    ],
)
def test_a_given_plan_that_cannot_act_is_refused(fed, turned, settings, reason):
    _, _, told = fed(lambda: train(loaders(turned), epochs=2), {"loader_workers": settings})
    assert reason in told["reason"]
    assert told["plan"] == {}


PLANTED = [
    (Feeding, "_looked"),
    (Feeding, "_compared"),
    (Feeding, "_fed"),
    (Feeding, "_from_crew"),
    (Feeding, "stepped"),
    (Feeding, "prove"),
    (Feeding, "wish"),
    (Pass, "__init__"),
    (Pass, "begin"),
    (Pass, "taken"),
    (Crew, "__init__"),
    (Crew, "ask"),
    (Crew, "take"),
    (Conductor, "_fed"),
]


@pytest.mark.parametrize(("owner", "name"), PLANTED, ids=[f"{o.__name__}.{n}" for o, n in PLANTED])
def test_a_fault_of_ours_does_not_reach_the_script(fed, turned, monkeypatch, owner, name):
    def fails(*_, **__):
        raise ZeroDivisionError("planted")

    make = loaders(turned)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        mine, _, told = fed(lambda: train(make, epochs=3))
    assert told["outcome"] != "faster"
    assert "planted" in json.dumps(told) or owner is Pass  # a pass that cannot be looked at is none
    turned()
    assert equal(mine, train(make, epochs=3))


def test_little_memory_is_a_reason(fed, turned, monkeypatch):
    monkeypatch.setattr(feeding, "SHARE_OF_MEMORY", 1e-9)
    _, _, told = fed(lambda: train(loaders(turned), epochs=2))
    assert "of memory are free" in json.dumps(told["tried"])


def test_nothing_is_asked_ahead_that_ends_a_sampler_with_the_scripts_generator():
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True, generator=generator)
    iterator = iter(loader)
    each = Pass(loader, iterator)
    next(iterator)
    each.begin(iterator)
    before = generator.get_state()
    assert [len(each.ahead.look(place)) for place in range(4)] == [1, 0, 0, 0]  # one has been asked for
    assert torch.equal(generator.get_state(), before)
    assert len(list(iterator)) == 3
    assert passes.num_yielded(iterator) == 4
