import dataclasses

import pytest
import torch

from vivace.errors import PlanError, Refused
from vivace.inspection import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract, plain_profile

CpuThreads = registry.find("cpu_threads")
MACHINE = dataclasses.replace(inspect(), num_cores=8)


@pytest.mark.usefixtures("one_thread")
class TestCpuThreads(TechniqueContract):
    technique = CpuThreads


@pytest.mark.usefixtures("one_thread")
def test_sets_the_number_and_sets_it_back():
    with start(TINY_JOBS["mlp"](), Plan([CpuThreads(num_threads=3)]), MACHINE):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("number", "reason"), [(1, "already runs on num_threads = 1"), (9, "only 8 cores")])
def test_refuses(number, reason):
    with pytest.raises(Refused, match=f"cpu_threads: .*{reason}"):
        start(TINY_JOBS["mlp"](), Plan([CpuThreads(num_threads=number)]), MACHINE)


def test_a_plan_with_no_threads_is_not_valid():
    with pytest.raises(PlanError, match="num_threads = 0"):
        Plan.from_dict({"cpu_threads": {"num_threads": 0}})


def test_proposes_halves_of_the_cores_without_the_present_number():
    profile = plain_profile()
    profile.features["num_threads"] = 4
    assert [c.num_threads for c in CpuThreads.candidates(profile, MACHINE)] == [8, 2, 1]
