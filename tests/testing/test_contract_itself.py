"""The shipped contract itself: a technique that leaves anything behind fails by name, a clean one passes."""

import dataclasses
import gc
import os
import random
import sys
import threading
import types
from typing import ClassVar

import numpy
import pytest
import torch
from torch.nn import functional

from vivace.errors import Refused
from vivace.job import Job
from vivace.plan import Plan
from vivace.technique import Card, Numerics, Stage, Technique, registry
from vivace.testing import TINY_JOBS, TechniqueContract, check, contract, fresh, jobs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _references_of_this_process():
    """Leaks are undone between these tests, so a reference made before is none for the next."""
    _forget()
    yield
    _forget()


def _forget():
    contract._reference.cache_clear()
    contract._bits_before.cache_clear()
    contract._reported.clear()


@dataclasses.dataclass(frozen=True)
class Clean(Technique):
    """Wraps nothing, changes nothing for good."""

    name = "clean"
    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS, numerics=Numerics.EXACT, summary="does nothing", source="https://example.org"
    )

    level: int = 1

    def apply(self, build):
        build.set_flag(torch.nn.Module, "call_super_init", False)
        build.notes["open"] = True

        def closed():
            build.notes["open"] = False

        build.on_close(closed)

    def confirm(self, seen, reference):
        return "it is there"


def leaky(leave):
    """A technique that calls `leave` with its build and undoes nothing."""

    @dataclasses.dataclass(frozen=True)
    class Leaky(Clean):
        name = "leaky"

        def apply(self, build):
            leave(build)

    return Leaky


def replaces_a_function(monkeypatch):
    original = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", lambda *given, **named: original(*given, **named))


def hides_a_method(monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "__call__", torch.nn.Module.__call__, raising=False)


def swaps_a_module(monkeypatch):
    other = types.ModuleType("torch.nn.functional")
    vars(other).update({**vars(functional), "relu": lambda *given, **named: None})
    monkeypatch.setitem(sys.modules, "torch.nn.functional", other)


def patches_what_nobody_watches(monkeypatch):
    """The tiny job's own loss: only the bits of the reference show it."""
    original = jobs._cross_entropy
    monkeypatch.setattr(jobs, "_cross_entropy", lambda model, batch: 0.5 * original(model, batch))


LEAKS = {
    "denormals": (lambda patch: torch.set_flush_denormal(True), "a product of denormal numbers"),
    "default dtype": (
        lambda patch: torch.set_default_dtype(torch.float64),
        "default_dtype was torch.float32",
    ),
    "threads": (lambda patch: torch.set_num_threads(2), "num_threads was 1, is 2"),
    "algorithms": (
        lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
        "cudnn.benchmark was False, is True",
    ),
    "determinism": (
        lambda patch: torch.use_deterministic_algorithms(True, warn_only=True),
        "deterministic_algorithms was 0, is 1",
    ),
    "environment": (
        lambda patch: patch.setenv("MY_ALLOCATOR", "fast"),
        "the environment variable MY_ALLOCATOR was missing, is fast",
    ),
    "function": (replaces_a_function, "torch.nn.functional.cross_entropy is another function"),
    "inherited": (hides_a_method, "torch.nn.modules.linear.Linear.__call__ hides what was inherited"),
    "module": (swaps_a_module, "torch.nn.functional.relu is another function"),
    "unwatched": (patches_what_nobody_watches, "gives other bits: the loss of step 0 was"),
    "working folder": (lambda patch: patch.chdir(os.sep), "os.getcwd was"),
    "garbage collector": (lambda patch: gc.disable(), "gc.isenabled was True, is False"),
}


@pytest.fixture
def _put_back():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    gc.enable()
    torch.set_flush_denormal(False)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_put_back")
@pytest.mark.parametrize("kind", LEAKS)
def test_what_stays_after_the_session_is_named(kind, monkeypatch):
    leave, named = LEAKS[kind]
    technique = leaky(lambda build: build.on_close(lambda: leave(monkeypatch)))
    with pytest.raises(AssertionError) as failed:
        check(Plan([technique(level=7)]), "mlp")
    assert str(failed.value).startswith("leaky(level=7) on the job 'mlp': the closed session left ")
    assert named in str(failed.value)


@pytest.mark.usefixtures("_put_back")
def test_a_refusal_leaves_nothing_either(monkeypatch):
    def leave(build):
        monkeypatch.setenv("MY_ALLOCATOR", "fast")
        build.require(False, "there is nothing to do")

    with pytest.raises(AssertionError, match=r"the refusal \(leaky: there is .*MY_ALLOCATOR was missing"):
        check(Plan([leaky(leave)()]), "mlp")


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(lambda: torch.rand(1), "torch's"), (random.random, "Python's"), (numpy.random.rand, "NumPy's")],
    ids=["torch", "Python", "NumPy"],
)
def test_what_draws_random_numbers_is_named(draw, whose):
    with pytest.raises(AssertionError, match=rf"mlp'.* apply\(\) drew random numbers from {whose} stream"):
        check(Plan([leaky(lambda build: draw())()]), "mlp")
    with pytest.raises(AssertionError, match=f"closing the session drew random numbers from {whose} stream"):
        check(Plan([leaky(lambda build: build.on_close(draw))()]), "mlp")


