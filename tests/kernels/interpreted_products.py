"""Runs 1x1 convolutions with statistics, and the BatchNorm behind them, on random shapes in the interpreter.

TRITON_INTERPRET=1 python interpreted_products.py FIRST_SEED COUNT prints the errors against fp64 as JSON.
"""

import random

import torch
from interpreted import FUNCTIONS, distance, image, main
from torch.nn import functional

from vivace.techniques.fused_batchnorm.kernels import (
    batch_norm,
    product,
    product_forward,
    splits,
)


def run(seed):
    """Errors of one random case, each relative to what it is a part of."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    splits.TILE, splits.MOST_COLUMNS = draw.choice([256, 512]), draw.choice([16, 32])
    splits.PROGRAMS, product_forward.DEPTH_BYTES = draw.choice([1, 4, 1024]), draw.choice([64, 128])
    inner, width = 8 * draw.randint(1, 9), 8 * draw.randint(1, 6)
    shape = (draw.choice([1, 2, 3]), inner, draw.randint(1, 7), draw.randint(2, 9))
    dtype = draw.choice([torch.float32, torch.float16])
    x, order = image(draw, shape)
    x = x.to(dtype).requires_grad_()
    weight = (torch.randn(width, inner, 1, 1) / inner).to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = functional.conv2d(*exact)
    y, statistics = product.product(x, weight)
    assert (y.dtype, statistics.dtype, statistics.requires_grad) == (dtype, torch.float32, False)
    assert y.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(y.shape).to(dtype)
    y.backward(gradient)
    wanted.backward(gradient.double())
    size = functional.conv2d(exact[0].detach().abs(), exact[1].detach().abs())
    errors = {"product": distance(y, wanted, size)}
    for name, t, true in zip(("x", "weight"), (x, weight), exact, strict=True):
        errors[f"gradient of {name}"] = distance(t.grad, true.grad, true.grad)

    num_rows, activation = y.numel() // width, draw.choice(["relu", "relu6", "silu", "none"])
    residual = torch.randn(y.shape).to(dtype) if activation != "silu" and draw.random() < 0.5 else None
    affine = [torch.randn(width) + 1, torch.randn(width)]
    running, means = (
        [torch.zeros(width, dtype=t), torch.ones(width, dtype=t)] for t in (None, torch.float64)
    )
    spared = (statistics, splits.split_rows(num_rows, width))
    seen = batch_norm.fused(
        y.detach(), residual, batch_norm.Norm(*affine, *running, 0.3, 1e-5, spared), activation
    )
    z = functional.batch_norm(y.detach().double(), *means, *(t.double() for t in affine), True, 0.3, 1e-5)
    true = FUNCTIONS[activation](z if residual is None else z + residual.double())
    errors["output"] = distance(seen, true, z)
    spread = y.detach().double().square().mean((0, 2, 3)).sqrt()
    errors["running mean"] = distance(running[0], means[0], spread)
    errors["running variance"] = distance(running[1], means[1], means[1])
    facts = {"seed": seed, "shape": shape, "width": width, "order": order, "dtype": str(dtype)}
    return {**facts, "splits": statistics.shape[1], "errors": errors}


if __name__ == "__main__":
    main(run, statistics_mm=product_forward.forward)
