"""The first batch of a training as one mark, by which a resumed run knows whether its data are the same."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from vivace.tensors.trees import digest, digest_beside_tensors

_BYTES = 20
_NOTHING = digest_beside_tensors(())
_CHANGED = b"\xff"  # the last byte, beside the mark


class Witness:
    """Looks at the first batch where it is read: here, or in a forked worker, whose memory this shares.

    A run that begins marks it as it passes. One that goes on reads it once more, in the worker that comes
    first, and a second time where the mark is another one: data that come otherwise each time prove nothing.
    """

    def __init__(self, wanted: str = "") -> None:
        self.wanted = wanted
        self._memory = mmap.mmap(-1, _BYTES + 1)

    def __reduce__(self) -> tuple[type[Witness], tuple[str]]:
        return Witness, (self.wanted,)

    @property
    def mark(self) -> str:
        """Of the first batch as it was read in this run; empty where that has not happened."""
        found = self._memory[:_BYTES]
        return found.hex() if any(found) else ""

    @property
    def changed(self) -> bool:
        """Is it another one than that of the run which this one continues?"""
        return self._memory[_BYTES:] == _CHANGED

    def look(self, read: Callable[[], Any]) -> None:
        """Mark the first batch, ``read()``, where that is still to be done; in one worker alone."""
        worker = get_worker_info()
        if self.mark or (worker is not None and worker.id):
            return
        found = _mark(read())
        changed = self.wanted not in ("", found.hex()) and _mark(read()) == found
        self._memory[:] = found + (_CHANGED if changed else b"\0")


def _mark(batch: Any) -> bytes:
    whole, beside = digest(batch), digest_beside_tensors(batch)
    if beside != _NOTHING:  # of tensors alone the mark is that of runs that began before the rest counted
        whole = (*whole, beside)
    return hashlib.sha256(repr(whole).encode()).digest()[:_BYTES]
