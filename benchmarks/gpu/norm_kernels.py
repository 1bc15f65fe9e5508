"""The kernels of `fused_batchnorm` on the device, in a child process: right, and how fast is each?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from norm_shapes import ALLOWED, BATCH, FEW_CASES, NUM_CASES, ROUNDS, SHAPES
from torch.nn import functional
from traffic import norm_bytes

from vivace.inspection import inspect
from vivace.job import Job
from vivace.session.opening import training_device
from vivace.techniques.fused_batchnorm.kernels import batch_norm


class NormKernels:
    """Serves `vivace.processes.launch.Child`."""

    def __init__(self, job: Job, dry: bool) -> None:
        self.dry, self.device = dry, training_device(inspect())

    def check(self, dtype: str, few: bool) -> dict[str, Any]:
        """Worst relative errors against fp64 on random shapes, both ways, some with two gradients or a
        residual that goes through a norm too; equal bits when repeated.
        """
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # products take TF32 where convolutions may
        worst: dict[str, float] = {}
        for seed in range(3 if self.dry else FEW_CASES if few else NUM_CASES):
            for name, error in self._case(seed, getattr(torch, dtype)).items():
                assert error < ALLOWED[dtype], (dtype, seed, name, error)
                worst[name] = max(worst.get(name, 0.0), error)
        return {"worst": worst, "allowed": ALLOWED[dtype]}

    def ablate(self, shape: str) -> dict[str, Any]:
        """Seconds and bytes/s of each kernel at one shape, and PyTorch's seconds for the same."""
        rows, width, residual = SHAPES[shape]
        rows, width = (8, 16) if self.dry else (BATCH * rows, width)
        mine = self._profiled(rows, width, residual, fused=True)
        theirs = self._profiled(rows, width, residual, fused=False)
        wanted = norm_bytes(rows, width, 2, residual=residual)
        found = {
            name: {"seconds": seconds, "bytes_per_second": wanted[name] / seconds if name in wanted else 0.0}
            for name, seconds in mine.items()
        }
        return {"kernels": found, "seconds": sum(mine.values()), "pytorch_seconds": sum(theirs.values())}

    def _case(self, seed: int, dtype: torch.dtype) -> dict[str, float]:
        draw = torch.Generator().manual_seed(seed)

        def whole(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=draw))

        large = 8 if self.dry else 200
        shape = (whole(1, 9), whole(1, large), whole(1, 24), whole(2, 24))
        activation = batch_norm.ACTIVATIONS[seed % 5]
        residual = activation in ("none", "relu", "relu6") and bool(seed % 2)
        joined = residual and seed % 3 == 0  # through a norm of the same weight and bias
        copies = 1 + seed % 4 // 2
        x, other, gradient = (
            torch.randn(shape, generator=draw).to(self.device, dtype) * 2 + shift for shift in (1.0, 0.0, 0.0)
        )
        weight, bias = (torch.randn(shape[1], generator=draw).to(self.device) + 1 for _ in range(2))
        inputs = [t.requires_grad_() for t in (x, other, weight, bias)]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        running = [torch.zeros(shape[1], device=self.device), torch.ones(shape[1], device=self.device)]
        true = [t.double() for t in running]
        z = functional.batch_norm(exact[0], *true, *exact[2:], True, 0.1, 1e-5)
        norm = (
            functional.batch_norm(exact[1], None, None, *exact[2:], True, 0.1, 1e-5) if joined else exact[1]
        )
        wanted = batch_norm.apply_activation(z + norm if residual else z, activation)
        total = copies * gradient.double()
        wanted.backward(total)
        results = []
        for _ in range(2):
            means = [t.clone() for t in running]
            own = batch_norm.Norm(weight, bias, *means, 0.1, 1e-5)
            second = batch_norm.Norm(weight, bias, None, None, 0.1, 1e-5) if joined else None
            seen = batch_norm.fused_twice(x, other if residual else None, own, activation, second)
            used = inputs if residual else [x, weight, bias]
            gradients = torch.autograd.grad(seen[:copies], used, [gradient] * copies)
            results.append([seen[0], *means, *gradients])
        assert all(map(torch.equal, *results)), (seed, "not repeatable")
        errors = {"output": distance(results[0][0], wanted, wanted)}
        errors |= {"running mean": distance(results[0][1], true[0], true[0])}
        errors |= {"running variance": distance(results[0][2], true[1], true[1])}
        places = (0, 1, 2, 3) if residual else (0, 2, 3)
        spread = exact[0].detach().var((0, 2, 3), correction=0, keepdim=True).add(1e-5).rsqrt()
        parts = total * spread * exact[2].detach()[None, :, None, None]
        for place, found in zip(places, results[0][3:], strict=True):
            true_gradient = exact[place].grad
            assert true_gradient is not None
            size = parts if place == 0 else total
            errors[f"gradient {place}"] = distance(found, true_gradient, size)
        return errors

    def _profiled(self, rows: int, width: int, residual: bool, *, fused: bool) -> dict[str, float]:
        """Seconds of each kernel of one forward and backward pass, by name; see `profiled`."""
        shape = (1, width, rows, 1)
        x, other, gradient = (
            torch.randn(shape, device=self.device).bfloat16().to(memory_format=torch.channels_last)
            for _ in range(3)
        )
        weight, bias = (torch.ones(width, device=self.device, requires_grad=True) for _ in range(2))
        running = (torch.zeros(width, device=self.device), torch.ones(width, device=self.device))
        x.requires_grad_()
        other.requires_grad_()

        def step() -> None:
            if fused:
                norm = batch_norm.Norm(weight, bias, *running, 0.1, 1e-5)
                y = batch_norm.fused(x, other if residual else None, norm, "relu")
            else:
                z = functional.batch_norm(x, *running, weight, bias, True, 0.1, 1e-5)
                y = functional.relu_(z.add_(other) if residual else z)
            torch.autograd.grad(y, [x, weight, bias, *([other] if residual else [])], gradient)

        return profiled(step)


def profiled(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of each kernel of `step`, by name; of the whole where the machine shows no kernels."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            step()
        torch.cuda.synchronize()
    whole = (time.perf_counter() - begin) / ROUNDS
    events = [e for e in profiler.events() if "CUDA" in str(e.device_type) and e.device_time > 0]
    names = sorted({e.name for e in events})
    total = {n: sum(e.device_time for e in events if e.name == n) * 1e-6 / ROUNDS for n in names}
    return dict(itertools.islice(sorted(total.items(), key=lambda item: -item[1]), 12)) or {"whole": whole}


def distance(seen: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> float:
    return float((seen.detach().double() - wanted.detach()).norm() / size.detach().norm().clamp_min(1e-12))
