"""Data without an index: brought back to their place exactly, or the person is told that they were not."""

import contextlib
import hashlib
import itertools
import json
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from vivace.data import iterable
from vivace.data.iterable import IterableData, is_plain, keeper_of, marked
from vivace.data.order import PassOrder
from vivace.errors import JobError
from vivace.inspection import inspect
from vivace.job import Job
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique.facts import Facts
from vivace.training.checkpoints import Position
from vivace.training.feed import Feed
from vivace.training.training import train
from vivace.verifying.feeding import Reach, fed_otherwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
SAMPLES, BATCH = 48, 4
fresh = itertools.count()  # another number in each reading, as the clock is


class Stream(IterableDataset):
    """Samples with noise from torch's stream, in an order that a seed fixes; without a seed nothing does."""

    def __init__(self, seed=0):
        self.seed, self.epoch, self.read = seed, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        seed = f"clock {next(fresh)}" if self.seed is None else f"{self.seed} {self.epoch}"
        return random.Random(seed).sample(range(SAMPLES), SAMPLES)

    def __iter__(self):
        for index in self.order():
            self.read += 1
            yield torch.full((3,), float(index)) + torch.rand(3), index % 2


class Keeping(Stream):
    """A stream that says how far it is; `lost` samples are forgotten on the way back."""

    lost = 0

    def __iter__(self):
        self.at = getattr(self, "begin", 0)
        self.begin = 0
        for index in self.order()[self.at :]:
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.full((3,), float(index)) + torch.rand(3), index % 2

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"] + self.lost


class Forgetful(Keeping):
    lost = 2


class Counting(Stream):
    """Another order in each pass of one object, which a new process does not know of."""

    def __iter__(self):
        self.epoch = self.passes = getattr(self, "passes", 0) + 1
        return super().__iter__()

    def set_epoch(self, epoch): ...


def loader(kind, **more):
    return DataLoader(kind(), batch_size=BATCH, **more)


