"""How alike are two words? A network that reads a text and says which word it means (a reverse dictionary:
Hill et al., 2016, arXiv:1504.00548), trained on WordNet's glosses and synonyms.

Two words are as alike as what the network says of each. That is judged by Spearman's rank correlation with
people's ratings, of which none is trained on. Or how alike are two sentences (STS-B: Cer et al., 2017,
arXiv:1708.00055)? There it learns from the ratings of other pairs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.pictures import Picture, Text
from vivace.recipes import showing
from vivace.recipes.networks.classifying import loss
from vivace.recipes.networks.schedules import clip, warm_cosine
from vivace.recipes.networks.transformer import Transformer, check_width
from vivace.recipes.sources import (
    check_choice,
    check_least,
    check_modules,
    demanded,
    text_of,
    training_loader,
    wordnet,
)
from vivace.recipes.sources.characters import Vocabulary, padded

LENGTH = 32  # words of a text that are read
BATCH = 128
LEAST = 20  # times that a word stands in WordNet, to be known
RATE, RATE_OF_WORDS = 3e-3, 5e-2  # of learning; a word's own row is seldom in a batch
BY_SYNONYM = 0.5  # how often a word is asked for by another word of its synset, where it has one
TOKENS = re.compile(r"[a-z]+|[0-9]+")
MOST_ALIKE = 5.0  # STS-B's best rating
# The pairs that train, that validate and that are unseen.
DATA = {"wordnet": ("", "simlex", "wordsim"), "stsb": ("train", "dev", "test")}

Row = tuple[torch.Tensor, int]
Alike = tuple[torch.Tensor, torch.Tensor, float]


@functools.cache
def stsb(part: str) -> tuple[wordnet.Rated, ...]:
    """Pairs of sentences and how alike people find them, from 0 to 5, of STS-B's ``train``, ``dev`` or
    ``test``; of those that train, the ones that are in no other part.
    """
    path = demanded(
        "STS-B", f"stsbenchmark/sts-{part}.csv", how="put sts-train.csv, sts-dev.csv and sts-test.csv there"
    )
    found: dict[frozenset[str], wordnet.Rated] = {}
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        try:
            rating = float(fields[4])
            first, second = fields[5:7]
        except (IndexError, ValueError):
            rating, first, second = -1.0, "", ""
        if not 0 <= rating <= MOST_ALIKE or not units(first) or not units(second):
            raise InputError(f"line {number} of '{path}' has no rating from 0 to 5 with two sentences behind")
        found.setdefault(frozenset((first, second)), wordnet.Rated(first, second, rating))
    if part == "train":
        for name in DATA["stsb"][1:]:
            for one in stsb(name):
                found.pop(frozenset(one[:2]), None)
    return tuple(found.values())


def units(text: str) -> list[str]:
    """What the network reads of a text: words and numbers."""
    return TOKENS.findall(text.lower())[:LENGTH]


@functools.cache
def vocabulary(data: str = "wordnet") -> Vocabulary:
    """The usual words of WordNet's glosses and lemmas, and those that people rated; or of what trains."""
    if data == "stsb":
        return Vocabulary(units(text) for one in stsb("train") for text in one[:2])
    texts = (text for synset in wordnet.synsets() for text in (*synset.words, synset.gloss))
    rated = (word for name in wordnet.RATINGS for one in wordnet.rated(name) for word in one[:2])
    return Vocabulary(itertools.chain(map(units, texts), ([word] * LEAST for word in rated)), LEAST)


def encoded(text: str, data: str = "wordnet") -> torch.Tensor:
    """The numbers (words,) of a text's words in the vocabulary, as int64."""
    return vocabulary(data).encode(units(text))


class Meanings(Dataset[Row]):
    """A text and the word that it means, another word of the synset each time; synsets without a known single
    word are left out.
    """

    def __init__(self) -> None:
        known = vocabulary().numbers
        self.rows: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for synset in wordnet.synsets():
            words = tuple(known[word] for word in synset.words if word in known)
            if words and len(gloss := encoded(synset.gloss)):
                self.rows.append((words, gloss))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        words, gloss = self.rows[index]
        order = torch.randperm(len(words)).tolist()
        if len(words) > 1 and torch.rand(()) < BY_SYNONYM:
            return torch.tensor([words[order[1]]]), words[order[0]]
        return gloss, words[order[0]]


@functools.cache
def meanings() -> Meanings:
    """What trains, read once."""
    return Meanings()