def test_a_leak_is_not_blamed_on_the_next(monkeypatch):
    technique = leaky(lambda build: build.on_close(lambda: patches_what_nobody_watches(monkeypatch)))
    with pytest.raises(AssertionError, match="leaky"):
        check(Plan([technique()]), "mlp")
    assert check(Plan([Clean()]), "mlp") == ""


def contract_of(technique_class, **job_functions):
    class Contract(TechniqueContract):
        technique = technique_class
        jobs: ClassVar = job_functions

    return Contract()


def test_what_was_there_before_the_first_session_shows_beside_a_fresh_process(monkeypatch):
    """The reference that this process gives is as wrong before as after: only another process tells."""

    @dataclasses.dataclass(frozen=True)
    class Early(Clean):
        name = "early"

        @classmethod
        def candidates(cls, profile, machine):
            patches_what_nobody_watches(monkeypatch)
            return []

    with pytest.raises(
        AssertionError, match=r"early.* on the job 'mlp': before the session is opened.*step 0"
    ):
        contract_of(Early, mlp=jobs.mlp).test_acts_within_its_promise_or_refuses()


def patches_another_job(monkeypatch):
    """The recurrent network, of which a session on another job knows nothing."""
    original = jobs._Recurrent.forward
    monkeypatch.setattr(jobs._Recurrent, "forward", lambda model, inputs: 0.5 * original(model, inputs))


def test_what_only_another_job_meets_is_found(monkeypatch):
    def leave(build):
        if not any(isinstance(module, torch.nn.LSTM) for module in build.model.modules()):
            build.on_close(lambda: patches_another_job(monkeypatch))

    both = {"lstm": jobs.lstm, "mlp": jobs.mlp}
    with pytest.raises(AssertionError, match=r"'lstm': a session on another job left something behind"):
        contract_of(leaky(leave), **both).test_acts_within_its_promise_or_refuses()


def test_a_job_that_cannot_be_sent_is_compared_with_itself():
    lock = threading.Lock()

    def guarded() -> Job:
        job = jobs.mlp()

        def loss(model, batch):
            with lock:
                return job.loss(model, batch)

        return dataclasses.replace(job, loss=loss)

    assert fresh.fresh_bits(guarded) is None
    contract_of(Clean, guarded=guarded).test_acts_within_its_promise_or_refuses()


def test_a_fresh_process_has_the_threads_and_the_default_dtype_of_this_one():
    here = fresh.bits(jobs.mlp())
    torch.set_default_dtype(torch.float64)
    try:
        found = fresh.fresh_bits(jobs.mlp)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found["'0.weight' of model 0"].dtype == torch.float64
    assert fresh.difference(fresh.fresh_bits(jobs.mlp), here) == ""


def test_a_job_that_differs_by_itself_is_no_leak():
    """Its own random numbers come from elsewhere: of its bits nothing can be said."""

    def restless() -> Job:
        job = jobs.mlp()
        return dataclasses.replace(
            job,
            loss=lambda model, batch: (
                job.loss(model, batch) * (1 + 1e-3 * numpy.random.default_rng().random())
            ),
        )

    @dataclasses.dataclass(frozen=True)
    class Coarse(Clean):
        name = "coarse"
        card: ClassVar[Card] = dataclasses.replace(
            Clean.card, numerics=Numerics.ROUNDING, unit_roundoff=2.0**-8
        )

    class Contract(TechniqueContract):
        technique = Coarse
        jobs: ClassVar = {"restless": restless}

    Contract().test_acts_within_its_promise_or_refuses()


@pytest.mark.parametrize("job", TINY_JOBS)
def test_a_clean_one_passes(job):
    assert check(Plan([Clean()]), job) == ""


class TestClean(TechniqueContract):
    technique = Clean

    @pytest.fixture(autouse=True)
    def _known(self, monkeypatch):
        """As if it were registered: a plan file names it."""
        monkeypatch.setitem(registry._registered, "clean", Clean)


def test_confirm_is_called_while_the_session_is_open():
    states = []

    @dataclasses.dataclass(frozen=True)
    class Asking(Clean):
        name = "asking"

        def apply(self, build):
            super().apply(build)
            states.append(build.notes)

        def confirm(self, seen, reference):
            if not states[-1]["open"]:
                raise Refused("the session is closed")
            return "the session is open"

    class Contract(TechniqueContract):
        technique = Asking

    Contract().test_confirms_with_evidence_or_refuses()
    assert len(states) == len(TINY_JOBS)


def test_evidence_that_is_missing_names_job_and_setting():
    @dataclasses.dataclass(frozen=True)
    class Silent(Clean):
        name = "silent"

        def confirm(self, seen, reference):
            return " "

    class Contract(TechniqueContract):
        technique = Silent

    with pytest.raises(
        AssertionError, match=r"silent\(\) on the job 'mlp': confirm\(\) returned no evidence"
    ):
        Contract().test_confirms_with_evidence_or_refuses()


def test_what_replays_a_step_is_known_by_its_card_and_not_by_its_stage():
    @dataclasses.dataclass(frozen=True)
    class Replays(Clean):
        name = "replays"
        card = dataclasses.replace(Clean.card, captures=True)

    assert contract._captures(Plan([Clean(), Replays()]))
    assert not contract._captures(Plan([Clean()]))
