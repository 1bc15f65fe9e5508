"""Characters as numbers, and batches of texts of unequal length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

PADDING, UNKNOWN = 0, 1
MULTIPLE = 16  # lengths of batches are rounded up to it, so that there are few different ones


class Vocabulary:
    """Numbers of the characters or words that the training text holds at least `least` times."""

    def __init__(self, texts: Iterable[Iterable[str]], least: int = 2) -> None:
        counts = Counter(unit for text in texts for unit in text)
        known = sorted(unit for unit, count in counts.items() if count >= least)
        self.numbers = {unit: number for number, unit in enumerate(known, UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self.numbers) + UNKNOWN + 1

    def encode(self, text: Iterable[str]) -> torch.Tensor:
        """The numbers (length,) of a text's units, as int64."""
        return torch.tensor([self.numbers.get(unit, UNKNOWN) for unit in text], dtype=torch.int64)

    def decode(self, row: torch.Tensor) -> list[str]:
        """The units of a row without its padding; a box stands for one that is not known."""
        known = (*("\N{WHITE SQUARE}",) * (UNKNOWN + 1), *self.numbers)
        return [known[number] for number in row.tolist() if number != PADDING]


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """(batch, length) of rows of unequal length, the length a multiple of `MULTIPLE`."""
    longest = max(len(row) for row in rows)
    length = -(-longest // MULTIPLE) * MULTIPLE
    batch = torch.full((len(rows), length), PADDING, dtype=rows[0].dtype)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row
    return batch


def forgetting(row: torch.Tensor, share: float) -> torch.Tensor:
    """A row of which each character is unknown with a chance of `share` (word dropout)."""
    return row.masked_fill(torch.rand(row.shape) < share, UNKNOWN)
