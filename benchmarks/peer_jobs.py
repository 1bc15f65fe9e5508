"""Twelve training jobs on which Vivace meets its peer: a strict fp32 step takes 0.05-0.4 s on two CPU cores.

Where there is a GPU the same jobs have the sizes that GPUs train: the second of each pair.
"""

from __future__ import annotations

import io
import os
import pathlib
import sysconfig
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
from vivace.recipes.networks import detector as fcos

GPU = torch.cuda.is_available()
NOT_MASKED = -100  # the label that cross_entropy leaves out
MASK = 0  # the character that stands for a masked one, and behind a sequence's end for none
MOST_BOXES = 4  # of an image
NUM_COUNTS, NUM_CATEGORIES, NUM_ROWS = 13, 26, 10_000  # of the recommender: columns, columns, rows of a table


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

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map (batch, length) character codes to (batch, length, characters) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.layers(self.dropout(self.norm(hidden)), src_key_padding_mask=padding))


def sentences(num_sequences: int, length: int) -> TensorDataset:
    """Pieces of ten modules of Python's library, from a quarter of `length` to all of it long and padded by
    zeros, and which module each is from.
    """
    generator = torch.Generator().manual_seed(0)
    paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    chosen = sorted(paths, key=lambda path: path.stat().st_size)[-NUM_CLASSES:]
    sources = [path.read_bytes().decode("ascii", errors="ignore").encode() for path in chosen]
    labels = torch.randint(NUM_CLASSES, (num_sequences,), generator=generator)
    lengths = torch.randint(length // 4, length + 1, (num_sequences,), generator=generator)
    starts = torch.rand(num_sequences, generator=generator)
    tokens = torch.zeros(num_sequences, length, dtype=torch.long)
    for row, label, size, start in zip(tokens, labels, lengths.tolist(), starts.tolist(), strict=True):
        source = sources[label]
        begin = int(start * (len(source) - length))
        row[:size] = torch.tensor(list(source[begin : begin + size]))
    return TensorDataset(tokens, labels)


class Classifier(nn.Module):
    """The encoder, which does not look at padding, with a class for each sequence as BERT is fine-tuned."""

    def __init__(self, length: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.encoder = Encoder(length, width, num_layers, num_heads)
        self.encoder.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))
        self.classes = nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) character codes to (batch, classes) logits."""
        return self.classes(self.encoder(tokens, padding=tokens == MASK)[:, 0])


def boxed_images(num_images: int, size: int) -> TensorDataset:
    """Noise with up to four striped boxes, each box's stripes by its class; and (boxes, 5) of each image:
    left, top, right, bottom in pixels, and the class, -1 for no box.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(num_images, 3, size, size, generator=generator)
    sides = torch.randint(size // 6, size // 2, (num_images, MOST_BOXES, 2), generator=generator)
    corners = (torch.rand(sides.shape, generator=generator) * (size - sides)).long()
    labels = torch.randint(-1, NUM_CLASSES, (num_images, MOST_BOXES), generator=generator)
    stripes = torch.sin(torch.linspace(0.0, 25.0, size) * torch.arange(1, NUM_CLASSES + 1)[:, None])
    for image, number in zip(*torch.where(labels >= 0), strict=True):
        (left, top), (width, height) = corners[image, number].tolist(), sides[image, number].tolist()
        pixels[image, :, top : top + height, left : left + width] += stripes[labels[image, number], :width]
    return TensorDataset(pixels, torch.cat([corners, corners + sides, labels.unsqueeze(-1)], dim=-1))


def boxes_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of FCOS: focal for the classes, generalized IoU for the boxes."""
    pixels, targets = batch
    return fcos.loss(model, (pixels, targets[..., :4].float(), targets[..., 4]))


def clicks(num_rows: int) -> TensorDataset:
    """Rows of counts and of categories, most of them seldom, and whether somebody clicked: drawn, in Criteo's
    shape.
    """
    generator = torch.Generator().manual_seed(0)
    counts = torch.empty(num_rows, NUM_COUNTS).exponential_(0.05, generator=generator).long()
    categories = (torch.rand(num_rows, NUM_CATEGORIES, generator=generator) ** 3 * NUM_ROWS).long()
    weights = torch.randn(NUM_CATEGORIES, NUM_ROWS, generator=generator)
    drawn = weights.gather(1, categories.t()).sum(0) / NUM_CATEGORIES**0.5
    labels = torch.sigmoid(drawn) > torch.rand(num_rows, generator=generator)
    return TensorDataset(torch.cat([counts, categories], dim=1), labels.float())


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019, arXiv:1906.00091): counts by an MLP, categories by tables, and the products
    of all pairs of them into another MLP.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(NUM_ROWS, width) for _ in range(NUM_CATEGORIES))
        self.bottom = nn.Sequential(
            nn.Linear(NUM_COUNTS, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, width),
            nn.ReLU(),
        )
        num_pairs = NUM_CATEGORIES * (NUM_CATEGORIES + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width + num_pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        first, second = torch.tril_indices(NUM_CATEGORIES + 1, NUM_CATEGORIES + 1, offset=-1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Map (batch, columns) integers to (batch,) logits."""
        counts, categories = rows.split((NUM_COUNTS, NUM_CATEGORIES), dim=1)
        dense = self.bottom(torch.log1p(counts.float()))
        looked_up = [table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        features = torch.stack([dense, *looked_up], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean binary cross entropy of a click."""
    rows, labels = batch
    return functional.binary_cross_entropy_with_logits(model(rows), labels)


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

bert_padded = vivace.Job(
    model=lambda: Classifier(
        sized(128, 512), sized(256, 768), num_layers=sized(6, 12), num_heads=sized(4, 12)
    ),
    data=lambda: loader(sentences(1024, length=sized(128, 512)), batch_size=sized(8, 16)),
    loss=classification_loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-5),
    on_gradients=clip_gradients,
    epochs=3,
)

lstm = vivace.Job(
    model=lambda: CharacterLSTM(width=sized(512, 1024)),
    data=lambda: loader(text(2048, length=sized(64, 128)), batch_size=sized(16, 128)),
    loss=next_token_loss,
    optimizer=adam(2e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

detector = vivace.Job(
    model=lambda: fcos.Detector(NUM_CLASSES, width=sized(32, 64), depth=sized(1, 2)),
    data=lambda: loader(boxed_images(256, size=sized(96, 320)), batch_size=sized(16, 32)),
    loss=boxes_loss,
    optimizer=adamw(2e-3),
    on_gradients=clip_gradients,
    epochs=10,
)

recommender = vivace.Job(
    model=Recommender,
    data=lambda: loader(clicks(sized(65_536, 524_288)), batch_size=sized(1024, 8192)),
    loss=click_loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    epochs=3,
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
