"""A model of repeated blocks in which everything that memory techniques must respect happens."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import nn

import vivace


class Square(torch.autograd.Function):
    """A custom function that counts its passes and reads its saved tensor twice."""

    passes: ClassVar[dict[str, int]] = {"forward": 0, "backward": 0}

    @staticmethod
    def forward(ctx, x):
        Square.passes["forward"] += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        Square.passes["backward"] += 1
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (first + second)


class Block(nn.Module):
    def __init__(self, width=8, spectral=True):
        super().__init__()
        mix = nn.Conv2d(width, width, 1)
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
        )
        self.mix = nn.utils.parametrizations.spectral_norm(mix) if spectral else mix

    def forward(self, x, *, scale=1.0):
        return x + scale * Square.apply(torch.tanh(self.mix(self.body(x))))


class Net(nn.Module):
    def __init__(self, num_blocks=4, spectral=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Block(spectral=spectral) for _ in range(num_blocks))
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        x = x.mean((2, 3))
        return self.head(self.shared(torch.relu(self.shared(x))))


torch.manual_seed(0)
ORIGINAL = Net()
PLAIN = Net(spectral=False)  # bf16_weights refuses buffers that the forward pass writes
BATCHES = [(torch.randn(8, 3, 12, 12), torch.randint(5, (8,))) for _ in range(3)]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def penalised(model, batch):
    """A loss with the gradient's gradient in it."""
    images = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    return loss(model, batch) + slope.square().mean()


def opened(plan, model=None, *, make=None, loss=loss, **more):
    model = model or copy.deepcopy(ORIGINAL)
    make = make or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3))
    return vivace.attach(
        vivace.Plan.from_dict(plan), model=model, optimizer=make(model.parameters()), loss=loss, **more
    )


def course(plan, model=None, *, see=True, **more):
    """Losses, gradients of the first step, weights and buffers, optimizer state, notes and facts."""
    first = {}

    def keep(model):
        if not first:
            first.update({name: p.grad.clone() for name, p in model.named_parameters()})

    with opened(plan, model, on_gradients=keep if see else None, **more) as session:
        torch.manual_seed(7)
        losses = [session.step(batch) for batch in BATCHES]
        stream = torch.get_rng_state()
    state = session.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items() if isinstance(v, torch.Tensor)}
    found = session.build.notes | session.build.facts.to_dict()
    tensors = {**session.model.state_dict(), **moments, "losses": torch.stack(losses), "stream": stream}
    return {**tensors, **{f"gradient {name}": g for name, g in first.items()}}, found


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
