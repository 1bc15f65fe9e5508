"""Nine training jobs on which Vivace meets its peer: a strict fp32 step takes 0.05-0.4 s on two CPU cores.

Where there is a GPU the same jobs have the sizes that GPUs train: the second of each pair.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable

import torch
import torchvision
from jobs import (
    GPT,
    NUM_CHARACTERS,
    NUM_CLASSES,
    Batch,
    CharacterLSTM,
    adam,
    adamw,
    build_resnet18_for_small_images,
    build_small_cnn,
    classification_loss,
    clip_gradients,
    images,
    next_token_loss,
    sgd,
    text,
)
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vivace

GPU = torch.cuda.is_available()
NOT_MASKED = -100  # the label that cross_entropy leaves out
MASK = 0  # the character that stands for a masked one


def sized(cpu: int, gpu: int) -> int:
    """The size for the device that the jobs train on."""
    return gpu if GPU else cpu


def loader(dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled full batches; on a GPU from pinned memory and workers, as a person would load them there."""
    workers = min(8, (os.cpu_count() or 1) // 2) if GPU else 0
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(1),
        num_workers=workers,
        pin_memory=GPU,
        persistent_workers=workers > 0,
    )


def masked_text(num_sequences: int, length: int) -> TensorDataset:
    """Pieces of text in which 15 % of the characters are masked, and the characters below the masks."""
    (tokens, _) = text(num_sequences, length).tensors
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    return TensorDataset(tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, NOT_MASKED))


def masked_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross entropy of the masked characters."""
    tokens, labels = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=NOT_MASKED)


class Encoder(nn.Module):
    """A BERT encoder (Devlin et al., 2018, arXiv:1810.04805) over characters, with its dropout of 10 %."""

    def __init__(self, length: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.position_embedding = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) character codes to (batch, length, characters) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.layers(self.dropout(self.norm(hidden))))


class Photographs(Dataset[tuple[Tensor, Tensor]]):
    """JPEG files in memory; each is decoded, cropped, mirrored and normalised whenever it is read."""

    def __init__(self, num_images: int, size: int, crop: int) -> None:
        self.crop = crop
        pixels, self.labels = images(num_images, size).tensors
        rows = ((pixels / 8 + 0.5).clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
        self.files = []
        for row in rows:
            file = io.BytesIO()
            Image.fromarray(row).save(file, "jpeg", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        left, top, side = torch.rand(3).tolist()
        edge = picture.width * (0.6 + 0.4 * side)
        left, top = left * (picture.width - edge), top * (picture.height - edge)
        box = (left, top, left + edge, top + edge)
        picture = picture.resize((self.crop, self.crop), Image.Resampling.BILINEAR, box=box)
        pixels = torchvision.transforms.functional.to_tensor(picture)
        if torch.rand(1) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - 0.5) / 0.25, self.labels[index]


def build_vit_small() -> nn.Module:
    """ViT-S (Dosovitskiy et al., 2020; Touvron et al., 2020): 12 layers, 6 heads, 384 wide."""
    return torchvision.models.VisionTransformer(
        image_size=sized(48, 224),
        patch_size=sized(8, 16),
        num_layers=12,
        num_heads=6,
        hidden_dim=384,
        mlp_dim=1536,
        num_classes=NUM_CLASSES,
    )


def build_color_cnn() -> nn.Module:
    """The small network of `jobs.py` for 56 x 56 pixels in color."""
    model = build_small_cnn()
    model[0][0] = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
    return model


def image_job(
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    size: int,
    batch_size: int,
    num_images: int = 512,
) -> vivace.Job:
    """Classification of square images, `size` pixels wide."""
    return vivace.Job(
        model=model,
        data=lambda: loader(images(num_images, size=size), batch_size=batch_size),
        loss=classification_loss,
        optimizer=optimizer,
        epochs=10,
    )


resnet18 = image_job(
    build_resnet18_for_small_images, sgd(0.01), size=32, batch_size=sized(16, 128), num_images=1024
)

resnet50 = image_job(
    lambda: torchvision.models.resnet50(num_classes=NUM_CLASSES),
    sgd(0.005),
    size=sized(64, 224),
    batch_size=sized(16, 64),
)

mobilenet_v3_small = image_job(
    lambda: torchvision.models.mobilenet_v3_small(num_classes=NUM_CLASSES),
    sgd(0.05),
    size=sized(112, 224),
    batch_size=sized(32, 256),
)

convnext_tiny = image_job(
    lambda: torchvision.models.convnext_tiny(num_classes=NUM_CLASSES),
    adamw(1e-4),
    size=sized(64, 224),
    batch_size=sized(8, 64),
)

vit_small = image_job(
    build_vit_small,
    lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    size=sized(48, 224),
    batch_size=sized(8, 128),
)

gpt = vivace.Job(
    model=lambda: GPT(length=sized(128, 512), width=sized(256, 768), num_heads=sized(4, 12)),
    data=lambda: loader(text(1024, length=sized(128, 512)), batch_size=sized(8, 32)),
    loss=next_token_loss,
    optimizer=adamw(1e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

bert = vivace.Job(
    model=lambda: Encoder(sized(128, 512), sized(256, 768), num_layers=sized(6, 12), num_heads=sized(4, 12)),
    data=lambda: loader(masked_text(1024, length=sized(128, 512)), batch_size=sized(8, 16)),
    loss=masked_token_loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-4),
    epochs=5,
)

lstm = vivace.Job(
    model=lambda: CharacterLSTM(width=sized(512, 1024)),
    data=lambda: loader(text(2048, length=sized(64, 128)), batch_size=sized(16, 128)),
    loss=next_token_loss,
    optimizer=adam(2e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

# The loader is as DataLoader makes it: no workers. What it decodes takes longer than the step.
loader_bound = vivace.Job(
    model=build_color_cnn,
    data=lambda: DataLoader(
        Photographs(sized(512, 4096), size=256, crop=56),
        batch_size=sized(64, 256),
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(1),
    ),
    loss=classification_loss,
    optimizer=sgd(0.05),
    epochs=10,
)
