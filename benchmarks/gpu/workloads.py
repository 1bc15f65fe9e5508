"""The jobs of the GPU tables. Sizes are for a data-centre GPU; with VIVACE_GPU_DRY=1 tiny ones, for a CPU.

Batches are made once and lie in page-locked memory, so that no loader stands before the GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import vivace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import jobs

DRY = os.environ.get("VIVACE_GPU_DRY") == "1"
NUM_BATCHES = 4


class Prepared:
    """The same few batches again and again; a pass over them is an epoch."""

    def __init__(self, make: Callable[[torch.Generator], tuple[Tensor, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        batches = [make(generator) for _ in range(NUM_BATCHES)]
        pin = torch.cuda.is_available()
        self.batches = [tuple(t.pin_memory() if pin else t for t in batch) for batch in batches]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def images(batch: int, size: int, num_classes: int) -> Callable[[], Prepared]:
    """Batches of noise with labels; the speed of training does not depend on the pixels."""

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pixels = torch.randint(256, (batch, 3, size, size), generator=generator, dtype=torch.uint8)
        return (pixels.float() - 127.5) / 74, torch.randint(num_classes, (batch,), generator=generator)

    return lambda: Prepared(make)


def tokens(batch: int, length: int, num_tokens: int) -> Callable[[], Prepared]:
    """Sequences of random tokens, and the token that follows each."""

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(num_tokens, (batch, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return lambda: Prepared(make)


class Bert(nn.Module):
    """BERT-base's encoder (Devlin et al., 2018, arXiv:1810.04805) with a head over its tokens."""

    def __init__(self, length: int, width: int, num_layers: int, num_heads: int, num_tokens: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(num_tokens, width)
        self.position_embedding = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, batch: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) logits."""
        positions = torch.arange(batch.shape[1], device=batch.device)
        hidden = self.token_embedding(batch) + self.position_embedding(positions)
        return self.head(self.encoder(hidden))


def deep_mlp() -> nn.Module:
    """Eight narrow layers: hardly any arithmetic, many launches."""
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def stand_in() -> nn.Module:
    """What a dry run trains in place of a ResNet."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(jobs.convolution_block(3, 8), pooled)


def resnet50() -> nn.Module:
    """torchvision's ResNet-50."""
    return jobs.torchvision.models.resnet50(num_classes=1000)


def resnet50_at(batch: int) -> vivace.Job:
    """ResNet-50 at 224 px."""
    return vivace.Job(
        model=stand_in if DRY else resnet50,
        data=images(4, 8, 10) if DRY else images(batch, 224, 1000),
        loss=jobs.classification_loss,
        optimizer=jobs.sgd(0.01),
    )


def small(dry: int, full: int) -> int:
    """A size, by the kind of run."""
    return dry if DRY else full


resnet50_64 = resnet50_at(64)
resnet50_128 = resnet50_at(128)
resnet50_256 = resnet50_at(256)
resnet50_512 = resnet50_at(512)

resnet18_32px = vivace.Job(
    model=stand_in if DRY else jobs.build_resnet18_for_small_images,
    data=images(small(4, 128), small(8, 32), 10),
    loss=jobs.classification_loss,
    optimizer=jobs.sgd(0.05),
)

gpt = vivace.Job(
    model=lambda: jobs.GPT(length=small(8, 512), width=small(32, 512), num_layers=small(2, 6), num_heads=4),
    data=tokens(small(2, 32), small(8, 512), jobs.NUM_CHARACTERS),
    loss=jobs.next_token_loss,
    optimizer=jobs.adamw(1e-3),
    on_gradients=jobs.clip_gradients,
)

bert = vivace.Job(
    model=lambda: Bert(small(8, 128), small(32, 768), small(2, 12), small(4, 12), small(64, 30_000)),
    data=tokens(small(2, 32), small(8, 128), small(64, 30_000)),
    loss=jobs.next_token_loss,
    optimizer=jobs.adamw(1e-4),
    on_gradients=jobs.clip_gradients,
)

mlp = vivace.Job(
    model=deep_mlp,
    data=lambda: Prepared(
        lambda g: (torch.randn(128, 64, generator=g), torch.randint(10, (128,), generator=g))
    ),
    loss=jobs.classification_loss,
    optimizer=jobs.adam(1e-3),
)


def _masks(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(small(2, 16), 3, small(16, 256), small(16, 256), generator=generator)
    return pixels, (functional.avg_pool2d(pixels, 5, 1, 2)[:, :1] > 0).float()


unet = vivace.Job(
    model=lambda: jobs.UNet((8, 16) if DRY else (64, 128, 256, 512)),
    data=lambda: Prepared(_masks),
    loss=jobs.segmentation_loss,
    optimizer=jobs.adam(1e-3),
)
