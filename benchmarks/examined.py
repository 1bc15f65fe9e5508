"""Small jobs with what goes wrong in practice, each in three seeds, and two whole architectures: what the
ruler is examined on.

Between them they have BatchNorm, dropout, stochastic depth, clipping, weight decay, schedulers by the step
and by the epoch, momentum, tied weights, padding, label smoothing, and a last batch with fewer samples.
Importing this file registers the planted defects too, so that child processes know them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import defects  # noqa: F401 - registers the planted defects
import further_defects  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

import vivace

SEEDS = (0, 1, 2)
NUM_CLASSES = 8
NUM_TOKENS = 24
NUM_USERS, NUM_THINGS = 200, 150
PADDING = 0

torch.set_num_threads(1)


def numbers(seed: int) -> torch.Generator:
    """A generator of its own, so that data do not depend on who drew before."""
    return torch.Generator().manual_seed(1000 + seed)


def images(seed: int, count: int = 400, size: int = 12) -> TensorDataset:
    """Noisy stripes whose number is the class."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=numbers(seed))
    stripes = torch.sin((labels + 1)[:, None, None, None] * torch.linspace(0.0, 3.0, size))
    return TensorDataset(stripes + torch.randn(count, 3, size, size, generator=numbers(seed + 10)), labels)


def rows(seed: int, count: int = 500, num_features: int = 20) -> TensorDataset:
    """Table rows whose class is the largest of fixed random projections."""
    features = torch.randn(count, num_features, generator=numbers(seed))
    projections = torch.randn(num_features, NUM_CLASSES, generator=numbers(seed + 10))
    return TensorDataset(features, (features @ projections).argmax(1))


def sentences(seed: int, count: int = 300, length: int = 13) -> TensorDataset:
    """Tokens in which each follows from the one before, in sentences of many lengths, padded with zeros."""
    start = torch.randint(1, NUM_TOKENS, (count, 1), generator=numbers(seed))
    stride = torch.randint(1, 4, (count, 1), generator=numbers(seed + 10))
    tokens = 1 + (start + stride * torch.arange(length)) % (NUM_TOKENS - 1)
    lengths = torch.randint(length // 2, length + 1, (count, 1), generator=numbers(seed + 20))
    return TensorDataset(tokens.masked_fill(torch.arange(length) >= lengths, PADDING))


def ratings(seed: int, count: int = 800) -> TensorDataset:
    """Pairs of a user and a thing, and how the one rates the other by hidden tastes."""
    pairs = torch.stack(
        [torch.randint(n, (count,), generator=numbers(seed + n)) for n in (NUM_USERS, NUM_THINGS)], 1
    )
    tastes, kinds = (torch.randn(n, 4, generator=numbers(seed + n)) for n in (NUM_USERS, NUM_THINGS))
    return TensorDataset(pairs, (tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1))


def loader(dataset: TensorDataset, size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches, the last one shorter."""
    return DataLoader(dataset, batch_size=size, shuffle=True)


def classification(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean cross entropy of one class per sample."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def smoothed(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean cross entropy with smoothed labels."""
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def reconstruction(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean squared error of what comes out against what went in."""
    return functional.mse_loss(model(batch[0]), batch[0])


def next_token(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean cross entropy of the next token of each position."""
    tokens = batch[0]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def clip(model: nn.Module) -> None:
    """Scale the gradient down to the norm that the model names."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), float(model.clipped_to))  # type: ignore[arg-type]


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a skip connection, left out at random in training."""

    def __init__(self, width: int, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, width, height, width) to the same shape."""
        branch = self.second_norm(self.second(functional.relu(self.first_norm(self.first(hidden)))))
        if self.training and self.drop_rate:
            kept = torch.rand(len(hidden), 1, 1, 1, device=hidden.device) >= self.drop_rate
            branch = branch * kept / (1 - self.drop_rate)
        return functional.relu(hidden + branch)


class Encoder(nn.Module):
    """A causal transformer over padded tokens; the head shares the embedding's weights."""

    clipped_to = 0.5

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.position = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        later = places[None, :] > places[:, None]
        hidden = self.embedding(tokens) + self.position(places)
        hidden = self.layers(hidden, mask=later, src_key_padding_mask=tokens == PADDING)
        return self.head(self.norm(hidden))


class Recurrent(nn.Module):
    """A two-layer LSTM language model over padded tokens."""

    clipped_to = 0.25

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) logits."""
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


def build_cnn() -> nn.Module:
    """Three convolutions with BatchNorm, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, NUM_CLASSES)),
    )


def build_residual() -> nn.Module:
    """A small residual network with stochastic depth."""
    blocks = [Block(16, 0.1), nn.MaxPool2d(2), Block(16, 0.2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, NUM_CLASSES))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), *blocks, *head)


