import dataclasses
import io
import multiprocessing
import random
import types
import zipfile

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics, registry
from vivace.testing import TINY_JOBS, TechniqueContract, plain_profile

LoaderWorkers = registry.find("loader_workers")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
MACHINE = dataclasses.replace(inspect(), num_cores=4)


@pytest.mark.usefixtures("one_thread")
class TestLoaderWorkers(TechniqueContract):
    technique = LoaderWorkers


class Numbers(Dataset):
    def __init__(self, noise=False):
        self.noise = noise

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)]) + (torch.rand(1) if self.noise else 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class OwnWay(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Filtered(DataLoader):
    """Completes each batch once it is here, as loaders of a graph's neighbours do."""

    def _get_iterator(self):
        return map(torch.Tensor.neg, super()._get_iterator())


class WithEpoch(Numbers):
    def set_epoch(self, epoch): ...


def session_with(**settings):
    return start(TINY_JOBS["mlp"](), Plan([LoaderWorkers(**settings)]), MACHINE)


def read(session, loader):
    return [batch.flatten().tolist() for batch in session.batches(loader)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(SequentialSampler(range(10)), 3, False)},
        {"batch_size": 2, "collate_fn": lambda samples: torch.cat(samples) * 2},
    ],
)
def test_same_batches_in_the_same_order(arguments):
    loader = DataLoader(Numbers(), **arguments)
    wanted = [batch.flatten().tolist() for batch in loader]
    with session_with(num_workers=1) as session:
        assert read(session, loader) == wanted


def test_same_shuffle_for_the_same_seed():
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    wanted = [batch.flatten().tolist() for batch in loader]
    with session_with(num_workers=2) as session:
        torch.manual_seed(3)
        assert read(session, loader) == wanted


def test_persistent_workers_live_across_epochs_and_end_with_the_session():
    loader = DataLoader(Numbers(), batch_size=4)
    with session_with(num_workers=2) as session:
        read(session, loader)
        first = {child.pid for child in multiprocessing.active_children()}
        read(session, loader)
        assert {child.pid for child in multiprocessing.active_children()} == first
        assert len(first) == 2
    assert not multiprocessing.active_children()


def test_random_augmentation_raises_the_promise_and_a_fixed_dataset_does_not():
    for noise, promise in ((False, Numerics.EXACT), (True, Numerics.ROUNDING)):
        with session_with(num_workers=1) as session:
            read(session, DataLoader(Numbers(noise), batch_size=4))
            assert session.promise == promise


def masked(samples):
    found = torch.cat(samples)
    return torch.where(torch.rand(len(found)) < 0.5, 0.0, found)


def test_a_collate_function_that_draws_raises_the_promise_but_where_each_batch_has_its_own_seed():
    """As `train` feeds it, a batch is the same from any worker."""
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=masked)
    for fed, promise in ((loader, Numerics.ROUNDING), (ordered(loader, seed=0, epoch=0), Numerics.EXACT)):
        with session_with(num_workers=2, persistent=False) as session:
            wanted = [batch.tolist() for batch in fed]
            assert (read(session, fed) == wanted) == (promise == Numerics.EXACT)
            assert session.promise == promise


class WithGenerator(Numbers):
    """Adds what `draw` gives for it and its generator."""

    def __init__(self, rng, draw):
        super().__init__()
        self.rng, self.draw = rng, draw

    def __getitem__(self, index):
        return super().__getitem__(index) + self.draw(self.rng)


def of_numpy():
    return WithGenerator(numpy.random.default_rng(0), lambda rng: rng.normal())


def of_python():
    return WithGenerator(random.Random(0), lambda rng: rng.random())


def of_torch():
    return WithGenerator(torch.Generator(), lambda rng: torch.rand(1, generator=rng))


def in_transform():
    return WithGenerator(
        types.SimpleNamespace(rng=random.Random(0)), lambda transform: transform.rng.random()
    )


def in_list():
    return WithGenerator([random.Random(0), random.Random(1)], lambda rngs: rngs[0].random())


def in_subset():
    return Subset(of_numpy(), range(8))


def in_closure():
    stream = numpy.random.RandomState(0)
    return WithGenerator(None, lambda _: stream.normal())