def passed(kind, count=None, **options):
    """The batches of a pass, the pass, and its place behind the last of them."""
    data = IterableData(loader(kind), 7, 1, **options)
    found = list(itertools.islice(data, count))
    return found, data, data.place(options.get("start_batch", 0) + len(found))


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a[0], b[0]) for a, b in zip(left, right, strict=True))


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """However long a state takes beside other processes, one is kept behind each batch."""
    monkeypatch.setattr(iterable, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(iterable, "STATE_COSTS", 0)


@pytest.mark.parametrize("kind", [Stream, Keeping, Forgetful])
@pytest.mark.parametrize("stop", [1, 5, 12])
def test_the_rest_comes_bit_for_bit(kind, stop):
    whole, *_ = passed(kind)
    _, _, place = passed(kind, stop)
    rest, data, _ = passed(kind, start_batch=stop, place=place, renew=lambda: loader(kind))
    assert same(rest, whole[stop:])
    assert is_plain(place)
    told = " ".join(data.notices)
    assert ("was read again" in told) == (kind is Stream or stop == 1 or kind is Forgetful)
    assert ("did not bring them back" in told) == (kind is Forgetful and stop > 1)


def test_a_state_spares_the_reading():
    _, _, place = passed(Keeping, 10)
    rest, data, _ = passed(Keeping, start_batch=10, place=place, renew=lambda: loader(Keeping))
    assert data.source.dataset.read == SAMPLES - 9 * BATCH  # and one batch, by which the state is checked
    assert len(rest) == 2
    assert data.notices == []


def test_a_stop_after_a_stop():
    whole, *_ = passed(Keeping)
    _, _, place = passed(Keeping, 4)
    _, _, place = passed(Keeping, 3, start_batch=4, place=place, renew=lambda: loader(Keeping))
    rest, *_ = passed(Keeping, start_batch=7, place=place, renew=lambda: loader(Keeping))
    assert same(rest, whole[7:])


def test_another_order_is_noticed():
    def unseeded():
        return Stream(None)

    _, _, place = passed(unseeded, 3)
    rest, data, _ = passed(unseeded, start_batch=3, place=place)
    assert len(rest) == SAMPLES // BATCH - 3
    assert data.notices[0].startswith(
        "resumed, not bit-exact: up to batch 3 of epoch 2 the data came otherwise"
    )


@pytest.mark.parametrize("kind", ["arrays", "texts"])
def test_another_order_of_what_is_no_tensor_is_noticed(kind):
    def read():
        order = random.Random(next(fresh)).sample(range(SAMPLES), SAMPLES)
        return [numpy.array([index]) if kind == "arrays" else [f"text {index}"] for index in order]

    first = IterableData(read(), 7)
    list(itertools.islice(first, 3))
    again = IterableData(read(), 7, start_batch=3, place=first.place(3))
    assert len(list(again)) == SAMPLES - 3
    assert again.notices[0].startswith("resumed, not bit-exact")


def test_a_place_of_another_epoch_or_batch_says_nothing():
    for wrong in ({"epoch": 0, "batch": 3}, {"epoch": 1, "batch": 2}):
        _, data, _ = passed(Stream, start_batch=3, place={"mark": "00", **wrong})
        assert "not bit-exact" not in " ".join(data.notices)


def test_states_that_a_checkpoint_cannot_hold_are_left_out():
    class Odd(Keeping):
        def state_dict(self):
            return {"at": self}

    class Failing(Keeping):
        def state_dict(self):
            raise RuntimeError("not yet")

    for kind in (Odd, Failing):
        _, _, place = passed(kind, 5)
        assert "state" not in place


def test_what_keeps_its_place():
    assert isinstance(keeper_of(loader(Keeping)), Keeping)
    assert keeper_of(loader(Keeping, num_workers=1)) is None  # it lies in the worker
    assert keeper_of(loader(Stream)) is None
    assert keeper_of(iter([])) is None


def test_marks_see_order_shape_and_type():
    a, b = torch.zeros(5), torch.ones(5)
    marks = {
        marked(marked(b"", one), other)
        for one, other in itertools.permutations(
            [a, b, a.int(), a.bfloat16(), a.bool(), a[:0], [a, b], a.numpy(), b.numpy(), "a", "b"], 2
        )
    }
    assert len(marks) == 110
    assert marked(b"", "/one/name") == marked(b"", "/other/name")
    assert marked(b"", numpy.array([object()])) == marked(b"", numpy.array([object()]))
    assert marked(b"", {"x": a.to_sparse()}) != marked(b"", a)


def job(kind=Stream, damaged="raise", **more):
    return Job(
        model=lambda: torch.nn.Linear(3, 2),
        data=lambda: loader(kind, **more),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=2,
        damaged=damaged,
    )


class TestTraining:
    def weights(self, path):
        return torch.load(path / "model.pt", weights_only=True)["weight"]

    @pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Stream, 1), (Keeping, 0), (Forgetful, 0)])
    def test_a_run_goes_on_bit_for_bit_and_says_what_it_cost(self, tmp_path, kind, workers):
        made = job(kind, num_workers=workers)
        whole = train(made, out=tmp_path / "whole", checkpoint_every_steps=3)
        assert whole.notices == ()
        train(made, out=tmp_path / "parts", max_steps=17)
        parts = train(made, out=tmp_path / "parts", resume=True)
        assert torch.equal(self.weights(tmp_path / "whole"), self.weights(tmp_path / "parts"))
        again = [notice for notice in parts.notices if "was read again" in notice]
        assert len(again) == (kind is not Keeping)
        assert json.loads((tmp_path / "parts" / "run.json").read_text())["notices"] == list(parts.notices)

    def test_an_epoch_of_its_own_order(self, tmp_path):
        seen = []
        made = job()
        train(
            Job(**{**vars(made), "loss": lambda m, b: seen.append(b[1].tolist()) or made.loss(m, b)}),
            out=tmp_path / "run",
        )
        assert seen[:12] != seen[12:]  # set_epoch was called

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_sampler_is_told_the_epoch_also_where_its_loader_makes_batches_itself(self, tmp_path, whole):
        class Own(DataLoader):
            def __iter__(self):
                yield from super().__iter__()

        class Shuffled(torch.utils.data.Sampler):
            epoch = 0

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                yield from random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)

        def data():
            rows = [(torch.full((3,), float(index)), index % 2) for index in range(SAMPLES)]
            batches = torch.utils.data.BatchSampler(Shuffled(), BATCH, drop_last=False)
            return Own(rows, batch_sampler=batches) if whole else Own(rows, BATCH, sampler=Shuffled())

        made, seen = job(), []
        loss = lambda model, batch: seen.extend(batch[0][:, 0].tolist()) or made.loss(model, batch)  # noqa: E731
        train(Job(**{**vars(made), "data": data, "loss": loss}), out=tmp_path / "run")
        assert seen[:SAMPLES] == random.Random(0).sample(range(SAMPLES), SAMPLES)
        assert seen[SAMPLES:] == random.Random(1).sample(range(SAMPLES), SAMPLES)

    def test_an_order_that_nothing_fixes_is_told_before_it_is_needed(self, tmp_path):
        events = []
        run = train(
            job(lambda: Stream(None)), out=tmp_path / "run", checkpoint_every_steps=2, on_event=events.append
        )
        assert [n for n in run.notices if "come otherwise each time that they are read" in n] == [
            *run.notices
        ]
        assert [event.payload["text"] for event in events if event.kind == "notice"] == [*run.notices]

    def test_and_after_a_stop(self, tmp_path):
        for kind in (lambda: Stream(None), Counting):
            out = tmp_path / getattr(kind, "__name__", "").strip("<>")
            train(job(kind), out=out, max_steps=15)
            run = train(job(kind), out=out, resume=True)
            assert run.notices[0].startswith("resumed, not bit-exact: up to batch 3 of epoch 2")
            assert run.steps == 24

    def test_one_object_for_all_is_not_read_twice_at_a_time(self, tmp_path):
        own = loader(lambda: Stream(None))
        run = train(
            Job(**{**vars(job()), "data": lambda: own}), out=tmp_path / "run", checkpoint_every_steps=2
        )
        assert (run.steps, run.notices) == (24, ())

    def test_damaged_samples_of_a_stream_are_not_its_policys(self, tmp_path):
        with pytest.raises(JobError, match="damaged='skip' needs a DataLoader over data with an index; your"):
            train(job(damaged="skip"), out=tmp_path / "run")

    @pytest.mark.parametrize("split", [False, True])
    def test_ranks_that_read_different_streams_are_refused(self, tmp_path, split):
        ranks = SimpleNamespace(rank=0, world_size=2)
        ranks.gather = lambda mark: [mark, "of another rank" if split else mark]
        feed = Feed(job(), ranks, 0, tmp_path, pytest.fail)
        seams = SimpleNamespace(batches=iter)
        session = SimpleNamespace(build=SimpleNamespace(facts=Facts()), batches=iter, seams=seams)
        assert len(next(feed.batches(session, Position()))[0]) == BATCH // 2
        with pytest.raises(JobError, match="split_by_node") if split else contextlib.nullcontext():
            feed.require_one_stream(session, Position(step=1, batch=1))

    @pytest.mark.parametrize("rank", [None, 1])
    def test_a_sampler_that_splits_the_samples_by_rank_is_refused(self, tmp_path, rank):
        class Mine(torch.utils.data.Sampler):
            def __init__(self, rank):
                self.rank = rank

            def __iter__(self):
                return iter(range(self.rank or 0, SAMPLES, 1 if self.rank is None else 2))

        def marks(rank):
            data = DataLoader(list(range(SAMPLES)), BATCH, sampler=Mine(rank))
            order = PassOrder(data, 0, 0, 2)
            list(order)
            return order.place(1)

        def reading():
            return DataLoader(list(range(SAMPLES)), BATCH, sampler=Mine(0 if rank else None))

        other = marks(rank)["order"]
        ranks = SimpleNamespace(rank=0, world_size=2, gather=lambda mark: [mark, other])
        feed = Feed(Job(**{**vars(job()), "data": reading}), ranks, 0, tmp_path, pytest.fail)
        session = SimpleNamespace(
            plan=Plan(), build=SimpleNamespace(facts=Facts()), seams=SimpleNamespace(batches=iter)
        )
        next(feed.batches(session, Position()))
        with pytest.raises(JobError, match="a sampler's rank") if rank else contextlib.nullcontext():
            feed.require_one_stream(session, Position(step=1, batch=1))