def build_mlp() -> nn.Module:
    """Three linear layers."""
    hidden = (nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(64, NUM_CLASSES))


def build_autoencoder() -> nn.Module:
    """A narrow middle between two linear layers with LayerNorm and dropout."""
    encoder = (nn.Linear(20, 48), nn.LayerNorm(48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 6))
    return nn.Sequential(*encoder, nn.GELU(), nn.Linear(6, 48), nn.GELU(), nn.Linear(48, 20))


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises over ten steps and then falls slowly."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 0.999**step))


class Digits(nn.Module):
    """The network of PyTorch's MNIST example, narrower: dropout on feature maps, and log_softmax inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.maps, self.rows = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden, self.scores = nn.Linear(256, 32), nn.Linear(32, NUM_CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map (batch, 3, 12, 12) to the logarithms of probabilities."""
        maps = functional.max_pool2d(functional.relu(self.second(functional.relu(self.first(pictures)))), 2)
        hidden = functional.relu(self.hidden(torch.flatten(self.maps(maps), 1)))
        return functional.log_softmax(self.scores(self.rows(hidden)), dim=1)


class Variational(nn.Module):
    """A variational autoencoder whose code is a feature map, with noise drawn like it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.code = nn.Conv2d(16, 8, 3, padding=1)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pictures again, and mean and logarithm of the variance of their code."""
        mean, log_variance = self.code(functional.relu(self.encoder(pictures))).chunk(2, 1)
        deviation = torch.exp(0.5 * log_variance)
        return self.decoder(mean + deviation * torch.randn_like(deviation)), mean, log_variance


class Masked(nn.Module):
    """BERT's encoder over padded tokens, its attention without dropout and with a mask of one of three kinds:
    additive, boolean, or the key padding mask of `nn.MultiheadAttention`, a layer each."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding, self.position = nn.Embedding(NUM_TOKENS, width), nn.Embedding(16, width)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Dropout(0.1), nn.Linear(2 * width, width)) for _ in range(3)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) logits."""
        there = (tokens != PADDING)[:, None, None, :]
        added = torch.zeros(there.shape, device=tokens.device)
        added = added.masked_fill(~there, torch.finfo(torch.float32).min)
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for number in range(2):
            heads = (
                self.projections[number](hidden).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            )
            mask = there if number else added.to(heads.dtype)
            attended = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
            hidden = hidden + attended.transpose(1, 2).flatten(2)
            hidden = hidden + self.feeds[number](hidden)
        attended, _ = self.attention(hidden, hidden, hidden, ~there[:, 0, 0], need_weights=False)
        hidden = hidden + attended
        return self.head(self.norm(hidden + self.feeds[2](hidden)))


class Recommender(nn.Module):
    """A factorisation machine of two kinds (Rendle, 2010): no matrix product, all elementwise."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(NUM_USERS, width), nn.Embedding(NUM_THINGS, width)
        self.of_user, self.of_thing = nn.Embedding(NUM_USERS, 1), nn.Embedding(NUM_THINGS, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map (batch, 2) numbers of a user and a thing to (batch,) ratings."""
        user, thing = pairs.unbind(1)
        return (self.users(user) * self.things(thing)).sum(1) + (
            self.of_user(user) + self.of_thing(thing)
        ).squeeze(1)


class Long(nn.Module):
    """Forty narrow layers, one after the other, each beside a skip connection."""

    def __init__(self, width: int = 24, depth: int = 40) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, NUM_CLASSES)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, features: Tensor) -> Tensor:
        """Map (batch, 20) features to (batch, classes) logits."""
        hidden = self.first(features)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + functional.gelu(layer(norm(hidden)))
        return self.last(hidden)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """One cycle of learning rate and momentum over the whole training."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10 * 13)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that falls as a cosine over ten epochs."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def seeded(build: Callable[[], nn.Module], seed: int, **facts: float) -> Callable[[], nn.Module]:
    """Build with other initial weights; `facts` stand on the model for the planted defects to read."""

    def model() -> nn.Module:
        torch.manual_seed(seed)
        built = build()
        for name, value in facts.items():
            setattr(built, name, value)
        return built

    return model


def cnn(seed: int) -> vivace.Job:
    """Convolutions and BatchNorm; SGD with momentum and weight decay; cosine by the epoch."""
    return vivace.Job(
        model=seeded(build_cnn, seed, is_scheduled=1),
        data=lambda: loader(images(seed)),
        loss=classification,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        scheduler=cosine,
        epochs=10,
    )


def residual(seed: int) -> vivace.Job:
    """Stochastic depth and smoothed labels; SGD with Nesterov's momentum; one cycle by the step."""
    return vivace.Job(
        model=seeded(build_residual, seed, is_scheduled=1, is_smoothed=1),
        data=lambda: loader(images(seed)),
        loss=smoothed,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
        scheduler=one_cycle,
        scheduler_every="step",
        epochs=10,
    )