@pytest.mark.parametrize(
    "dataset", [of_numpy, of_python, of_torch, in_transform, in_list, in_subset, in_closure]
)
def test_workers_are_refused_where_each_would_draw_the_same_from_the_datasets_generator(dataset):
    """What the look at two samples draws is given back: the loader's own batches are those of before."""
    inner = {in_transform: "rng.rng", in_list: "rng.0", in_subset: "dataset.rng", in_closure: "draw.stream"}
    name = inner.get(dataset, "rng")
    wanted = [batch.tolist() for batch in DataLoader(dataset(), batch_size=4)]
    for wrap in (lambda loader: loader, lambda loader: ordered(loader, seed=0, epoch=0)):
        loader = DataLoader(dataset(), batch_size=4)
        with session_with(num_workers=1) as session, pytest.raises(Refused, match=f"generator '{name}'"):
            session.batches(wrap(loader))
        assert [batch.tolist() for batch in loader] == wanted
    with session_with(num_workers=1) as session:
        session.batches(DataLoader(dataset(), batch_size=4, worker_init_fn=print))
        assert session.promise == Numerics.ROUNDING


def test_a_generator_from_which_no_sample_is_drawn_is_no_reason():
    """Nor are the streams of the libraries, under another name, or a generator made for each sample."""
    held = [numpy.random.default_rng(0), torch.default_generator, random.seed.__self__]
    for rng in held:
        with session_with(num_workers=1) as session:
            dataset = WithGenerator(rng, lambda _: numpy.random.default_rng(0).normal())
            assert len(read(session, DataLoader(dataset, batch_size=5))) == 2
            assert session.promise == Numerics.EXACT
    for draw in (lambda _: torch.rand(1), lambda _: random.random()):
        with session_with(num_workers=1) as session:
            session.batches(DataLoader(WithGenerator(held, draw)))
            assert session.promise == Numerics.ROUNDING


class Reseeded(Numbers):
    """Seeds a generator of its own for each sample, and draws as many numbers from it, some `before` that."""

    def __init__(self, rng, before=0):
        super().__init__()
        self.rng, self.before = rng, before

    def __getitem__(self, index):
        first = [self._draw() for _ in range(self.before)]
        self.rng.manual_seed(index) if isinstance(self.rng, torch.Generator) else self.rng.seed(index)
        return super().__getitem__(index) + sum(first) + self._draw()

    def _draw(self):
        is_torch = isinstance(self.rng, torch.Generator)
        return float(torch.randn((), generator=self.rng)) if is_torch else self.rng.random()


@pytest.mark.parametrize("kind", [torch.Generator, random.Random, numpy.random.RandomState])
def test_a_generator_that_is_seeded_for_each_sample_is_read_by_workers(kind):
    loader = DataLoader(Reseeded(kind()), batch_size=4)
    wanted = [batch.flatten().tolist() for batch in loader]
    with session_with(num_workers=2) as session:
        assert read(session, loader) == wanted
        assert session.promise == Numerics.EXACT
    with session_with(num_workers=1) as session, pytest.raises(Refused, match="generator 'rng'"):
        session.batches(DataLoader(Reseeded(kind(), before=1), batch_size=4))


class KeepsDrawn(Numbers):
    """Draws from its generator once for each sample."""

    def __init__(self):
        super().__init__()
        self.rng, self.drawn = random.Random(0), {}

    def __getitem__(self, index):
        if index not in self.drawn:
            self.drawn[index] = torch.tensor([self.rng.random()])
        return self.drawn[index]


def test_a_generator_whose_numbers_show_in_few_samples_or_are_kept_is_refused():
    rare = WithGenerator(random.Random(0), lambda rng: rng.random() < 0.0)
    for dataset in (rare, KeepsDrawn()):
        with session_with(num_workers=1) as session, pytest.raises(Refused, match="generator 'rng'"):
            session.batches(DataLoader(dataset))


class Lazy:
    """Makes its generator when it is asked for the first number."""

    rng = None

    def __call__(self, sample):
        self.rng = self.rng or numpy.random.default_rng(torch.initial_seed() % 2**32)
        return sample * 0 + self.rng.random()


class LazyNumbers(Numbers, Lazy):
    def __getitem__(self, index):
        return self(super().__getitem__(index))


class Transformed(Numbers):
    def __init__(self):
        super().__init__()
        self.transform = Lazy()

    def __getitem__(self, index):
        return self.transform(super().__getitem__(index))


class Collating(Lazy):
    def __call__(self, samples):
        return torch.stack([super(Collating, self).__call__(sample) for sample in samples])


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (LazyNumbers(), None),
        (ConcatDataset([LazyNumbers()]), None),
        (Transformed(), None),
        (Numbers(), Collating()),
    ],
)
def test_a_generator_that_each_worker_makes_is_made_by_none_but_the_workers(dataset, collate):
    with session_with(num_workers=2) as session:
        found = read(session, DataLoader(dataset, batch_size=5, collate_fn=collate))
        assert session.promise == Numerics.ROUNDING
    assert len({number for batch in found for number in batch}) == 10


def numbered_by_worker(samples):
    return torch.stack(samples) * 0 + torch.utils.data.get_worker_info().id


