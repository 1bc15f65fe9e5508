"""Which byte comes next? A small GPT on the source of Python's own standard library, or on WikiText-2.

Whole packages train, validate or test, so that no file has a near copy on another side; equal files count
once. Judged by bits per byte of what no step has seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.pictures import Picture, Piece, Text
from vivace.recipes import showing
from vivace.recipes.networks.schedules import adamw, clip, warm_cosine
from vivace.recipes.networks.transformer import Transformer, check_width
from vivace.recipes.sources import check_choice, check_least, demanded, standard_library, training_loader

LENGTH = 128  # bytes that the network sees at once
BATCH = 8
WINDOWS = 2400  # that train in an epoch
VALIDATED, TESTED = 384, 1600  # windows
NUM_BYTES = 256
GENERATED = 160  # bytes that are drawn after a window
TEMPERATURE = 0.7
SURPRISING = 8.0  # bits, from which a byte is marked: more than were it drawn blindly


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019) over bytes: (batch, length) -> logits (batch, length, 256)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.body = Transformer(NUM_BYTES, LENGTH, width, depth, causal=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each next byte; the embedding's weights are the last layer's too."""
        return functional.linear(self.body(tokens), self.body.tokens.weight)


@functools.cache
def tokens_of(split: str, data: str) -> torch.Tensor:
    """A split's bytes as one long row."""
    content = standard_library.text(split) if data == "python" else wikitext(split)
    if len(content) <= LENGTH:
        raise InputError(f"the {split} text of {data} has {len(content)} bytes, fewer than {LENGTH + 1}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def window(tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`LENGTH` bytes, and the same one byte later."""
    piece = tokens[start : start + LENGTH + 1].long()
    return piece[:-1], piece[1:]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows that begin anywhere in the training text: no two epochs see the same ones."""

    def __init__(self, data: str) -> None:
        self.tokens = tokens_of("training", data)

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return window(self.tokens, int(torch.randint(len(self.tokens) - LENGTH, ())))


def held_out(split: str, data: str) -> DataLoader[Any]:
    """Windows spread evenly over the split's text, none over another."""
    tokens = tokens_of(split, data)
    most = TESTED if split == "test" else VALIDATED
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, min(most, len(tokens) // (LENGTH + 1))).long()
    inputs, following = zip(*(window(tokens, int(start)) for start in starts), strict=True)
    return DataLoader(TensorDataset(torch.stack(inputs), torch.stack(following)), batch_size=2 * BATCH)


def wikitext(split: str) -> bytes:
    """WikiText-2 (Merity et al., 2016), raw, as its archive unpacks below VIVACE_DATA."""
    part = {"training": "train", "validation": "valid", "test": "test"}[split]
    names = [
        f"{folder}/wiki.{part}.{end}" for folder, end in (("wikitext-2-raw", "raw"), ("wikitext-2", "tokens"))
    ]
    how = "unpack wikitext-2-raw-v1.zip there"
    return demanded("WikiText-2", *names, how=how).read_bytes()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean cross entropy of the next byte, in nats."""
    tokens, following = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def bits_per_byte(model: nn.Module, batches: Iterable[Any]) -> float:
    """Minus the bits that each byte costs under the model: higher is better."""
    nats: Any = 0.0  # stays on the device meanwhile
    number = 0
    for tokens, following in batches:
        logits = model(tokens).float().flatten(0, 1)
        nats = nats + functional.cross_entropy(logits, following.flatten(), reduction="sum")
        number += following.numel()
    return -float(nats) / number / math.log(2)


def letters(tokens: torch.Tensor) -> str:
    """The text that a row of byte tokens stands for."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def pictures(model: nn.Module, batches: Iterable[Any]) -> showing.Shown:
    """Text that the model writes, and the windows that it foresaw best and worst."""
    rows = [(tokens, following) for tokens, following in batches]
    given = torch.cat([tokens[:1] for tokens, _ in rows])[:3]
    written: list[Picture] = [
        Text("", [Piece(letters(start), "given"), letters(further)])
        for start, further in zip(given, showing.continued(model, given, GENERATED, TEMPERATURE), strict=True)
    ]

    def samples() -> Iterable[showing.Sample]:
        for tokens, following in rows:
            for row, bits in zip(following, showing.likely(model, tokens, following), strict=True):
                yield showing.Sample(-float(bits.mean()), foreseen, (row, bits))

    best, worst = showing.extremes(samples(), 2)
    return {"Written by the model": written, "Foreseen best": best, "Foreseen worst": worst}


def foreseen(row: torch.Tensor, bits: torch.Tensor) -> Text:
    """A window's text, each byte that surprised marked by its bits."""
    pieces: list[Piece | str] = []
    start = 0
    for place in (bits >= SURPRISING).nonzero().flatten().tolist():
        surprise = Piece(letters(row[place : place + 1]), f"{bits[place]:.0f}", False)
        pieces += [letters(row[start:place]), surprise]
        start = place + 1
    return Text(f"{float(bits.mean()):.2f} bits a byte", [*pieces, letters(row[start:])])


def unseen(data: str = "python") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out("test", data)


def job(*, width: int = 128, depth: int = 3, epochs: int = 3, data: str = "python") -> Job:
    """The job. `data` is ``python`` or ``wikitext2``; `width` in hidden units, a multiple of 32."""
    check_width(width)
    check_least("depth", depth, 0)
    check_choice("data", data, ("python", "wikitext2"))
    return Job(
        model=lambda: GPT(width, depth),
        data=lambda: training_loader(Windows(data), BATCH),
        loss=loss,
        optimizer=adamw(3e-3),
        scheduler=warm_cosine(epochs * (WINDOWS // BATCH)),
        scheduler_every="step",
        on_gradients=clip,
        metric=bits_per_byte,
        metric_name="minus bits per byte",
        validation=lambda: held_out("validation", data),
        pictures=pictures,
        epochs=epochs,
    )
