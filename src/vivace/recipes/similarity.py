"""How similar do people find two words? An encoder that learns from WordNet which word a definition defines;
or two sentences of STS-B.

No pair that people have judged trains: SimLex-999 validates and WordSim-353 tests, as gensim ships them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from vivace.job import Job
from vivace.recipes.networks.schedules import adamw, clip, warm_cosine
from vivace.recipes.sources import check_choice, demanded, wordnet
from vivace.recipes.sources.characters import UNKNOWN, Vocabulary, padded

LENGTH = 32  # words of a definition or sentence that are read
BATCH = 256
TRAINED = 51200  # definitions of an epoch, drawn anew
TEMPERATURE = 0.05  # of the cosines (Chen et al., 2020, arXiv:2002.05709)
# Share of all words from which one is left out at times (Mikolov et al., 2013, arXiv:1310.4546).
OFTEN = 1e-3
DATA = ("wordnet", "stsb")

Pair = tuple[torch.Tensor, torch.Tensor, float]


@functools.cache
def vocabulary(data: str) -> Vocabulary:
    """The words that train."""
    if data == "stsb":
        return Vocabulary((words for a, b, _ in stsb("training") for words in (a, b)), least=2)
    found = wordnet.entries()
    return Vocabulary((words for entry in found for words in (entry.words, entry.definition)), least=3)


@functools.cache
def stsb(split: str) -> tuple[tuple[list[str], list[str], float], ...]:
    """STS-B (Cer et al., 2017), whose files lie below VIVACE_DATA; sentences that train do not come again."""
    part = {"training": "train", "validation": "dev", "test": "test"}[split]
    how = "unpack Stsbenchmark.tar.gz there"
    path = demanded("STS-B", f"stsbenchmark/sts-{part}.csv", f"stsb/sts-{part}.csv", how=how)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) > 6]
    found = [(row[5].lower().split(), row[6].lower().split(), float(row[4])) for row in rows]
    if split != "training":
        seen = {tuple(words) for a, b, _ in stsb("training") for words in (a, b)}
        found = [row for row in found if tuple(row[0]) not in seen and tuple(row[1]) not in seen]
    return tuple(found)


class Definitions(Dataset[Pair]):
    """A word, and the other words of one of its meanings with their definition; drawn anew each time."""

    def __init__(self) -> None:
        numbers = vocabulary("wordnet").numbers
        known = [entry for entry in wordnet.entries() if any(word in numbers for word in entry.words)]
        self.words = [[numbers[word] for word in entry.words if word in numbers] for entry in known]
        texts = ((*entry.words, *entry.definition)[:LENGTH] for entry in known)
        self.definitions = [vocabulary("wordnet").encode(text) for text in texts]
        counts = torch.bincount(torch.cat(self.definitions), minlength=len(vocabulary("wordnet")))
        self.kept = (OFTEN * counts.sum() / counts.clamp(min=1)).sqrt()

    def __len__(self) -> int:
        return TRAINED

    def __getitem__(self, index: int) -> Pair:
        meaning = int(torch.randint(len(self.words), ()))
        words = self.words[meaning]
        word = words[int(torch.randint(len(words), ()))]
        definition = self.definitions[meaning].masked_fill(self.definitions[meaning] == word, UNKNOWN)
        there = torch.rand(definition.shape) < self.kept[definition]
        return torch.tensor([word]), definition[there] if there.any() else definition, 1.0


class Judged(Dataset[Pair]):
    """Pairs of words or sentences and how similar people find them."""

    def __init__(self, split: str, data: str) -> None:
        rows: Iterable[tuple[list[str], list[str], float]]
        if data == "stsb":
            rows = stsb(split)
        else:
            pairs = wordnet.judged({"validation": "simlex999", "test": "wordsim353"}[split])
            rows = (([a], [b], score) for a, b, score in pairs)
        encode = vocabulary(data).encode
        self.rows = [(encode(a[:LENGTH]), encode(b[:LENGTH]), score) for a, b, score in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Pair:
        return self.rows[index]


def collate(rows: list[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words of both sides, (batch, length) each, and how similar they are (batch,)."""
    firsts, seconds, scores = zip(*rows, strict=True)
    return padded(firsts), padded(seconds), torch.tensor(scores)


class Encoder(nn.Module):
    """Words (batch, length) -> vectors of length one (batch, width).

    A deep averaging network (Iyyer et al., 2015): a mean of vectors, and residual layers above it.
    """

    def __init__(self, num_tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        layers = [nn.Linear(width, width) for _ in range(depth)]
        for layer in layers:  # the mean itself, to begin with
            nn.init.zeros_(layer.weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The vectors."""
        there = (tokens != 0).unsqueeze(-1)
        hidden = (self.tokens(tokens) * there).sum(1) / there.sum(1)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        return functional.normalize(hidden, dim=-1)


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    """Which definition of the batch is a word's, and which word is a definition's (InfoNCE), the mean over
    both.
    """
    words, definitions = model(batch[0]), model(batch[1])
    cosines = words @ definitions.T / TEMPERATURE
    true = torch.arange(len(cosines), device=cosines.device)
    return (functional.cross_entropy(cosines, true) + functional.cross_entropy(cosines.T, true)) / 2


def distance(model: nn.Module, batch: Any) -> torch.Tensor:
    """The squared difference of cosines from what people say, as a share of 5: the mean over the batch."""
    cosines = (model(batch[0]) * model(batch[1])).sum(1)
    return functional.mse_loss(cosines, batch[2] / 5)


def spearman(model: nn.Module, batches: Iterable[Any]) -> float:
    """The rank correlation of cosines with what people say."""
    from torchmetrics.functional.regression import spearman_corrcoef

    rows = [((model(a) * model(b)).sum(1).float(), scores.float()) for a, b, scores in batches]
    cosines, judged = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return float(spearman_corrcoef(cosines, judged))


def held_out(split: str, data: str) -> DataLoader[Any]:
    """Pairs that people have judged, in their order."""
    return DataLoader(Judged(split, data), batch_size=BATCH, collate_fn=collate)


def unseen(data: str = "wordnet") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out("test", data)


def job(*, width: int = 64, depth: int = 1, epochs: int = 3, data: str = "wordnet") -> Job:
    """The job. `data` is ``wordnet`` or ``stsb``; `width` in numbers of a vector."""
    check_choice("data", data, DATA)

    def rows() -> Dataset[Pair]:
        return Definitions() if data == "wordnet" else Judged("training", data)

    def steps() -> int:
        return (TRAINED if data == "wordnet" else len(stsb("training"))) // BATCH

    return Job(
        model=lambda: Encoder(len(vocabulary(data)), width, depth),
        data=lambda: DataLoader(rows(), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate),
        loss=contrast if data == "wordnet" else distance,
        optimizer=adamw(2e-2, weight_decay=0.0),
        scheduler=lambda optimizer: warm_cosine(epochs * steps())(optimizer),
        scheduler_every="step",
        on_gradients=clip,
        metric=spearman,
        metric_name="Spearman's rho",
        validation=lambda: held_out("validation", data),
        epochs=epochs,
    )