@pytest.mark.parametrize(("seed", "said"), [(0, ""), (None, "your data come otherwise each time")])
def test_verify_blames_the_data_and_not_the_plan(seed, said):
    made = job(lambda: Stream(seed))
    with start(made, Plan.from_dict({"decoded_cache": {}}), inspect()) as session:
        assert fed_otherwise(session, made, Reach(1.0, 1.0)).fault[: len(said) or None] == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(3, 100), (), (5,), (0, 2)])
def test_a_mark_is_of_a_few_numbers_in_reading_order_whatever_the_layout(dtype, shape):
    tensor = (torch.arange(300).reshape(3, 100) % 7 if len(shape) == 2 else torch.ones(shape)).to(dtype)
    tensor = tensor[: shape[0], : shape[1]] if len(shape) == 2 else tensor
    expected = hashlib.blake2b(b"before", digest_size=16)
    expected.update(f"{dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.flatten()
    few = flat[:: max(1, len(flat) // 64)].contiguous()
    expected.update(few.view(torch.uint8).numpy().tobytes() if len(flat) else b"")
    assert marked(b"before", {"x": tensor}) == expected.digest()
    turned = tensor.t().contiguous().t() if len(shape) == 2 else tensor
    assert marked(b"before", [turned]) == expected.digest()


@pytest.mark.parametrize("fault", ["refused", "gone"])
def test_a_state_that_the_data_no_longer_take_is_no_obstacle(fault):
    """As after another version of the library that reads them."""

    class Refusing(Keeping):
        def load_state_dict(self, state):
            raise KeyError("shard")

    first = IterableData(DataLoader(Keeping(), BATCH), 7)
    whole = list(itertools.islice(first, 5))
    place = first.place(4)
    assert "state" in place

    def source():
        return DataLoader(Refusing() if fault == "refused" else Stream(), BATCH)

    again = IterableData(source(), 7, start_batch=4, place=place, renew=source)
    assert torch.equal(next(iter(again))[0], whole[4][0])
    assert again.notices[0] == "the state that the data gave did not bring them back to their place"