class Ratings(Dataset[Alike]):
    """Pairs of words or sentences and people's ratings."""

    def __init__(self, name: str, data: str = "wordnet") -> None:
        pairs = stsb(name) if data == "stsb" else wordnet.rated(name)
        self.rows = [(encoded(one.first, data), encoded(one.second, data), one.rating) for one in pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Alike:
        return self.rows[index]


def collate(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (batch, length) and words (batch,)."""
    return padded([text for text, _ in rows]), torch.tensor([word for _, word in rows])


def collate_rated(rows: list[Alike]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both texts, (batch, length) each, and the ratings (batch,)."""
    first, second, ratings = zip(*rows, strict=True)
    return padded(first), padded(second), torch.tensor(ratings)


class Dictionary(nn.Module):
    """Texts (batch, length) -> logits of the words that they mean (batch, words): the mean over what is no
    padding, a layer, and the embedding once more (tied: Press and Wolf, 2017, arXiv:1608.05859).
    """

    def __init__(self, num_words: int, width: int, depth: int) -> None:
        super().__init__()
        self.body = Transformer(num_words, LENGTH, width, depth, causal=False, dropout=0.1)
        self.head = nn.Linear(width, width)
        nn.init.normal_(self.body.tokens.weight, std=0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """For every word of the vocabulary the logit (batch, words) that the tokens define it."""
        there = (tokens != 0).unsqueeze(-1)
        mean = (self.body(tokens) * there).sum(1) / there.sum(1).clamp(min=1)
        return functional.linear(self.head(mean), self.body.tokens.weight)


def cosines(model: nn.Module, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How alike the model's answers to two batches of texts are: (batch,)."""
    longest = max(first.shape[1], second.shape[1])
    both = [functional.pad(texts, (0, longest - texts.shape[1])) for texts in (first, second)]
    answers = model(torch.cat(both)).float()
    one, other = (answers - answers.mean(1, keepdim=True)).chunk(2)
    return functional.cosine_similarity(one, other)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean squared distance of the model's likeness from people's ratings, as shares of the best."""
    first, second, ratings = batch
    return functional.mse_loss(cosines(model, first, second), ratings.float() / MOST_ALIKE)


def spearman(model: nn.Module, batches: Iterable[Any]) -> float:
    """The rank correlation of the model's likeness with people's ratings."""
    from torchmetrics.functional.regression import spearman_corrcoef

    rows = [(cosines(model, first, second), ratings.float()) for first, second, ratings in batches]
    said, meant = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return float(spearman_corrcoef(said, meant).nan_to_num())  # none where all are equally alike


def pictures(model: nn.Module, batches: Iterable[Any], *, data: str = "wordnet") -> showing.Shown:
    """Pairs whose rank among all pairs the model and people see alike, and those they see least alike."""
    rows = [(first, second, ratings) for first, second, ratings in batches]
    likeness = torch.cat([cosines(model, first, second) for first, second, _ in rows])
    ratings = torch.cat([ratings for _, _, ratings in rows])
    said, meant = ranks(likeness), ranks(ratings)
    pairs = [pair for first, second, _ in rows for pair in zip(first, second, strict=True)]
    samples = (
        showing.Sample(-abs(a - b), functools.partial(told, data=data), (pair, a, b))
        for pair, a, b in zip(pairs, said.tolist(), meant.tolist(), strict=True)
    )
    best, worst = showing.extremes(samples)
    return {"Ranked as people do": best, "Ranked least as people do": worst}


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Of each value the share of the others that are smaller, equal ones counted by half."""
    values = values.detach().cpu()
    ordered = values.sort().values
    smaller, not_larger = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (smaller + not_larger - 1) / 2 / max(1, len(values) - 1)


def told(
    pair: tuple[torch.Tensor, torch.Tensor], said: float, meant: float, data: str = "wordnet"
) -> Picture:
    """Two texts, and how alike the model and people find them, of 100 pairs."""
    first, second = (" ".join(vocabulary(data).decode(tokens)) for tokens in pair)
    title = f"more alike than {100 * said:.0f} of 100 pairs; people: {100 * meant:.0f}"
    return Text(title, [f"{first} - {second}"])


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with two rates; words do not decay."""
    words = model.body.tokens.weight  # type: ignore[union-attr]
    others = [parameter for parameter in model.parameters() if parameter is not words]
    groups: list[dict[str, Any]] = [
        {"params": [words], "lr": RATE_OF_WORDS, "weight_decay": 0.0},
        {"params": others, "lr": RATE},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.05, betas=(0.9, 0.95))


def held_out(name: str, data: str = "wordnet") -> DataLoader[Any]:
    """Pairs of which none trains, such as SimLex-999 or WordSim-353, in their order."""
    return DataLoader(Ratings(name, data), batch_size=BATCH, collate_fn=collate_rated)


def unseen(data: str = "wordnet") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out(DATA[data][2], data)


def job(*, width: int = 64, depth: int = 1, epochs: int = 3, data: str = "wordnet") -> Job:
    """The job. `data` is ``wordnet`` or ``stsb``; `width` in hidden units, a multiple of 32."""
    check_width(width)
    check_least("depth", depth, 0)
    check_choice("data", data, tuple(DATA))
    check_modules("torchmetrics")
    trained, validated, _ = DATA[data]

    def texts() -> Dataset[Any]:
        return Ratings(trained, data) if data == "stsb" else meanings()

    def training() -> DataLoader[Any]:
        return training_loader(texts(), BATCH, collate_rated if data == "stsb" else collate)

    return Job(
        model=lambda: Dictionary(len(vocabulary(data)), width, depth),
        data=training,
        loss=squared_error if data == "stsb" else loss,
        optimizer=optimizer,
        scheduler=lambda built: warm_cosine(epochs * len(training()))(built),
        scheduler_every="step",
        on_gradients=clip,
        metric=spearman,
        metric_name="Spearman's rho",
        validation=lambda: held_out(validated, data),
        pictures=functools.partial(pictures, data=data),
        epochs=epochs,
    )
