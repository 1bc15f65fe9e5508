"""Training jobs of common kinds, real in shape and small enough for two CPU cores."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence

import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vivace

Batch = Sequence[Tensor]  # inputs and targets, as the DataLoader collates them

NUM_CLASSES = 10
NUM_CHARACTERS = 128  # the text is cut down to ASCII: one token is one character


# -----------------------------------------------------------------------------------------------------------
# Data: seeded, the same in every process


def loader(dataset: Dataset[tuple[Tensor, ...]], batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return shuffled full batches in an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True, generator=generator)


def images(num_images: int, size: int, num_channels: int = 3) -> TensorDataset:
    """Return images of class-dependent stripes under noise: synthetic in content, real in shape."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_CLASSES, (num_images,), generator=generator)
    phase = torch.linspace(0.0, 6.0, size)
    stripes = torch.sin((labels + 1)[:, None, None, None] * phase)
    noise = torch.randn(num_images, num_channels, size, size, generator=generator)
    return TensorDataset(stripes + noise, labels)


def masked_images(num_images: int, size: int) -> TensorDataset:
    """Return noisy images of one bright disc each, and the mask of the disc."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.rand(num_images, 2, 1, 1, generator=generator)
    radii = 0.1 + 0.2 * torch.rand(num_images, 1, 1, generator=generator)
    grid = torch.linspace(0.0, 1.0, size)
    distances = torch.hypot(grid[:, None] - centers[:, 0], grid - centers[:, 1])
    masks = (distances < radii).float().unsqueeze(1)
    return TensorDataset(masks + torch.randn(num_images, 3, size, size, generator=generator), masks)


def digits(*, train: bool) -> TensorDataset:
    """Return scikit-learn's handwritten digits at MNIST's 28 x 28 pixels; one in five is held out."""
    pixels, labels = load_digits(return_X_y=True)
    held_out = torch.arange(len(labels)) % 5 == 0
    chosen = ~held_out if train else held_out
    small = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)[chosen] / 16.0
    return TensorDataset(
        functional.interpolate(small, size=(28, 28), mode="bilinear"), torch.tensor(labels)[chosen]
    )


def features(num_rows: int, num_features: int) -> TensorDataset:
    """Return table rows whose class is the largest of ten fixed random projections."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, num_features, generator=generator)
    projections = torch.randn(num_features, NUM_CLASSES, generator=generator)
    return TensorDataset(rows, (rows @ projections).argmax(dim=1))


def text(num_sequences: int, length: int) -> TensorDataset:
    """Return pieces of the Python standard library's source, and the same pieces one character later."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    num_needed = num_sequences * length + 1
    characters = bytearray()
    for path in sorted(folder.glob("*.py")):
        characters += path.read_text(encoding="utf-8").encode("ascii", errors="ignore")
        if len(characters) >= num_needed:
            break
    tokens = torch.tensor(list(characters[:num_needed]))
    return TensorDataset(tokens[:-1].view(-1, length), tokens[1:].view(-1, length))


# -----------------------------------------------------------------------------------------------------------
# Losses and metrics


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of one class per sample."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean binary cross entropy over all pixels."""
    inputs, masks = batch
    return functional.binary_cross_entropy_with_logits(model(inputs), masks)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next character."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of samples whose most probable class is the label."""
    hits = [(model(inputs).argmax(dim=1) == labels).float() for inputs, labels in batches]
    return torch.cat(hits).mean().item()


def clip_gradients(model: nn.Module) -> None:
    """Scale the gradient down to norm one where it is longer."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)


# -----------------------------------------------------------------------------------------------------------
# Models of our own; the others are torchvision's


def convolution_block(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions, each with batch normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015, arXiv:1505.04597) with batch normalisation: one logit per pixel."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.stem = convolution_block(3, widths[0])
        self.down = nn.ModuleList(convolution_block(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(pairs)
        )
        self.merge = nn.ModuleList(convolution_block(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to (batch, 1, height, width)."""
        skips = [self.stem(pixels)]
        for block in self.down:
            skips.append(block(functional.max_pool2d(skips[-1], 2)))
        hidden = skips.pop()
        for grow, block in zip(self.up, self.merge, strict=True):
            hidden = block(torch.cat([skips.pop(), grow(hidden)], dim=1))
        return self.head(hidden)


class TransformerBlock(nn.Module):
    """One pre-norm block of causal self-attention and a four times wider MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """A small GPT-2 (Radford et al., 2019) over characters."""

    def __init__(self, length: int = 128, width: int = 256, num_layers: int = 6, num_heads: int = 4) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.position_embedding = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CHARACTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) character codes to (batch, length, characters) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(hidden)))


class CharacterLSTM(nn.Module):
    """A two-layer LSTM language model over characters."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) character codes to (batch, length, characters) logits."""
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


