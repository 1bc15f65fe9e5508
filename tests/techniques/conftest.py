"""Tiny jobs on which techniques are compared with the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vivace


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


class TinyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.inner(self.norm(x)))


class TinyText(nn.Module):
    """Tied embedding, repeated blocks, an LSTM where wanted, and a floating buffer."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.register_buffer("positions", torch.randn(6, 16))
        self.recurrent = nn.LSTM(16, 16, batch_first=True) if recurrent else None
        self.blocks = nn.ModuleList(TinyBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * 0.3 + self.positions
        if self.recurrent is not None:
            x = self.recurrent(x)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def _class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _text_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())


class Tiny:
    """A model with its loss and batches, opened under plans, each time from the same weights."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        labels = [torch.randint(5, (8,), generator=generator) for _ in range(4)]
        self.loss = _class_loss
        if kind == "cnn":
            self.original: nn.Module = TinyCNN()
            self.batches: list[Any] = [(torch.randn(8, 3, 8, 8, generator=generator), y) for y in labels]
        elif kind == "mlp":
            self.original = tiny_mlp()
            self.batches = [(torch.randn(8, 6, generator=generator), y) for y in labels]
        else:
            self.original = TinyText(recurrent=kind == "lstm")
            self.batches = [torch.randint(11, (8, 6), generator=generator) for _ in range(4)]
            self.loss = _text_loss
        self.make_optimizer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)

    def open(self, plan: dict[str, dict[str, Any]], **more: Any) -> vivace.Session:
        model = copy.deepcopy(self.original)
        optimizer = self.make_optimizer(model.parameters())
        return vivace.attach(
            vivace.Plan.from_dict(plan), model=model, optimizer=optimizer, loss=self.loss, **more
        )

    def train(self, plan: dict[str, dict[str, Any]], **more: Any) -> tuple[list[float], dict[str, Any]]:
        """Losses and final weights after one pass, of a session that was closed."""
        with self.open(plan, **more) as session:
            losses = [float(session.step(batch)) for batch in self.batches]
        assert session.model is not None
        return losses, session.model.state_dict()

    def displacement_error(self, weights: dict[str, Any], reference: dict[str, Any]) -> float:
        """Distance to the reference's weights, in units of how far the reference moved."""
        before = self.original.state_dict()
        assert weights.keys() == reference.keys()
        assert all(weights[key].dtype == reference[key].dtype for key in weights)

        def flat(a: dict[str, Any], b: dict[str, Any]) -> torch.Tensor:
            return torch.cat([(a[key].double() - b[key].double()).flatten() for key in a])

        return float(flat(weights, reference).norm() / flat(reference, before).norm())

    def errors(self, plan: dict[str, dict[str, Any]]) -> tuple[float, float]:
        """How far a plan is from the reference: the largest relative error of a loss, and of the weights."""
        losses, weights = self.train(plan)
        expected, reference = self.train({})
        apart = max(abs(mine / theirs - 1) for mine, theirs in zip(losses, expected, strict=True))
        return apart, self.displacement_error(weights, reference)


@pytest.fixture
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(autouse=True)
def _few_threads(one_thread: None) -> None:
    """Of every test here."""
