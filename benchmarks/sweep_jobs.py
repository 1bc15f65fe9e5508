"""Jobs with parameters for `scripts/bench sweep`, small enough that an operator's own cost counts."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

HELD_OUT = 360


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    right = total = 0
    for x, y in batches:
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    return right / total


@functools.cache
def digits(kind: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out digits: flat, as pictures, or as eight tokens of eight numbers; a process reads
    them once, whichever engine runs the trials.
    """
    found = load_digits()
    shape = {"flat": (-1, 64), "pictures": (-1, 1, 8, 8), "tokens": (-1, 8, 8)}[kind]
    x = (torch.tensor(found.data, dtype=torch.float32) / 16).reshape(shape)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[HELD_OUT:], y[HELD_OUT:]), TensorDataset(x[:HELD_OUT], y[:HELD_OUT])


def job_of(model: Any, kind: str, lr: float, momentum: float, epochs: int) -> vivace.Job:
    return vivace.Job(
        model=model,
        data=lambda: DataLoader(digits(kind)[0], batch_size=32, shuffle=True),
        validation=lambda: DataLoader(digits(kind)[1], batch_size=HELD_OUT),
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=momentum),
        metric=accuracy,
        metric_name="accuracy",
        epochs=epochs,
    )


def mlp(lr: float = 0.1, momentum: float = 0.9, width: int = 32, epochs: int = 9) -> vivace.Job:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    return job_of(model, "flat", lr, momentum, epochs)


def cnn(lr: float = 0.1, momentum: float = 0.9, width: int = 8, epochs: int = 9) -> vivace.Job:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * width, 10),
        )

    return job_of(model, "pictures", lr, momentum, epochs)


class Transformer(nn.Module):
    """One layer over the eight rows of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.body = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x) + self.place).mean(1))


def transformer(lr: float = 0.1, momentum: float = 0.9, width: int = 32, epochs: int = 9) -> vivace.Job:
    return job_of(lambda: Transformer(width), "tokens", lr, momentum, epochs)


def example(lr: float = 0.01, name: str = "mlp", implementation: str = "fused") -> vivace.Job:
    """The examples of stacking: a network on numbers without meaning, in batches that stay the same."""
    networks: dict[str, tuple[Any, tuple[int, ...]]] = {
        "mlp_64_32_32_10": (
            lambda: nn.Sequential(
                nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
            ),
            (32, 64),
        ),
        "mlp_784_128": (lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), (64, 784)),
        "mlp_784_256": (
            lambda: nn.Sequential(
                nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
            ),
            (64, 784),
        ),
        **{
            f"cnn_{size}_px": (lambda size=size: _convolutions(size), (32, 1, size, size))
            for size in (8, 16, 28)
        },
    }
    build, shape = networks[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * shape[0], *shape[1:], generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    settings = {implementation: True} if implementation in ("fused", "foreach") else {}
    return vivace.Job(
        model=build,
        data=lambda: DataLoader(TensorDataset(x, y), batch_size=shape[0], shuffle=True),
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, **settings),
        metric=accuracy,
    )


def _convolutions(size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (size // 4) ** 2, 10),
    )