def test_a_collate_function_that_only_workers_can_call_is_not_taken_for_one_that_draws():
    for noise, promise in ((False, Numerics.EXACT), (True, Numerics.ROUNDING)):
        loader = DataLoader(Numbers(noise), batch_size=5, num_workers=1, collate_fn=numbered_by_worker)
        with session_with(num_workers=2) as session:
            assert read(session, loader) == [[0.0] * 5, [1.0] * 5]
            assert session.promise == promise


def test_the_look_at_a_dataset_reads_few_samples():
    class Counted(Numbers):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    dataset = Counted()
    with session_with(num_workers=1) as session:
        session.batches(DataLoader(dataset, batch_size=5))
    assert Counted.read == 2


@given(own=st.sampled_from([(0, False), (1, False), (1, True)]), wanted=st.sampled_from([0, 1, 2]))
@settings(max_examples=9, deadline=None)
def test_the_streams_of_the_process_move_as_they_would_pass_after_pass(own, wanted):
    """A pass draws a seed for its workers from the stream that shuffles, but none where they run already."""
    number, lasting = own

    def loader():
        torch.manual_seed(7)
        return DataLoader(Numbers(), 4, shuffle=True, num_workers=number, persistent_workers=lasting)

    def passes(fed):
        return [[*(batch.flatten().tolist() for batch in fed()), float(torch.rand(1))] for _ in range(3)]

    plain = loader()
    expected = passes(lambda: plain)
    for persistent in (True, False):
        if wanted == number == 0 or (wanted, persistent) == own:
            continue
        with session_with(num_workers=wanted, persistent=persistent) as session:
            given = loader()
            assert passes(lambda session=session, given=given: session.batches(given)) == expected


def test_running_workers_hear_what_the_loop_changes_in_the_dataset():
    class Scaled(Numbers):
        scale = 1.0

        def __init__(self):
            super().__init__()
            self.scale, self.transform = 1.0, types.SimpleNamespace(shifts=[0.0])

        def __getitem__(self, index):
            return super().__getitem__(index) * self.scale + self.transform.shifts[0]

    inner = Scaled()
    loader = DataLoader(Subset(inner, range(8)), batch_size=8)
    with session_with(num_workers=1) as session:
        for scale, shift in ((1.0, 0.0), (2.0, 0.0), (2.0, 3.0)):
            inner.scale, inner.transform.shifts[0] = scale, shift
            assert read(session, loader) == [[scale * n + shift for n in range(8)]]


def test_running_workers_hear_of_another_transform_in_one_of_several_datasets():
    one, other = WithGenerator(0, torch.tensor), WithGenerator(0, torch.tensor)
    loader = DataLoader(ConcatDataset([one, other]), batch_size=20)
    with session_with(num_workers=1) as session:
        (plain,) = read(session, loader)
        other.draw = torch.tensor(5.0).add
        assert read(session, loader) == [plain[:10] + [5.0 + n for n in range(10)]]
        first = {child.pid for child in multiprocessing.active_children()}
        other.rng = 1
        assert read(session, loader) == [plain[:10] + [6.0 + n for n in range(10)]]
        assert first.isdisjoint(child.pid for child in multiprocessing.active_children())


def test_no_workers_takes_workers_away():
    with session_with(num_workers=0) as session:
        batches = read(session, DataLoader(Numbers(), batch_size=5, num_workers=1, timeout=9))
        assert batches == [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]
        assert session.build.notes["loader_workers"] == (1, 0, None)


@pytest.mark.parametrize(
    ("settings", "loader", "reason"),
    [
        ({}, [1, 2], "the data is a list, not a torch DataLoader"),
        ({}, DataLoader(Stream()), "iterable dataset"),
        ({}, OwnWay(Numbers()), "your OwnWay iterates in its own way"),
        ({}, Filtered(Numbers()), "your Filtered iterates in its own way"),
        ({}, DataLoader(WithEpoch()), "persistent = false"),
        ({}, ordered(DataLoader(WithEpoch()), seed=0, epoch=0), "persistent = false"),  # as `train` feeds it
        ({"num_workers": 0}, DataLoader(Numbers()), "already has num_workers = 0"),
        ({"num_workers": 0}, DataLoader(Numbers(), num_workers=1, worker_init_fn=print), "worker_init_fn"),
    ],
)
def test_refuses_where_samples_could_change(settings, loader, reason):
    with session_with(**settings) as session, pytest.raises(Refused, match=f"loader_workers: .*{reason}"):
        session.batches(loader)


