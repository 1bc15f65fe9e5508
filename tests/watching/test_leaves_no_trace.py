"""What cannot be watched is said and trained all the same; what a job keeps in Python stays its own."""

import itertools
import random
import signal
from collections import deque

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace import Numerics, Seam
from vivace.errors import InputError, JobError
from vivace.inspection import inspect
from vivace.tensors.outside import MOST_NUMBERS
from vivace.watching.sentinel import Sentinel
from vivace.watching.twin import Twin

pytestmark = pytest.mark.usefixtures("one_thread")
BFLOAT16 = vivace.Plan.from_dict({"bf16_autocast": {}})


@pytest.fixture
def both(watched, digest, tmp_path):
    """``(make_job, plan) -> Run``: watched, and the same weights as unwatched; each job is made anew."""

    def train(make_job, plan=BFLOAT16):
        run = watched(make_job(), plan)
        watched(make_job(), plan, out="plain", watch=0)
        assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")
        return run

    return train


class Warming(nn.Module):
    """Its outputs grow with the number of steps, which it counts itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.count, self.mean = nn.Linear(8, 4), 0, torch.zeros(4)

    def forward(self, inputs):
        self.count += 1
        outputs = self.linear(inputs) * min(1.0, self.count / 10)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().float().mean(0)
        return outputs - self.mean


def test_counters_in_a_module(both, dropping):
    run = both(lambda: dropping(model=Warming, epochs=5))
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 15


class Steps:
    def __init__(self):
        self.num, self._kept = 0, {"mean": torch.zeros(4)}


def in_a_dictionary(part, mean):
    part.kept["count"] += 1
    part.kept["mean"] = 0.9 * part.kept["mean"] + 0.1 * mean
    return part.kept["count"], part.kept["mean"]


def in_a_queue(part, mean):
    part.queue.append(mean)
    return len(part.queue), sum(part.queue) / len(part.queue)


def in_an_array(part, mean):
    part.array[0] += 1
    return float(part.array[0]), 0.1 * mean


def in_an_object(part, mean):
    part.steps.num += 1
    part.steps._kept["mean"] = 0.9 * part.steps._kept["mean"] + 0.1 * mean
    return part.steps.num, part.steps._kept["mean"]


def under_a_private_name(part, mean):
    part._count += 1
    return part._count, 0.1 * mean


class Holding(nn.Module):
    """Its first step is a careful one, as it knows by what `count` counts somewhere."""

    def __init__(self, count):
        super().__init__()
        self.linear, self.counted = nn.Linear(8, 4), count
        self.kept, self.queue = {"count": 0, "mean": torch.zeros(4)}, deque(maxlen=12)
        self.array, self.steps, self._count = numpy.zeros(1), Steps(), 0

    def forward(self, inputs):
        outputs = self.linear(inputs)
        count, mean = self.counted(self, outputs.detach().float().mean(0))
        return outputs * (0.1 if count == 1 else 1.0) - mean


@pytest.mark.parametrize(
    "count", [in_a_dictionary, in_a_queue, in_an_array, in_an_object, under_a_private_name]
)
def test_state_that_a_module_keeps_in_what_it_holds(both, dropping, count):
    run = both(lambda: dropping(model=lambda: Holding(count), epochs=5, metric=None))
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 15


def test_a_teacher_that_follows_the_model(both, dropping):
    def make():
        torch.manual_seed(3)
        teacher = nn.Linear(8, 4).requires_grad_(False)

        def loss(model, batch):
            outputs = model(batch[0])
            near = functional.mse_loss(outputs, teacher(batch[0]))
            return functional.cross_entropy(outputs, batch[1]) + near

        def follow(model):
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.data.lerp_(other.data, 0.1)

        return dropping(model=lambda: nn.Linear(8, 4), loss=loss, on_gradients=follow, epochs=5)

    run = both(make)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 15


@pytest.mark.parametrize("way", ["in place", "its data", "a teacher's"])
def test_what_is_too_large_to_be_put_back_is_said(both, dropping, way):
    def make():
        teacher = nn.Linear(MOST_NUMBERS + 1, 1, bias=False).requires_grad_(False)
        queue = teacher.weight[0] if way == "a teacher's" else torch.zeros(MOST_NUMBERS + 1)
        nn.init.zeros_(teacher.weight)

        def loss(model, batch):
            with torch.no_grad():
                (queue.data if way == "its data" else queue)[0].add_(0.1)
            first = teacher.weight[0, 0] if way == "a teacher's" else queue[0]
            return (1 + float(first)) * functional.cross_entropy(model(batch[0]), batch[1])

        return dropping(loss=loss, epochs=2)

    assert both(make).watched["sentence"] == (
        "not watched: a step changes a tensor outside of the model that is too large to be put back"
    )


@pytest.mark.parametrize("way", ["its weight", "its data"])
def test_a_module_that_shares_the_models_weights_is_said(both, dropping, way):
    """Under an exact plan: no promise is broken, and the weights that are trained stay."""

    def make():
        teachers = []

        def model():
            student, teacher = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
            if way == "its weight":
                teacher.weight = student.weight
            else:
                teacher.weight.data = student.weight.data
            teachers.append(teacher)
            return student

        def loss(model, batch):
            outputs = model(batch[0])
            near = functional.mse_loss(outputs, teachers[-1](batch[0]).detach())
            return functional.cross_entropy(outputs, batch[1]) + near

        return dropping(model=model, loss=loss, epochs=2)

    run = both(make, vivace.Plan.from_dict({"optimizer_in_backward": {}}))
    assert run.watched["sentence"] == (
        "not watched: a tensor outside of the model shares memory with the model's own"
    )


def test_counters_outside_of_the_model(both, dropping):
    def make():
        state, seen, own = {"step": 0}, [], torch.Generator().manual_seed(3)

        def loss(model, batch):
            state["step"] += 1
            seen.append(len(batch[0]))
            weight = min(1.0, len(seen) / 10) * (1 + random.random() + float(numpy.random.rand()))
            noise = torch.randn(batch[0].shape, generator=own) * 0.1 * state["step"]
            return weight * functional.cross_entropy(model(batch[0] + noise), batch[1])

        return dropping(loss=loss, epochs=5)

    run = both(make)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 15


class Counted(nn.Linear):
    """Keeps what it counts, hears of and draws from in its class and in its file."""

    number, seen = 0, []

    def forward(self, inputs):
        Counted.number += 1
        self.seen.append(len(inputs))
        KEPT["calls"] = KEPT.get("calls", 0) + 1
        weight = min(1.0, (self.number + len(self.seen) + KEPT["calls"]) / 60) + float(STREAM.random())
        return super().forward(inputs) * weight


KEPT, STREAM = {}, numpy.random.default_rng(0)


def test_counters_in_the_code_of_a_model(both, dropping):
    def make():
        Counted.number = 0
        Counted.seen.clear()
        KEPT.clear()
        STREAM.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
        return dropping(model=lambda: Counted(8, 4), epochs=5, metric=None)

    run = both(make)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 15


def test_one_model_for_ever(both, dropping):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        return dropping(model=lambda: model, epochs=2)

    run = both(make)
    assert run.watched["sentence"] == (
        "not watched: the Job's model() returns one and the same model each time"
    )


def test_a_loss_that_takes_another_model(both, dropping):
    def make():
        trained = []

        def model():
            trained.append(nn.Linear(8, 4))
            return trained[-1]

        def loss(_, batch):
            return functional.cross_entropy(trained[-1](batch[0]), batch[1])

        return dropping(model=model, loss=loss, epochs=2)

    assert "the loss uses a model of its own" in both(make).watched["sentence"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("something else")])
def test_a_repetition_that_fails_costs_nothing(both, dropping, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Twin, "run", fail)
    sentence = both(lambda: dropping(epochs=2)).watched["sentence"]
    told = "memory does not hold" if isinstance(error, torch.OutOfMemoryError) else "failed: ValueError: some"
    assert sentence.startswith("not watched: ")
    assert told in sentence


@pytest.mark.parametrize("rooms", [[0], [2**60, 0]], ids=["before the step", "after it"])
def test_where_memory_is_short_nothing_is_repeated(both, dropping, monkeypatch, rooms):
    left = itertools.chain(rooms, itertools.repeat(0))
    monkeypatch.setattr("vivace.watching.sentinel.free_memory", lambda: next(left))
    monkeypatch.setattr(Twin, "run", None)
    sentence = both(lambda: dropping(epochs=2)).watched["sentence"]
    assert sentence == "not watched: the memory does not hold the model a second time"


def test_what_cannot_be_repeated_is_said(plant, watched, tiny, dropping):
    changes = plant(lambda build, count: None, numerics=Numerics.SEMANTICS)
    told = []
    run = watched(dropping(epochs=1), changes, on_event=told.append)
    assert run.watched["sentence"] == "not watched: the plan changes the method"
    assert [e.payload["text"] for e in told if e.kind == "unwatched"] == [run.watched["sentence"]]
    assert run.watched["kept"] is None
    own = watched(tiny("gan", epochs=1), BFLOAT16, out="gan")
    assert "your own step function" in own.watched["sentence"]


def test_several_ranks_are_not_watched(dropping):
    sentinel = Sentinel(dropping(), BFLOAT16, inspect(), seed=0, ranks=2, on_broken="stop", share=0.01)
    assert "several ranks" in sentinel.sentence()


def test_without_a_plan_there_is_nothing_to_watch(watched, dropping):
    assert watched(dropping(epochs=1), None).watched is None


def test_a_skipped_step_is_not_judged(watched, dropping):
    """Loss scaling begins too high, and skips steps until it fits."""
    plan = vivace.Plan.from_dict({"fp16_autocast": {"initial_scale": 2.0**26}})
    run = watched(dropping(epochs=5), plan)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert 0 < run.watched["steps"] < 18


def test_an_interrupt_and_a_resumed_run(watched, dropping, digest, tmp_path):
    job = dropping(epochs=5)

    def interrupt(event):
        if event.kind == "watch" and event.payload["step"] == 7:
            signal.raise_signal(signal.SIGINT)

    stopped = watched(job, BFLOAT16, on_event=interrupt)
    assert stopped.interrupted_by == "SIGINT"
    assert stopped.watched["kept"] is True
    run = watched(job, BFLOAT16, resume=True)
    assert run.resumed_from_step == 7
    watched(job, BFLOAT16, out="plain", watch=0)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")


@pytest.mark.parametrize("options", [{"watch": -1}, {"watch": float("nan")}, {"on_broken": "cry"}])
def test_options_that_mean_nothing(dropping, tmp_path, options):
    with pytest.raises(InputError, match=f"{next(iter(options))} is "):
        vivace.train(dropping(), out=tmp_path / "run", **options)


def test_the_run_says_what_it_saw(watched, dropping, lines, tmp_path):
    run = watched(dropping(epochs=2), BFLOAT16)
    seen = run.watched
    assert seen["sentence"].startswith(f"watched {seen['steps']} steps: same model; worst ")
    assert "watching cost" in seen["sentence"]
    assert 0 < seen["worst"] <= seen["limit"]
    assert seen["seconds"] > 0
    found = lines(tmp_path / "run")
    assert len(found) == seen["steps"]
    assert max(line["watch_score"] for line in found) == seen["worst"]
    assert found[0]["watch_why"] == "the first"


def test_seams_and_flags_are_given_back(plant, watched, dropping):
    """After a watched step nothing stands around the seams, and matrix products round as before."""
    found = []

    def apply(build, count):
        def between_steps(following, loader):
            for batch in following(loader):
                found.append((dict(vars(build.seams)), torch.backends.mkldnn.matmul.fp32_precision))
                yield batch

        build.wrap(Seam.BATCHES, between_steps)

    run = watched(dropping(epochs=2), plant(apply))
    assert run.watched["steps"] >= 2
    assert len(found) > 2
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("make", [numpy.random.RandomState, numpy.random.default_rng, random.Random])
def test_generators_of_the_job_are_put_back(both, dropping, make):
    """A generator of the loss's own, of which NumPy's older kind keeps every second normal number."""

    def job():
        own = make(0)
        draw = own.gauss if isinstance(own, random.Random) else own.normal  # of C, and of Python

        def loss(model, batch):
            return (2.0 + 0.1 * draw(0.0, 1.0)) * functional.cross_entropy(model(batch[0]), batch[1])

        return dropping(loss=loss, epochs=2)

    run = both(job)
    assert run.watched["kept"] is True, run.watched["sentence"]


def from_an_iterator(folder):
    scales = itertools.cycle([0.5, 1.0, 1.5])
    return lambda: next(scales)


def into_a_file(folder):
    def write():
        with open(folder / "log.csv", "a") as file:
            file.write("step\n")
        return 1.0

    return write


def into_an_open_file(folder):
    OPENED.append(open(folder / "log.csv", "a", buffering=1))  # noqa: SIM115
    file = OPENED[-1]
    return lambda: file.write("step\n") / 5.0


OPENED = []


@pytest.mark.parametrize(
    ("make_scale", "told"),
    [
        (from_an_iterator, "a step may take from an iterator"),
        (into_a_file, "the job writes a file while it trains"),
        (into_an_open_file, "the job writes a file while it trains"),
    ],
)
def test_what_a_repetition_would_do_once_more_is_not_watched(both, dropping, tmp_path, make_scale, told):
    runs = []

    def make():
        runs.append(tmp_path / f"files-{len(runs)}")
        runs[-1].mkdir()
        scale = make_scale(runs[-1])

        def loss(model, batch):
            return scale() * functional.cross_entropy(model(batch[0]), batch[1])

        return dropping(loss=loss, epochs=2)

    run = both(make)
    while OPENED:
        OPENED.pop().close()
    assert run.watched["sentence"].startswith(f"not watched: {told}")
    lines = [len(file.read_text().splitlines()) for file in tmp_path.glob("files-*/log.csv")]
    assert all(count == run.steps for count in lines)


def test_nobody_hears_a_step_twice(watched, dropping, capsys):
    def loss(model, batch):
        print("one more step")
        return functional.cross_entropy(model(batch[0]), batch[1])

    run = watched(dropping(loss=loss, epochs=2), BFLOAT16)
    assert run.watched["steps"] >= 2
    assert capsys.readouterr().out.count("one more step") == run.steps


def test_what_building_the_model_takes_is_there_for_the_training(both, dropping):
    called = []

    def make():
        own = torch.Generator().manual_seed(5)

        def model():
            called.append(1)
            print("a model")
            found = nn.Linear(8, 4)
            with torch.no_grad():
                found.weight.normal_(generator=own)
            return found

        return dropping(model=model, epochs=2)

    run = both(make)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert len(called) == 2  # once for each of the two runs, as far as the job can know


def test_a_model_that_the_job_compiles_is_not_looked_at(watched, dropping):
    def model():
        found = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3))
        found.compile(backend="eager")
        return found

    run = watched(dropping(model=model, metric=None), BFLOAT16, max_steps=1)
    assert run.watched["sentence"].startswith(
        "not watched: the job compiles its model, or a function, itself"
    )


def test_an_alarm_of_the_persons_ends_the_run(watched, dropping, monkeypatch):
    def ring(*_):
        raise TimeoutError("the hour is over")

    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Twin, "run", interrupted)
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(JobError, match="the hour is over"):
            watched(dropping(), BFLOAT16)
    finally:
        signal.signal(signal.SIGUSR1, before)
