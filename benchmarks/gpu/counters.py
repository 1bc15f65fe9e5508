"""Bytes that kernels really moved, by the GPU's own counters, where Nsight Compute can read them.

python benchmarks/gpu/counters.py SHAPE     # what the counters watch: one forward and backward pass
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import defaultdict

from norm_shapes import BATCH, SHAPES

from vivace.errors import ChildFailed, Refused

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def measured(shape: str, timeout: float) -> dict[str, float]:
    """Bytes of device memory that each kernel of one BatchNorm read and wrote.

    Raises Refused where there is no ncu, ChildFailed with what it said where it could not read the counters.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise Refused("ncu is not on the PATH: the bytes were counted, not measured")
    watch = ["--clock-control", "none", "--kernel-name", "regex:batch_norm", "--metrics", ",".join(METRICS)]
    command = [tool, *watch, "--print-units", "base", "--csv", sys.executable, __file__, shape]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    found = summed(done.stdout)
    if done.returncode or not found:
        said = " ".join((done.stdout + done.stderr).split())[-300:]
        raise ChildFailed(f"ncu read no counter, or not all (exit code {done.returncode}): {said}")
    return found


def summed(printed: str) -> dict[str, float]:
    """Bytes by kernel, from what ``ncu --csv --print-units base`` prints."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    found: dict[str, float] = defaultdict(float)
    for row in csv.DictReader(lines):
        if row.get("Metric Name") in METRICS:
            found[row["Kernel Name"].partition("(")[0]] += float(row["Metric Value"].replace(",", ""))
    return dict(found)


def main(shape: str) -> None:
    """One forward and backward pass of a BatchNorm with ReLU, fused, on the GPU."""
    import torch

    from vivace.techniques.fused_batchnorm.kernels import batch_norm

    rows, width, residual = SHAPES[shape]
    x, other, gradient = (
        torch.randn(1, width, BATCH * rows, 1, device="cuda").bfloat16().to(memory_format=torch.channels_last)
        for _ in range(3)
    )
    weight, bias = (torch.ones(width, device="cuda", requires_grad=True) for _ in range(2))
    running = (torch.zeros(width, device="cuda"), torch.ones(width, device="cuda"))
    given = other.requires_grad_() if residual else None
    y = batch_norm.fused(
        x.requires_grad_(), given, batch_norm.Norm(weight, bias, *running, 0.1, 1e-5), "relu"
    )
    y.backward(gradient)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