def test_an_open_file_that_workers_would_share_is_refused(tmp_path):
    """They would move each other's position in it."""
    path = tmp_path / "numbers.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "1")

    class InFile(Numbers):
        def __init__(self, file):
            super().__init__()
            self.source = file

    numpy.savez(tmp_path / "numbers.npz", a=numpy.zeros(2))
    arrays = numpy.load(tmp_path / "numbers.npz")
    held = [path.open("rb"), zipfile.ZipFile(path), arrays, io.BytesIO(b"1"), None]
    with session_with() as session:
        for file in held[:3]:
            for loader in (DataLoader(InFile(file)), ordered(DataLoader(InFile(file)), seed=0, epoch=0)):
                with pytest.raises(Refused, match="your dataset's open file 'source'"):
                    session.batches(loader)
            session.batches(DataLoader(InFile(file), worker_init_fn=print))
            file.close()
        for file in held:
            session.batches(DataLoader(InFile(file)))


def test_refuses_more_workers_than_cores():
    with pytest.raises(Refused, match="num_workers = 5, but only 4 cores"):
        session_with(num_workers=5)


def test_proposes_nothing_without_a_data_loader_and_many_workers_where_the_step_waits():
    profile = dataclasses.replace(plain_profile(), device="cuda")
    assert [c.num_workers for c in LoaderWorkers.candidates(profile, MACHINE)] == [4, 2, 1]
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 2}
    profile.shares["data"] = 0.0
    assert [c.num_workers for c in LoaderWorkers.candidates(profile, MACHINE)] == [
        0,
        1,
    ]  # fewer, to free cores
    profile.shares["data"] = 0.6
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 0, "in_memory": True}
    assert LoaderWorkers.candidates(profile, MACHINE) == []
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 0}
    profile.shares["data"] = 0.03  # one core feeds the step
    assert LoaderWorkers.candidates(profile, MACHINE) == []
    profile.features["loader"] = {"is_dataloader": False}
    assert LoaderWorkers.candidates(profile, MACHINE) == []


def test_on_a_cpu_workers_are_offered_beside_the_threads_that_they_leave_and_as_they_are():
    profile = plain_profile()
    profile.features["num_threads"] = 4
    for waiting, order in ((0.2, [1, 2, 4]), (0.8, [2, 4, 1]), (0.95, [4, 2, 1])):
        profile.shares["data"] = waiting
        offered = LoaderWorkers.candidates(profile, MACHINE)
        assert [one.num_workers for one in offered] == order
        left = [{"cpu_threads": {"num_threads": max(1, 4 - n)}} for n in order]
        assert [one.company(profile, MACHINE) for one in offered] == [[beside, {}] for beside in left]
    gpu = dataclasses.replace(profile, device="cuda")
    assert all(one.company(gpu, MACHINE) == [{}] for one in LoaderWorkers.candidates(gpu, MACHINE))


def test_workers_and_the_threads_of_the_step_act_together():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        plan = Plan.from_dict({"loader_workers": {"num_workers": 1}, "cpu_threads": {"num_threads": 2}})
        with start(TINY_JOBS["mlp"](), plan, MACHINE) as session:
            assert read(session, DataLoader(Numbers(), batch_size=5))
            assert torch.get_num_threads() == 2
            seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
            told = [technique.confirm(seen, seen) for technique in plan.techniques]
        assert told == ["2 threads instead of 3", "1 worker instead of 0"]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("where", ["dataset", "transform", "inside"])
def test_a_dataset_whose_samples_depend_on_what_it_counts_is_refused(where):
    class Curriculum(Numbers):
        def __init__(self, matters=True):
            super().__init__()
            self.matters = matters
            self.transform = types.SimpleNamespace(seen=0)
            self.owner = self.transform if where == "transform" else self
            self.seen = 0

        def __getitem__(self, index):
            self.owner.seen += 1
            return super().__getitem__(index) * (min(1.0, self.owner.seen / 1000) if self.matters else 1.0)

    def loader(dataset):
        return DataLoader(Subset(dataset, range(10)) if where == "inside" else dataset, batch_size=5)

    own = Curriculum()
    reason = "each worker would count by itself in your dataset's 'seen'"
    with session_with(num_workers=1) as session, pytest.raises(Refused, match=reason):
        session.batches(loader(own))
    assert own.owner.seen == 0
    other = Curriculum(matters=False)
    with session_with(num_workers=1) as session:
        session.batches(loader(other))
    assert other.owner.seen == 0


def test_a_count_beside_samples_that_differ_by_themselves_is_none_of_these():
    class Noisy(Numbers):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index) + numpy.random.default_rng().random()

    own = Noisy()
    own.reads = 0
    with session_with(num_workers=1) as session:
        session.batches(DataLoader(own, batch_size=5))
    assert own.reads == 0