def transformer(seed: int) -> vivace.Job:
    """Dropout, clipping, tied weights, padding; AdamW in two groups; warm-up by the step."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))

    return vivace.Job(
        model=seeded(Encoder, seed, is_scheduled=1, is_padded=1),
        data=lambda: loader(sentences(seed), 24),
        loss=next_token,
        optimizer=optimizer,
        scheduler=warm_up,
        scheduler_every="step",
        on_gradients=clip,
        epochs=10,
    )


def lstm(seed: int) -> vivace.Job:
    """Two recurrent layers; Adam, clipped; no weight decay, no scheduler."""
    return vivace.Job(
        model=seeded(Recurrent, seed),
        data=lambda: loader(sentences(seed), 24),
        loss=next_token,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        on_gradients=clip,
        epochs=10,
    )


def mlp(seed: int) -> vivace.Job:
    """Linear layers; Adam and nothing else."""
    return vivace.Job(
        model=seeded(build_mlp, seed),
        data=lambda: loader(rows(seed)),
        loss=classification,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        epochs=10,
    )


def autoencoder(seed: int) -> vivace.Job:
    """A regression with LayerNorm and dropout; RMSprop with momentum; steps by the epoch."""
    return vivace.Job(
        model=seeded(build_autoencoder, seed, is_scheduled=1),
        data=lambda: loader(rows(seed)),
        loss=reconstruction,
        optimizer=lambda model: torch.optim.RMSprop(
            model.parameters(), lr=1e-3, alpha=0.98, momentum=0.5, weight_decay=1e-3
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3),
        epochs=10,
    )


def digits(seed: int) -> vivace.Job:
    """PyTorch's MNIST example: dropout on feature maps, Adadelta, steps by the epoch."""
    return vivace.Job(
        model=seeded(Digits, seed, is_scheduled=1),
        data=lambda: loader(images(seed)),
        loss=lambda model, batch: functional.nll_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7),
        epochs=10,
    )


def evidence(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean squared error and a little of the divergence of the code from noise."""
    again, mean, log_variance = model(batch[0])
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return functional.mse_loss(again, batch[0]) + 0.1 * divergence


def vae(seed: int) -> vivace.Job:
    """A variational autoencoder: noise like a feature map; Adam."""
    return vivace.Job(
        model=seeded(Variational, seed),
        data=lambda: loader(images(seed)),
        loss=evidence,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
        epochs=10,
    )


def bert(seed: int) -> vivace.Job:
    """Attention with masks of three kinds, dropout; AdamW, warm-up by the step."""
    return vivace.Job(
        model=seeded(Masked, seed, is_scheduled=1),
        data=lambda: loader(sentences(seed), 24),
        loss=next_token,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        scheduler=warm_up,
        scheduler_every="step",
        epochs=10,
    )


def recommender(seed: int) -> vivace.Job:
    """Ratings by two embeddings; Adam."""
    return vivace.Job(
        model=seeded(Recommender, seed),
        data=lambda: loader(ratings(seed), 64),
        loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-3),
        epochs=10,
    )


def long(seed: int) -> vivace.Job:
    """Forty layers; SGD with momentum."""
    return vivace.Job(
        model=seeded(Long, seed),
        data=lambda: loader(rows(seed)),
        loss=classification,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        epochs=10,
    )


def architecture(seed: int, build: Callable[..., nn.Module], optimizer: Callable[..., object]) -> vivace.Job:
    """A published architecture on small images, fine-tuned as is usual for it."""
    return vivace.Job(
        model=seeded(lambda: build(num_classes=NUM_CLASSES), seed),
        data=lambda: loader(images(seed, 64, 48), 8),
        loss=classification,
        optimizer=optimizer,
        epochs=10,
    )


def mobilenet(seed: int) -> vivace.Job:
    """MobileNetV3 (Howard et al., 2019): depthwise convolutions, gates, BatchNorm without an activation."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
    return architecture(seed, models.mobilenet_v3_small, lambda model: sgd(model.parameters()))


def convnext(seed: int) -> vivace.Job:
    """ConvNeXt (Liu et al., 2022): LayerNorm, layer scales that begin at a millionth, stochastic depth."""
    adamw = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.05)
    return architecture(seed, models.convnext_tiny, lambda model: adamw(model.parameters()))


JOBS = {"cnn": cnn, "transformer": transformer, "lstm": lstm, "mlp": mlp}
JOBS |= {"digits": digits, "vae": vae, "bert": bert, "recommender": recommender, "long": long}
JOBS |= {"residual": residual, "autoencoder": autoencoder, "mobilenet": mobilenet, "convnext": convnext}
for _name, _job in JOBS.items():
    globals().update({f"{_name}_{seed}": _job(seed) for seed in SEEDS})
