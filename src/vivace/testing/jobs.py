"""Tiny training jobs of every kind that Vivace must handle, a few milliseconds a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from vivace.job import Job

SAMPLES = 64
BATCH = 16
CLASSES = 4


def mlp() -> Job:
    """A multilayer perceptron with Adam."""
    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        data=lambda: _labelled(8),
        loss=_cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def cnn() -> Job:
    """A convolutional network with BatchNorm, and SGD with momentum and weight decay."""
    return Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        ),
        data=lambda: _labelled(3, 8, 8),
        loss=_cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
    )


def transformer() -> Job:
    """A transformer encoder with dropout and AdamW, its gradients clipped."""
    return Job(
        model=lambda: nn.Sequential(
            nn.Embedding(16, 16),
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
            nn.Linear(16, 16),
        ),
        data=lambda: DataLoader(_tokens(), batch_size=BATCH, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        on_gradients=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )


def lstm() -> Job:
    """A recurrent network on short sequences."""
    return Job(
        model=_Recurrent,
        data=lambda: _labelled(6, 4),
        loss=_cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def dictionaries() -> Job:
    """Batches that are dictionaries, of tensors and of text; a regression."""
    return Job(
        model=lambda: nn.Linear(8, 1),
        data=lambda: DataLoader(_samples(), batch_size=BATCH, shuffle=True),
        loss=lambda model, batch: functional.mse_loss(model(batch["features"]), batch["target"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


def gan() -> Job:
    """Two networks and two optimizers in the person's own step function."""
    return Job(
        model=lambda: {
            "generator": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)),
            "discriminator": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        },
        data=lambda: _labelled(8),
        optimizer=lambda models: {
            name: torch.optim.Adam(m.parameters(), lr=1e-3) for name, m in models.items()
        },
        step=_gan_step,
    )


TINY_JOBS: dict[str, Callable[[], Job]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "lstm": lstm,
    "dictionaries": dictionaries,
    "gan": gan,
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(sequences)
        scores: torch.Tensor = self.head(states[:, -1])
        return scores


def _gan_step(
    models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer], batch: Sequence[torch.Tensor]
) -> torch.Tensor:
    real = batch[0]
    fake = models["generator"](torch.randn(len(real), 4, device=real.device))
    judged = models["discriminator"](torch.cat([real, fake.detach()]))
    truth = torch.cat([torch.ones_like(judged[: len(real)]), torch.zeros_like(judged[len(real) :])])
    discriminator_loss = functional.binary_cross_entropy_with_logits(judged, truth)
    torch.autograd.backward(discriminator_loss)
    optimizers["discriminator"].step()
    generator_loss = functional.softplus(-models["discriminator"](fake)).mean()
    optimizers["discriminator"].zero_grad()
    torch.autograd.backward(generator_loss)
    optimizers["generator"].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    return (discriminator_loss + generator_loss).detach()


def _cross_entropy(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _labelled(*shape: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *shape, generator=numbers)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=numbers)
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH, shuffle=True)


def _tokens() -> Any:
    return torch.randint(16, (SAMPLES, 9), generator=torch.Generator().manual_seed(0))


def _samples() -> Any:
    features = 0.1 * torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return [
        {"features": row, "target": row.sum(0, keepdim=True), "name": f"sample {i}"}
        for i, row in enumerate(features)
    ]
