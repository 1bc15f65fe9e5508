"""`bernoulli_` of torch's CPU generator by `masks.c`: equal numbers, and the same state left behind."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.mechanisms.c_code import compiled
from vivace.torch_internals.kernels import exchanged

SOURCE = Path(__file__).with_name("masks.c")
LEAST = 4096  # numbers: of fewer, reading and writing the generator's state takes as long as drawing
ONES = {
    torch.bool: 1,
    torch.uint8: 1,
    torch.bfloat16: 0x3F80,
    torch.float16: 0x3C00,
    torch.float32: 0x3F80_0000,
    torch.float64: 0x3FF0_0000_0000_0000,
}
_RANGE = 2.0**53  # of the whole numbers that are compared with a probability
_lock = threading.Lock()


def draw(mask: Tensor, probability: float, generator: torch.Generator) -> None:
    """Fill a dense tensor with ones and zeros, as ``mask.bernoulli_(probability, generator=generator)``."""
    state = generator.get_state()
    compiled(SOURCE).draw(
        ctypes.c_void_p(state.data_ptr()),
        ctypes.c_void_p(mask.data_ptr()),
        *(ctypes.c_int64(number) for number in (mask.numel(), mask.element_size())),
        *(ctypes.c_uint64(bits) for bits in (ONES[mask.dtype], math.ceil(probability * _RANGE))),
    )
    generator.set_state(state)


def draws_alike() -> bool:
    """Does this torch draw what `draw` does? Raises OSError where that cannot be compiled."""
    theirs, ours = (torch.Generator().manual_seed(1) for _ in range(2))
    expected = torch.empty(LEAST).bernoulli_(0.3, generator=theirs)
    found = torch.empty(LEAST)
    draw(found, 0.3, ours)
    return torch.equal(found, expected) and torch.equal(ours.get_state(), theirs.get_state())


class Drawing:
    """Masks drawn in blocks, in the whole process, until as many have ended it as have begun it.

    `masks`: how many were drawn.
    """

    _now: Drawing | None = None

    def __init__(self) -> None:
        self.masks = self.users = 0
        self._exchange = ExitStack()

    @classmethod
    def begin(cls) -> Drawing:
        """One for all who draw so at the time."""
        with _lock:
            found = cls._now = cls._now or cls()
            if not found.users:
                found._exchange.enter_context(exchanged("bernoulli_.float", found._instead))
            found.users += 1
            return found

    def end(self) -> None:
        """Leave it to torch again, where nobody else draws so."""
        with _lock:
            self.users -= 1
            if not self.users:
                Drawing._now = None
                self._exchange.close()

    def _instead(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def bernoulli(mask: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
            source = torch.default_generator if generator is None else generator
            suits = mask.numel() >= LEAST and mask.dtype in ONES and 0.0 <= p <= 1.0 and _is_dense(mask)
            if not suits or source.device.type != "cpu":
                own(mask, p, generator=generator)
            else:
                draw(mask, p, source)
                self.masks += 1
            return mask

        return bernoulli


def _is_dense(mask: Tensor) -> bool:
    """Does it lie in memory without gaps, in one of the orders that torch fills from end to end?"""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = orders.get(mask.dim())
    return mask.is_contiguous() or (other is not None and mask.is_contiguous(memory_format=other))
