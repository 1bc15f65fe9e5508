"""The machine at hand as an entry of the catalogue."""

from __future__ import annotations

import json

import pytest

from vivace.advising.catalogue import find_gpu
from vivace.advising.measured import this_machine
from vivace.errors import InputError
from vivace.machine import Device, Machine


def machine_with(name: str, **ceilings: float) -> Machine:
    return Machine((Device("cpu", name, 8 * 2**30),), 2, {}, {}, ceilings=ceilings)


def test_this_machine_is_the_known_card_with_what_was_measured() -> None:
    gpu = this_machine(
        machine_with("NVIDIA H100 80GB HBM3", matmul_bf16=7e14, copy_device=3e12, disk_read=1e9)
    )
    assert gpu.measured == {"bf16": 7e14, "bandwidth": 3e12}
    assert gpu.rates == find_gpu("H100").rates


def test_an_unknown_device_is_what_was_measured_of_it() -> None:
    gpu = this_machine(machine_with("Some processor", matmul_fp32=2e11, copy_device=2e10))
    assert gpu.rates == {"fp32": 2e11}
    assert (gpu.bandwidth, gpu.memory_bytes, gpu.form) == (2e10, 8 * 2**30, "host")
    assert json.dumps(gpu.to_dict())
    with pytest.raises(InputError, match="'Some processor' is not in the catalogue and was not measured"):
        this_machine(machine_with("Some processor", matmul_fp32=2e11))


def test_a_card_that_is_sold_in_two_sizes_is_the_one_that_is_here() -> None:
    """The driver calls both by one name."""
    here = Device("cuda", "NVIDIA GeForce RTX 4060 Ti", 8188 * 2**20)
    assert this_machine(Machine((here,), 2, {}, {})).memory_bytes == here.memory_bytes
    whole = Device("cuda", "Tesla T4", 15360 * 2**20)  # the driver keeps some for itself
    assert this_machine(Machine((whole,), 2, {}, {})) == find_gpu("T4")
