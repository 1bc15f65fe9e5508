"""GPUs of several kinds: CUDA counts the fastest first, NVML by the bus."""

import json

import pytest


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("FASTEST_FIRST", ["NVIDIA H100 80GB HBM3", "NVIDIA L4", "NVIDIA L4"]),
        ("PCI_BUS_ID", ["NVIDIA L4", "NVIDIA H100 80GB HBM3", "NVIDIA L4"]),
    ],
)
def test_the_machine_counts_as_cuda_does(stand_in, monkeypatch, order, names):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "import json, vivace; print(json.dumps([one.name for one in vivace.inspect().devices]))"
    assert json.loads(stand_in.python(code, gpus=3, fastest=1))[:3] == names
