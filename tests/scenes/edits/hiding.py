"""A training whose masks an operator draws inside of itself, others in 16 bits; the same under autocast."""

import dataclasses

import torch
from torch import nn

from vivace.testing import jobs


@torch.library.custom_op("drawing::left_out", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def left_out(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of x, doubled, and which; in 16 bits the other half of the same draw, as a GPU's kernels may."""
    drawn = torch.rand(x.shape) < 0.5
    mask = (drawn if x.dtype == torch.float32 else ~drawn).to(x.dtype) * 2
    return x * mask, mask


left_out.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class LeftOut(nn.Module):
    def forward(self, x):
        return left_out(x)[0] if self.training else x


def job():
    return dataclasses.replace(
        jobs.mlp(),
        model=lambda: nn.Sequential(nn.Linear(8, 32), LeftOut(), nn.ReLU(), nn.Linear(32, 4)),
    )


@torch.library.custom_op("drawing::attend", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def attend(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention on a GPU, whose operators name the share that they leave out."""
    if not dropout_p:
        return x.clone(), torch.ones_like(x)
    kept, mask = left_out(x)
    return kept, mask


attend.register_autograd(
    lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Attending(nn.Module):
    def forward(self, x):
        return attend(x, 0.5)[0] if self.training else x


def attending():
    return dataclasses.replace(
        jobs.mlp(),
        model=lambda: nn.Sequential(nn.Linear(8, 32), Attending(), nn.ReLU(), nn.Linear(32, 4)),
    )


def in_half():
    plain = job()

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return plain.loss(model, batch)

    return dataclasses.replace(plain, loss=loss)
