"""A GPU in MIG mode: a process is shown one instance of it, with a name and memory of its own."""

import json

import pytest

SLICE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
SECOND = "MIG-00000000-0000-0000-0000-000000000001"

LOOKS = """
import json
import torch
from vivace import inspect
from vivace.inspection.table import _rows
from vivace.session.opening import training_device
from vivace.tuning.budget import free_bytes
machine = inspect()
gpus = [one for one in machine.devices if one.kind == "cuda"]
shown = [(one.name, one.memory_bytes >> 30, one.served, "mig" in one.features) for one in gpus]
row = dict(_rows(machine)).get("cuda", "")
found = str(training_device(machine)), torch.cuda.get_device_name(0), free_bytes() >> 30
print(json.dumps([shown, row, machine.passed_over, *found]))
"""


@pytest.mark.parametrize("choice", [None, SECOND], ids=["as it is", "chosen by its identifier"])
def test_an_instance_is_named_with_its_own_memory(stand_in, monkeypatch, choice):
    if choice is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    shown, row, passed_over, *found = json.loads(stand_in.python(LOOKS, mig=2))
    assert shown == [[SLICE, 10, True, True]]
    assert SLICE in row
    assert "10.0 GiB" in row
    assert passed_over == ""
    assert found == ["cuda:0", SLICE, 10]


def test_a_gpu_in_mig_mode_without_an_instance_is_no_device(stand_in):
    machine = json.loads(stand_in.vivace("inspect", "--json", mig=0).stdout)
    assert [device["kind"] for device in machine["devices"]] == ["cpu"]
    assert "MIG" in machine["findings"][0]["problem"]
