"""Triton's kernels are compiled for a GPU and launched; what they compute is tested by the interpreter."""

import importlib
import shutil
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"

LAUNCHED = """
import warnings
import torch, triton  # what they warn of on import is theirs
from vivace.techniques.fused_batchnorm.kernels.batch_norm_backward import backward
from vivace.techniques.fused_batchnorm.kernels.batch_norm_forward import apply, moments
from vivace.techniques.fused_batchnorm.kernels.product_forward import forward as product
warnings.simplefilter("error")
x, one, zero = torch.ones(64, 16).cuda(1), torch.ones(16).cuda(1), torch.zeros(16).cuda(1)
mean, rstd = moments(x, None, 64, 0, None, None, 0.1, 1e-5)
output, mask = apply(x, mean, rstd, one, zero, None, [], "relu")
gradients = backward(output, x, mask, mean, rstd, one, zero, "relu", False, None, [])
output, mask = apply(x, mean, rstd, one, zero, x, [mean, rstd, one, zero], "relu")
backward(output, x, mask, mean, rstd, one, zero, "relu", True, output, [x, mean, rstd, one, zero])
y, statistics = product(x, torch.ones(8, 16).cuda(1))
print(output.shape, gradients[0].shape, y.shape, statistics.device)
"""


def test_launches_warn_of_nothing(stand_in):
    """Triton 3.9 does where a kernel leaves to it whether a product and a sum are rounded once."""
    printed = stand_in.python(LAUNCHED, gpus=2)
    assert printed.strip() == "torch.Size([64, 16]) torch.Size([64, 16]) torch.Size([64, 8]) cuda:1"


@pytest.mark.slow
def test_what_was_compiled_ahead_is_not_compiled_again_elsewhere(stand_in, tmp_path, monkeypatch):
    """Elsewhere is another folder; Triton would write what it compiles."""
    monkeypatch.syspath_prepend(str(GPU))
    ahead = importlib.import_module("ahead")
    environment = stand_in.environment() | {"TRITON_CACHE_DIR": str(tmp_path / "here")}
    ahead.pack(tmp_path, environment, dry=True)
    shutil.rmtree(tmp_path / "here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    ahead.unpack(tmp_path / ahead.ARCHIVE)

    def kernels():
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "there").rglob("*.cubin")}

    before = kernels()
    assert any("batch_norm_apply" in file.name for file in before)
    assert any("statistics_mm" in file.name for file in before)
    ahead.pack(tmp_path, environment | {"TRITON_CACHE_DIR": str(tmp_path / "there")}, dry=True)
    assert kernels() == before