def build_group_norm_cnn() -> nn.Module:
    """Return a small residual-free network with group normalisation (Wu & He, 2018, arXiv:1803.08494)."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise((1, 16, 32, 64)):
        convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(4, num_outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 3 * 3, NUM_CLASSES))


def build_small_cnn() -> nn.Module:
    """Return the usual MNIST network: two stages of convolutions and a small classifier."""
    return nn.Sequential(
        convolution_block(1, 32),
        nn.MaxPool2d(2),
        convolution_block(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, NUM_CLASSES),
    )


def build_resnet18_for_small_images() -> nn.Module:
    """Return ResNet-18 with the stem usual for 32 x 32 pixels: a 3 x 3 convolution and no pooling."""
    model = torchvision.models.resnet18(num_classes=NUM_CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build_mlp() -> nn.Module:
    """Return three linear layers with ReLU between them."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, NUM_CLASSES)
    )


class ResidualBlock(nn.Module):
    """One pre-activation residual block for table rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return hidden + self.second(functional.relu(self.first(self.norm(hidden))))


def build_table_network() -> nn.Module:
    """Return a residual network for table rows (Gorishniy et al., 2021, arXiv:2106.11959)."""
    blocks = [ResidualBlock(128) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, 128), *blocks, nn.Linear(128, NUM_CLASSES))


# -----------------------------------------------------------------------------------------------------------
# Optimizers


def sgd(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a builder of SGD with the momentum and weight decay usual for image networks."""
    return lambda model: torch.optim.SGD(
        model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-4
    )


def adam(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a builder of Adam."""
    return lambda model: torch.optim.Adam(model.parameters(), lr=learning_rate)


def adamw(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a builder of AdamW with the betas usual for language models."""
    return lambda model: torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


# -----------------------------------------------------------------------------------------------------------
# Jobs

resnet50_128 = vivace.Job(
    model=lambda: torchvision.models.resnet50(num_classes=NUM_CLASSES),
    data=lambda: loader(images(256, size=128), batch_size=16),
    loss=classification_loss,
    optimizer=sgd(0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    epochs=10,
)

resnet18_32 = vivace.Job(
    model=build_resnet18_for_small_images,
    data=lambda: loader(images(1024, size=32), batch_size=32),
    loss=classification_loss,
    optimizer=sgd(0.05),
    epochs=10,
)

unet = vivace.Job(
    model=UNet,
    data=lambda: loader(masked_images(128, size=96), batch_size=8),
    loss=segmentation_loss,
    optimizer=adam(1e-3),
    epochs=10,
)

small_cnn = vivace.Job(
    model=build_small_cnn,
    data=lambda: loader(digits(train=True), batch_size=128),
    loss=classification_loss,
    optimizer=sgd(0.05),
    metric=accuracy,
    validation=lambda: DataLoader(digits(train=False), batch_size=128),
    epochs=20,
)

gpt = vivace.Job(
    model=GPT,
    data=lambda: loader(text(1024, length=128), batch_size=8),
    loss=next_token_loss,
    optimizer=adamw(1e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

mobilenet_v3_small = vivace.Job(
    model=lambda: torchvision.models.mobilenet_v3_small(num_classes=NUM_CLASSES),
    data=lambda: loader(images(512, size=112), batch_size=32),
    loss=classification_loss,
    optimizer=sgd(0.05),
    epochs=10,
)

lstm = vivace.Job(
    model=CharacterLSTM,
    data=lambda: loader(text(2048, length=64), batch_size=32),
    loss=next_token_loss,
    optimizer=adam(2e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

mlp = vivace.Job(
    model=build_mlp,
    data=lambda: loader(features(8192, num_features=784), batch_size=256),
    loss=classification_loss,
    optimizer=adam(1e-3),
    epochs=10,
)


def trained(name: str = "gpt", epochs: int = 1) -> vivace.Job:
    """Return a job of this file with another length: ``jobs.py:trained,name=gpt,epochs=3``."""
    job: vivace.Job = globals()[name]
    return dataclasses.replace(job, epochs=epochs)


# Small jobs, on which every set of techniques can be measured (benchmarks/search.py)

search_cnn = vivace.Job(
    model=build_group_norm_cnn,
    data=lambda: list(loader(digits(train=True), batch_size=32)),
    loss=classification_loss,
    optimizer=sgd(0.05),
    epochs=10,
)

search_gpt = vivace.Job(
    model=lambda: GPT(length=64, width=128, num_layers=3),
    data=lambda: list(loader(text(512, length=64), batch_size=8)),
    loss=next_token_loss,
    optimizer=adamw(1e-3),
    on_gradients=clip_gradients,
    epochs=5,
)

search_table = vivace.Job(
    model=build_table_network,
    data=lambda: list(loader(features(8192, num_features=64), batch_size=1024)),
    loss=classification_loss,
    optimizer=adam(1e-3),
    epochs=10,
)
