"""A process-wide setting that several hold comes back, in whatever order they let go."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

import vivace
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Build
from vivace.testing.contract import process_flags
from vivace.testing.jobs import TINY_JOBS


def bench():
    machine = vivace.inspect()
    return Build(models=[], optimizer=None, machine=machine, device=torch.device("cpu"), own_step=True)


@pytest.mark.parametrize("leaving", list(itertools.permutations(range(3))), ids=str)
def test_an_attribute_comes_back_in_whatever_order_builds_close(leaving):
    owner = SimpleNamespace(colour="red", size=1)
    builds = [bench() for _ in range(3)]
    for number, build in enumerate(builds):
        build.set_flag(owner, "colour", number)
        build.set_flag(owner, "size", 10 * number)
    staying = [0, 1, 2]
    for number in leaving:
        for callback in reversed(builds[number].close_callbacks):
            callback()
        staying.remove(number)
        last = staying[-1] if staying else None
        assert (owner.colour, owner.size) == (("red", 1) if last is None else (last, 10 * last))


def test_what_a_build_sets_twice_comes_back():
    owner, build = SimpleNamespace(colour="red"), bench()
    build.set_flag(owner, "colour", "green")
    build.set_flag(owner, "colour", "blue")
    for callback in reversed(build.close_callbacks):
        callback()
    assert owner.colour == "red"


@pytest.fixture(params=[False, True], ids=["strict", "tf32"])
def _as_the_person_set_it(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("_as_the_person_set_it")
def test_sessions_that_close_in_another_order_leave_no_trace(first):
    """Strict fp32 sets how products round; one sets the number of threads, too."""
    before = process_flags(), torch.get_num_threads()
    more = torch.get_num_threads() + 1
    plan = Plan.from_dict({"cpu_threads": {"num_threads": more}})
    machine, job = dataclasses.replace(vivace.inspect(), num_cores=more), TINY_JOBS["mlp"]()
    sessions = [start(job, Plan(), machine), start(job, plan, machine)]
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    sessions.pop(first).close()
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.get_num_threads() == (before[1] if first else more)
    sessions.pop().close()
    assert (process_flags(), torch.get_num_threads()) == before


@pytest.mark.parametrize("leaving", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("name", ["padded_stem", "bf16_autocast"])
def test_forwards_of_shared_modules_come_back_in_whatever_order_sessions_close(name, leaving):
    shared = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 6))
    sessions, placed = [], []

    def forwards():
        return [vars(module).get("forward") for module in shared]

    for _ in leaving:
        model = torch.nn.Sequential(shared, torch.nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan.from_dict({name: {}})
        sessions.append(vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).sum()))
        placed.append(forwards())
        assert any(placed[-1])
    sessions[leaving[0]].close()
    assert forwards() == placed[leaving[1]]
    pairs = zip(forwards(), placed[leaving[0]], strict=True)
    assert not any(gone is not None and getattr(stays, "own", None) is gone for stays, gone in pairs)
    sessions[leaving[1]].close()
    assert not any("forward" in vars(module) or "__getstate__" in vars(module) for module in shared)
