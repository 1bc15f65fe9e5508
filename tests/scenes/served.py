"""Tiny jobs whose models are served: pictures of three kinds, and several ways of calling the model."""

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import vivace


def pictures(count, seed):
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=stream)
    images = 0.5 * torch.randn(count, 1, 6, 6, generator=stream)
    images[torch.arange(count), 0, labels * 2] += 2.0
    return TensorDataset(images, labels)


def data():
    return DataLoader(pictures(64, 0), batch_size=16)


def validation():
    return DataLoader(pictures(70, 1), batch_size=32)


def small():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((6, 1)),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def accuracy(model, batches):
    right = total = 0
    for images, labels in batches:
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def made(**changes):
    parts = {
        "model": small,
        "data": data,
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "metric": accuracy,
        "metric_name": "accuracy",
        "validation": validation,
        "epochs": 2,
    }
    return vivace.Job(**{**parts, **changes})


job = made()


class Growing(nn.Module):
    """Keeps a number for each row of the largest batch that it has seen, for so many from its beginning."""

    def __init__(self, rows):
        super().__init__()
        self.inner, self.rows = small(), torch.zeros(rows, 1)

    def forward(self, images):
        if len(self.rows) < len(images):
            self.rows = torch.zeros(len(images), 1)
        return self.inner(images) + self.rows[: len(images)]


growing = made(model=lambda: Growing(32))


class Keeping(nn.Module):
    """Keeps a number for each row of its last batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.rows = small(), None

    def forward(self, images):
        if self.rows is None or len(self.rows) != len(images):
            self.rows = torch.zeros(len(images), 1)
        return self.inner(images) + self.rows


keeping = made(model=Keeping)


class Tagger(nn.Module):
    """A class for each word of texts of several lengths; torch's fast path has zeros for padding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(20, 16, padding_idx=0), nn.TransformerEncoder(layer, 1)
        self.label = nn.Linear(16, 3)

    def forward(self, words):
        return self.label(self.encoder(self.embedding(words), src_key_padding_mask=words == 0))


def texts():
    """Each word's class is its number modulo 3; words begin at 1."""
    stream = torch.Generator().manual_seed(0)
    for length in (9, 5, 7):
        words = torch.randint(1, 20, (8, length), generator=stream)
        words[1:, -2:] = 0
        yield words, words % 3


def of_words(model, batches):
    right = total = 0
    for words, labels in batches:
        right += int(((model(words).argmax(-1) == labels) & (words > 0)).sum())
        total += int((words > 0).sum())
    return right / total


tagging = made(
    model=Tagger,
    data=lambda: list(texts()),
    validation=lambda: list(texts()),
    loss=lambda model, batch: functional.cross_entropy(model(batch[0])[batch[0] > 0], batch[1][batch[0] > 0]),
    metric=of_words,
)


class Pooled(Tagger):
    """One class for each text, by the mean over all places, padding too."""

    def forward(self, words):
        return super().forward(words).mean(1)


def of_texts(model, batches):
    pairs = [(model(words), words.sum(1) % 3) for words, _ in batches]
    return -sum(float(functional.cross_entropy(*pair)) for pair in pairs) / len(pairs)


pooling = made(
    model=Pooled,
    data=lambda: list(texts()),
    validation=lambda: list(texts()),
    loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[0].sum(1) % 3),
    metric=of_texts,
)


class Versioned(nn.Module):
    """Saves a mapping beside its weights."""

    def __init__(self):
        super().__init__()
        self.inner, self.version = small(), 2

    def forward(self, images):
        return self.inner(images)

    def get_extra_state(self):
        return {"version": self.version}

    def set_extra_state(self, state):
        self.version = state["version"]


versioned = made(model=Versioned)


class Drawing(nn.Module):
    """Keeps directions that it has drawn, and does not save them."""

    def __init__(self):
        super().__init__()
        self.directions, self.last = torch.randn(36, 48), nn.Linear(48, 3)

    def forward(self, images):
        return self.last(torch.cos(images.flatten(1) @ self.directions))


