import os
import signal

import pytest
import torch

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.observing.reference import Kernels
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.tensors import denormals
from vivace.tensors.settings import on_threads
from vivace.testing import TINY_JOBS, TechniqueContract, plain_profile

FlushDenormals = registry.find("flush_denormals")
PLAN = Plan([FlushDenormals()])


class TestFlushDenormals(TechniqueContract):
    technique = FlushDenormals


@pytest.fixture
def two_threads():
    with on_threads(2):
        yield


def halves():
    """Bits of 200,000 numbers that two threads computed."""
    numbers = torch.full((200_000,), denormals.BITS, dtype=torch.int32).view(torch.float32)
    return (0.5 * numbers).view(torch.int32)


def test_every_thread_takes_them_for_zero_and_later_does_not(two_threads):
    assert halves().all()  # the threads have begun
    with start(TINY_JOBS["mlp"](), PLAN, inspect()):
        assert not halves().any()
        torch.set_num_threads(1)
        torch.set_num_threads(2)
        assert not halves().any()
    assert halves().all()


def test_a_thread_that_was_not_reached_is_a_refusal(two_threads, monkeypatch):
    assert halves().all()
    monkeypatch.setattr(denormals, "_openmp", list)
    with pytest.raises(Refused, match="flush_denormals: not every thread"):
        start(TINY_JOBS["mlp"](), PLAN, inspect())
    assert halves().all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_forked_after_threads_have_begun_does_not_wait_for_them(two_threads):
    assert halves().all()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the tests
        signal.alarm(20)
        torch.set_num_threads(1)
        denormals.flush(True)
        flushed = denormals.are_flushed()
        denormals.flush(False)
        os._exit(0 if flushed and not denormals.are_flushed() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert halves().all()


def test_a_process_that_does_it_already_is_a_refusal():
    denormals.flush(True)
    try:
        with pytest.raises(Refused, match="takes denormal numbers for zero already"):
            start(TINY_JOBS["mlp"](), PLAN, inspect())
        assert denormals.are_flushed()
    finally:
        denormals.flush(False)


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (1e-3, 1)])
def test_it_is_offered_where_a_step_holds_such_numbers(share, number):
    profile = plain_profile()
    profile.features["denormals"] = share
    assert len(FlushDenormals.candidates(profile, inspect())) == number


def test_a_profile_counts_them():
    with Kernels() as kernels:
        torch.full((3, 4), 1e-40) * torch.tensor([1.0, 0.0, -1.0, 1e9])
        torch.zeros(5, dtype=torch.float64) + 1e-40  # normal in float64
    assert kernels.denormal == 12 + 6


def test_of_a_large_tensor_the_first_rows_are_counted():
    numbers = torch.zeros(100, 30)
    numbers[:10] = 1e-40
    assert denormals.denormals(numbers, most=600) == (600, 300)
    assert denormals.denormals(numbers, most=1) == (30, 30)
    assert denormals.denormals(numbers, most=3000) == (3000, 300)
    assert denormals.denormals(torch.tensor(1e-40), most=1) == (1, 1)
