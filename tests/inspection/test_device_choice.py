"""`--device`: what a person names is what torch and every child process see."""

import dataclasses

import pytest

from vivace.errors import InputError
from vivace.inspection.device_choice import of_launch, train_on
from vivace.inspection.facts import Facts, TorchBuild
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
BESIDE_AMD = dataclasses.replace(  # torch for ROCm serves none of NVIDIA's
    THREE,
    torch=TorchBuild("2.15.0", hip="7.0"),
    amd_gpus=(Device("cuda", "Instinct", 2**34),) * 4,
    nodes=frozenset({"kfd"}),
)
FOR_THE_CPU = dataclasses.replace(THREE, torch=TorchBuild("2.15.0"))
TWO_AMD = Facts(amd_gpus=(Device("cuda", "Instinct", 2**34),) * 2)


@pytest.mark.parametrize(
    ("value", "default", "found"),
    [
        ("3", None, 3),
        (" 2 ", 1, 2),
        ("", 1, 1),
        (None, 1, 1),
        ("x", 1, "is 'x'"),
        ("-1", 1, "is '-1'"),
        ("", None, "WORLD_SIZE is set, and RANK is not"),
        (None, None, "WORLD_SIZE is set, and RANK is not"),
    ],
)
def test_a_number_that_a_launcher_has_not_given_is_said(value, default, found):
    environment = {} if value is None else {"RANK": value}
    if isinstance(found, int):
        assert of_launch("RANK", default, environment) == found
        return
    with pytest.raises(InputError, match=found):
        of_launch("RANK", default, environment)


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
        (BESIDE_AMD, "cuda:3", {}, {"HIP_VISIBLE_DEVICES": "3"}),
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
        (Facts(), "cuda", {"CUDA_VISIBLE_DEVICES": "0"}, "this machine shows cpu "),
        (Facts(), "cuda", {"HIP_VISIBLE_DEVICES": "0"}, "this machine shows cpu "),
        (TWO_AMD, "cuda", {"CUDA_VISIBLE_DEVICES": "-1"}, "this machine shows cpu "),
        (TWO_AMD, "cuda:1", {"HIP_VISIBLE_DEVICES": "0,5"}, "this machine shows cpu, cuda:0 "),
        (TWO_AMD, "cuda:1", {"HIP_VISIBLE_DEVICES": "GPU-8bda3c6f"}, "this machine shows cpu, cuda:0 "),
        (
            FOR_THE_CPU,
            "cuda:1",
            {},
            "torch cannot train on cuda:1, the card 1: an NVIDIA GPU is here, and torch 2.15.0 for the CPU "
            "alone was installed; next: install a build of torch for CUDA",
        ),
        (THREE, "gpu", {}, "the device is 'gpu'; Vivace trains on cpu, cuda, or one of several"),
        (THREE, "cuda:1", {"WORLD_SIZE": "2"}, "several ranks train, each on its own"),
        (THREE, "cuda:1", {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x': let torchrun start the ranks"),
    ],
)
def test_what_is_not_there_is_said(facts, name, environment, message):
    before = dict(environment)
    with pytest.raises(InputError) as raised:
        train_on(name, environment, facts)
    assert message in str(raised.value)
    assert environment == before
