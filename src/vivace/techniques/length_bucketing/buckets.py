"""Batches cut anew so that samples of similar length meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from vivace.errors import Refused


class Buckets:
    """A batch sampler over another one's batches; where that starts later, it starts there as well.

    The engine's own batches begin with the seed of their random streams, which stays at its position.
    """

    def __init__(self, source: Any, lengths: Sequence[int], window: int) -> None:
        self.source, self.lengths, self.window = source, lengths, window
        self.seeded = hasattr(source, "begin")

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[list[Any]]:
        start = getattr(self.source, "start_batch", 0)
        skipped = start % self.window
        if skipped:
            self.source.start_batch = start - skipped
        source = iter(self.source)
        while batches := list(itertools.islice(source, self.window)):
            if skipped:
                self.source.start_batch = start
            yield from self._cut_anew(batches)[skipped:]
            skipped = 0

    def _cut_anew(self, batches: list[list[Any]]) -> list[list[Any]]:
        heads = [batch[: int(self.seeded)] for batch in batches]
        pool = [index for batch in batches for index in batch[int(self.seeded) :]]
        chance = random.Random(repr((heads, pool)))
        remaining = iter(sorted(pool, key=self.lengths.__getitem__))
        cut = [
            list(itertools.islice(remaining, len(b) - len(h))) for b, h in zip(batches, heads, strict=True)
        ]
        whole, odd = [b for b in cut if len(b) == len(cut[0])], [b for b in cut if len(b) != len(cut[0])]
        chance.shuffle(whole)
        return [head + batch for head, batch in zip(heads, whole + odd, strict=True)]

    def padding(self) -> tuple[float, float]:
        """The share of padding in the first window's batches as they came, and cut anew.

        Raises Refused where a sample is asked for by something else than its number.
        """
        first = list(itertools.islice(self.source, self.window))
        return self._padded(first), self._padded(self._cut_anew(first))

    def _padded(self, batches: list[list[Any]]) -> float:
        found = [[self._length_of(index) for index in batch[int(self.seeded) :]] for batch in batches]
        whole: int = sum(max(lengths) * len(lengths) for lengths in found)
        real: int = sum(sum(lengths) for lengths in found)
        return 1.0 - real / max(1, whole)

    def _length_of(self, index: int) -> int:
        try:
            return self.lengths[index]
        except (TypeError, IndexError):
            told = f"your batches ask for samples by keys, such as {index!r}, and not by their numbers"
            raise Refused(f"{told}, of which the lengths are known") from None
