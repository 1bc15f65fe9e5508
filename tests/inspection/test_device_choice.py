"""`--device`: what a person names is what torch and every child process see."""

import pytest

from vivace.errors import InputError
from vivace.inspection.device_choice import train_on
from vivace.inspection.facts import Facts
from vivace.inspection.nvidia import Gpu, Nvidia
from vivace.machine import Device

THREE = Facts(
    nvidia=Nvidia(tuple(Gpu(Device("cuda", f"card {n}", 2**34), f"GPU-{n}00000", n) for n in range(3)))
)
INSTANCES = Facts(
    nvidia=Nvidia(tuple(Gpu(Device("cuda", "a part", 2**34, ("mig",)), f"MIG-{n}", 0) for n in range(3)))
)
BEHIND_AN_EMPTY_ONE = Facts(
    nvidia=Nvidia(
        (
            Gpu(Device("cuda", "card", 2**34, ("sm_90", "mig")), "GPU-00000", 0, empty_mig=True),
            Gpu(Device("cuda", "card", 2**34, ("sm_90",)), "GPU-10000", 1),
        )
    )
)
TWO_AMD = Facts(amd_gpus=(Device("cuda", "Instinct", 2**34),) * 2)


@pytest.mark.parametrize(
    ("facts", "name", "before", "after"),
    [
        (THREE, "cpu", {}, {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
        (THREE, "cuda", {}, {"CUDA_VISIBLE_DEVICES": "0"}),
        (THREE, "cuda:2", {}, {"CUDA_VISIBLE_DEVICES": "2"}),
        (THREE, "cuda:1", {"CUDA_VISIBLE_DEVICES": "2, 0"}, {"CUDA_VISIBLE_DEVICES": "0"}),
        (THREE, "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}),
        (TWO_AMD, "cuda:1", {}, {"HIP_VISIBLE_DEVICES": "1"}),
        (TWO_AMD, "cuda:0", {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (BEHIND_AN_EMPTY_ONE, "cuda:0", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (INSTANCES, "cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}),
    ],
)
def test_the_named_device_is_the_only_one_seen(facts, name, before, after):
    environment = dict(before)
    train_on(name, environment, facts)
    assert environment == after


@pytest.mark.parametrize(
    ("facts", "name", "environment", "message"),
    [
        (
            THREE,
            "cuda:3",
            {},
            "there is no device cuda:3 here: this machine shows cpu, cuda:0, cuda:1, cuda:2",
        ),
        (THREE, "cuda:1", {"CUDA_VISIBLE_DEVICES": "2"}, "this machine shows cpu, cuda:0 "),
        (TWO_AMD, "cuda:2", {}, "this machine shows cpu, cuda:0, cuda:1 "),
        (Facts(), "cuda", {}, "this machine shows cpu "),
        (THREE, "gpu", {}, "the device is 'gpu'; Vivace trains on cpu, cuda, or one of several"),
        (THREE, "cuda:1", {"WORLD_SIZE": "2"}, "several ranks train, each on its own"),
    ],
)
def test_what_is_not_there_is_said(facts, name, environment, message):
    before = dict(environment)
    with pytest.raises(InputError) as raised:
        train_on(name, environment, facts)
    assert message in str(raised.value)
    assert environment == before