OWN, OWN_NUMPY = torch.Generator().manual_seed(3), numpy.random.default_rng(3)


class Projecting(Drawing):
    """Its directions are drawn from the file's own generators."""

    def __init__(self):
        super().__init__()
        self.directions = torch.randn(36, 48, generator=OWN) + torch.tensor(OWN_NUMPY.normal(size=48)).float()


projecting = made(model=Projecting)


def drawn(part):
    """A share of the pictures, split anew in each process."""
    return DataLoader(random_split(pictures(120, 2), [64, 56])[part], batch_size=16)


drawing = made(model=Drawing, data=lambda: drawn(0), validation=lambda: drawn(1), epochs=8)


class Scaled(nn.Module):
    """Takes a mapping and a keyword, and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, batch, scale=None):
        return {"logits": self.inner(batch["images"]) * scale, "mean": batch["images"].mean((1, 2, 3))}


def called_with_a_mapping(model, batches):
    right = total = 0
    for images, labels in batches:
        found = model({"images": images}, scale=torch.ones(len(images), 1))
        right += int((found["logits"].argmax(1) == labels).sum())
        total += len(labels)
    return right / total


mapping = made(
    model=Scaled,
    loss=lambda model, batch: functional.cross_entropy(
        model({"images": batch[0]}, scale=torch.ones(1, 1))["logits"], batch[1]
    ),
    metric=called_with_a_mapping,
)


class Losing(nn.Module):
    """Is given the labels too, and returns the batch's loss beside its logits."""

    def __init__(self):
        super().__init__()
        self.inner = small()

    def forward(self, images, labels):
        logits = self.inner(images)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


losing = made(
    model=Losing,
    loss=lambda model, batch: model(*batch)["loss"],
    metric=lambda model, batches: -sum(float(model(*batch)["loss"]) for batch in batches),
    validation=lambda: DataLoader(pictures(64, 1), batch_size=32),
)


def worst_class(model, batches):
    """Not the mean of single samples: the least recall of the three classes."""
    right, total = torch.zeros(3), torch.zeros(3)
    for images, labels in batches:
        hit = model(images).argmax(1) == labels
        right += torch.bincount(labels[hit], minlength=3)
        total += torch.bincount(labels, minlength=3)
    return float((right / total.clamp(min=1)).min())


whole = made(metric=worst_class)


def feeding_back(model, batches):
    total = 0.0
    for images, _ in batches:
        total += float(model(images + 0.1 * model(images).mean()).mean())
    return total


fed_back = made(metric=feeding_back)
never_called = made(metric=lambda model, batches: float(next(model.parameters()).sum()))


class Wide(nn.Module):
    """Channels to spare, a sum of two paths, and two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 96, 3, padding=1), nn.BatchNorm2d(96)
        self.second = nn.Conv2d(96, 96, 3, padding=1)
        self.label, self.size = nn.Linear(96, 3), nn.Linear(96, 2)

    def forward(self, images):
        features = torch.relu(self.norm(self.first(images)))
        features = torch.relu(features + self.second(features))
        rows = features.mean(3).amax(2)
        return {"label": self.label(rows), "size": self.size(rows)}


def label_accuracy(model, batches):
    right = total = 0
    for images, labels in batches:
        right += int((model(images)["label"].argmax(1) == labels).sum())
        total += len(labels)
    return right / total


wide = made(
    model=Wide,
    loss=lambda model, batch: functional.cross_entropy(model(batch[0])["label"], batch[1]),
    metric=label_accuracy,
)


class Outlying(nn.Module):
    """One channel is hundreds of times as large as the others, between which int8 then cannot tell."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 16), nn.Linear(16, 3)
        with torch.no_grad():
            self.first.weight[0] = 700.0 / 6
            self.second.weight[:, 0] /= 700.0

    def forward(self, images):
        return self.second(torch.relu(self.first(images.flatten(1))))


outlying = made(
    model=Outlying, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01), epochs=60
)
