import contextlib
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Build, Seam, registry
from vivace.techniques import pinned_prefetch
from vivace.techniques.pinned_prefetch import _copies, one_ahead, pinning
from vivace.testing import TINY_JOBS, TechniqueContract

PinnedPrefetch = registry.find("pinned_prefetch")


class TestPinnedPrefetch(TechniqueContract):
    technique = PinnedPrefetch


def test_each_batch_is_begun_before_the_one_ahead_is_handed_out():
    events = []

    def begin(batch):
        events.append(f"begin {batch}")
        return batch

    for batch in one_ahead(range(3), begin, lambda batch: batch, []):
        events.append(f"train {batch}")
    assert events == ["begin 0", "begin 1", "train 0", "begin 2", "train 1", "train 2"]
    assert list(one_ahead([], begin, begin, [])) == []


@pytest.fixture
def batches(monkeypatch):
    """The seam of a session on a GPU, of which no copy is made."""
    monkeypatch.setattr(pinned_prefetch, "_copies", lambda device: (lambda b: b, lambda b: b))
    objects = {"models": [torch.nn.Linear(1, 1)], "optimizer": None, "own_step": False}
    build = Build(machine=inspect(), device=torch.device("cuda"), **objects)
    PinnedPrefetch().apply(build)
    yield build.compose({Seam.BATCHES: lambda loader: loader}).batches
    build.close()


@given(parts=st.lists(st.integers(0, 4), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("endless", [itertools.count, lambda: (n for n in itertools.count())])
def test_a_loop_that_leaves_an_iterator_loses_no_batch(batches, endless, parts):
    one, other = endless(), endless()
    found = [[*itertools.islice(batches(source), part)] for part in parts for source in (one, other)]
    wanted = iter(range(sum(parts)))
    assert found[::2] == found[1::2] == [[*itertools.islice(wanted, part)] for part in parts]


def test_a_pass_that_ends_and_one_that_begins_anew_leave_nothing(batches):
    data, once = [1, 2, 3], iter([1, 2, 3])
    assert next(iter(batches(data))) == 1
    assert [*batches(data)] == [*batches(data)] == [1, 2, 3]
    assert next(iter(batches(once))) == 1
    assert [*batches(once)] == [2, 3]
    assert [*batches(once)] == []


class Held:
    """Lives as long as the zip that reads it."""

    def __iter__(self):
        return self

    def __next__(self):
        return 1


def test_of_iterators_that_ended_none_is_held_and_of_those_that_were_left_few(batches):
    def read(count):
        sources = [Held() for _ in range(6)]
        for source in sources:
            assert [*itertools.islice(batches(zip(source, range(3), strict=False)), count)]
        return [weakref.ref(source) for source in sources]

    assert [source() for source in read(None)] == [None] * 6
    assert [source() is None for source in read(1)] == [True] * 4 + [False] * 2


def test_batches_that_did_not_come_through_the_session_are_no_evidence():
    with pytest.raises(Refused, match="changed nothing"):
        PinnedPrefetch().confirm(Observation({}, {}, 0, 0.0), Observation({}, {}, 0, 0.0))


def test_a_dataloader_pins_while_it_is_read_for_a_gpu_and_is_given_back():
    loader = TINY_JOBS["cnn"]().data()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert not loader.pin_memory
    with pinning(loader, cpu):
        assert not loader.pin_memory
    with pinning([], gpu):  # no DataLoader
        pass
    first, second = pinning(loader, gpu), pinning(loader, gpu)
    for each in (first, second):  # two passes at once, which end in the order of their beginnings
        each.__enter__()
    for each in (first, second):
        assert loader.pin_memory
        each.__exit__(None, None, None)
    assert not loader.pin_memory


def test_lengths_of_a_packed_sequence_stay_on_the_cpu(monkeypatch):
    """No stream uses their memory."""
    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    begin, complete = _copies(torch.device("cpu"))
    assert torch.equal(complete(begin(packed)).batch_sizes, torch.tensor([2, 1]))


@pytest.mark.gpu
def test_batches_are_on_the_gpu_and_equal():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan([PinnedPrefetch()]), inspect()) as session:
        torch.manual_seed(1)
        moved = list(session.batches(job.data()))
    torch.manual_seed(1)
    for (inputs, labels), (wanted_inputs, wanted_labels) in zip(moved, job.data(), strict=True):
        assert inputs.is_cuda
        assert torch.equal(inputs.cpu(), wanted_inputs)
        assert torch.equal(labels.cpu(), wanted_labels)
