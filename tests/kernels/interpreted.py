"""Runs the Triton kernels on random shapes in the interpreter; prints the worst errors against fp64 as JSON.

TRITON_INTERPRET=1 python interpreted.py FIRST_SEED COUNT
"""

import json
import random
import sys

import torch
from torch.nn import functional

from vivace.techniques.fused_batchnorm.kernels import (
    batch_norm,
    batch_norm_backward,
    batch_norm_forward,
    tiles,
)

FUNCTIONS = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}


def image(draw, shape):
    """Values off zero, in one of the memory orders that a job may bring."""
    order = draw.choice(["nhwc", "nchw", "sliced", "expanded"])
    if order == "sliced":
        return torch.randn(shape[0], shape[1], shape[2], 2 * shape[3])[..., ::2] + 1.5, order
    if order == "expanded" and shape[2] > 1:
        return torch.randn(shape[0], shape[1], shape[2], 1).expand(shape) * 1.0 + 0.5, order
    values = 2 * torch.randn(shape) + draw.choice([0.0, 3.0, 100.0])
    return values.contiguous(memory_format=torch.channels_last) if order == "nhwc" else values, order


def run(seed):
    """Errors of one random case, each relative to what it is a part of."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tiles.TILE = draw.choice([512, 4096])
    shape = (draw.choice([1, 1, 2, 3, 5]), draw.randint(1, 40), draw.randint(1, 7), draw.randint(2, 9))
    dtype = draw.choice([torch.float32, torch.float16])
    activation = draw.choice(["relu", "relu", *batch_norm.ACTIVATIONS])
    x, order = image(draw, shape)
    x = x.to(dtype).requires_grad_()
    with_residual = activation in ("none", "relu", "relu6") and draw.random() < 0.6
    residual = torch.randn(shape).to(dtype).requires_grad_() if with_residual else None
    affine = draw.random() < 0.8
    weight, bias = (
        ((torch.randn(shape[1]) + 1).requires_grad_() for _ in range(2)) if affine else (None, None)
    )
    running = (torch.randn(shape[1]), torch.rand(shape[1])) if draw.random() < 0.8 else (None, None)
    momentum = draw.choice([0.1, 1.0, 0.37])
    joined = with_residual and draw.random() < 0.5  # the residual goes through a norm of its own
    affines = [
        weight,
        bias,
        *([t.detach().flip(0).requires_grad_() for t in (weight, bias)] if affine else [None] * 2),
    ]
    runnings = [*running, *(None if t is None else t.flip(0) for t in running)]
    inputs = [t for t in (x, residual, *affines) if t is not None]
    exact = {id(t): t.detach().double().requires_grad_() for t in inputs}
    means = [None if t is None else t.double() for t in runnings]
    more = [None if t is None else exact[id(t)] for t in affines]
    z = functional.batch_norm(exact[id(x)], *means[:2], *more[:2], True, momentum, 1e-5)
    if with_residual:
        added = exact[id(residual)]
        if joined:
            added = functional.batch_norm(added, *means[2:], *more[2:], True, 0.2, 1e-3)
        z = z + added
    wanted = FUNCTIONS[activation](z)
    gradients = [torch.randn(shape).to(dtype) for _ in range(draw.choice([1, 2]))]
    wanted.backward(sum(g.double() for g in gradients))

    norm = batch_norm.Norm(weight, bias, *running, momentum, 1e-5)
    other = batch_norm.Norm(*affines[2:], *runnings[2:], 0.2, 1e-3) if joined else None
    both = batch_norm.fused_twice(x, residual, norm, activation, other)
    torch.autograd.backward(both[: len(gradients)], gradients)
    seen, gradient = both[0], sum(g.double() for g in gradients)
    assert seen.dtype == dtype
    assert seen.is_contiguous(memory_format=torch.channels_last)
    errors = {"output": distance(seen, wanted, wanted)}
    names = ("x", "residual", "weight", "bias", "other weight", "other bias")
    for name, t in zip(names, (x, residual, *affines), strict=True):
        if t is not None and (joined or "other" not in name):
            assert t.grad.dtype == t.dtype
            size = exact[id(t)].grad
            if name == "x" or (joined and name == "residual"):
                # differences of near numbers: their error is that of the parts
                spread = exact[id(t)].detach().var((0, 2, 3), correction=0, keepdim=True).add(1e-5).rsqrt()
                own = more[0 if name == "x" else 2]
                size = gradient * spread * (1 if own is None else own.detach()[None, :, None, None])
            elif "weight" in name or "bias" in name:
                size = torch.full_like(size, float(gradient.norm()))
            errors[f"gradient of {name}"] = distance(t.grad, exact[id(t)].grad, size)
    names = ("mean", "variance", "other mean", "other variance")
    for name, mine, true in zip(names, runnings, means, strict=True):
        if mine is not None and (joined or "other" not in name):
            errors[f"running {name}"] = distance(mine, true, true)
    return {
        "seed": seed,
        "shape": shape,
        "order": order,
        "dtype": str(dtype),
        "activation": activation,
        "gradients": len(gradients),
        "joined": joined,
        "errors": errors,
    }


def distance(seen, wanted, size):
    return float((seen.detach().double() - wanted.detach()).norm() / size.detach().norm().clamp_min(1e-12))


def main(run, **kernels):
    """Print what `run` finds by the seeds that the command line names, with these kernels as operators."""
    library = torch.library.Library("vivace", "IMPL")
    forward = {"batch_norm_moments": batch_norm_forward.moments, "batch_norm_apply": batch_norm_forward.apply}
    for name, kernel in (forward | kernels).items():
        library.impl(name, kernel, "CPU", allow_override=True)
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:])
    print(json.dumps([run(seed) for seed in range(first, first + count)]))


if __name__ == "__main__":
    main(run, batch_norm_backward=batch_norm_backward.backward)
