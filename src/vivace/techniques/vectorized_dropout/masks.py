"""`bernoulli_` of torch's CPU generator by `masks.c`: equal numbers, and the same state left behind."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.mechanisms.c_code import compiled
from vivace.mechanisms.exchanged import Exchanged
from vivace.operators import LEAST_MASK
from vivace.torch_internals.kernels import exchange
from vivace.torch_internals.tensors import outside_modes

SOURCE = Path(__file__).with_name("masks.c")
ONES = {
    torch.bool: 1,
    torch.uint8: 1,
    torch.bfloat16: 0x3F80,
    torch.float16: 0x3C00,
    torch.float32: 0x3F80_0000,
    torch.float64: 0x3FF0_0000_0000_0000,
}
_RANGE = 2.0**53  # of the whole numbers that are compared with a probability
# A signal's handler may draw while its own thread does.
_drawing = threading.RLock()


def _unlocked() -> None:
    """In a process that was forked while another thread drew, nobody is left who could unlock it."""
    global _drawing
    _drawing = threading.RLock()


os.register_at_fork(after_in_child=_unlocked)


def draw(mask: Tensor, probability: float, generator: torch.Generator) -> None:
    """Fill a dense tensor with ones and zeros, as ``mask.bernoulli_(probability, generator=generator)``.

    The mask is of a dtype in `ONES`, the probability from 0 to 1, the generator of the CPU. Several threads
    may draw from one generator, and handlers of signals: where another has drawn from it meanwhile, the mask
    is drawn anew. Raises OSError where the code cannot be compiled.
    """
    kernel = compiled(SOURCE).draw
    with _drawing:
        while True:
            state = generator.get_state()
            before = _bytes_of(state)
            kernel(
                ctypes.c_void_p(state.data_ptr()),
                ctypes.c_void_p(mask.data_ptr()),
                *(ctypes.c_int64(number) for number in (mask.numel(), mask.element_size())),
                *(ctypes.c_uint64(bits) for bits in (ONES[mask.dtype], math.ceil(probability * _RANGE))),
            )
            if _bytes_of(generator.get_state()) == before:
                generator.set_state(state)
                return


def _bytes_of(state: Tensor) -> bytes:
    """By no operator, which a mode around this one would see."""
    return ctypes.string_at(state.data_ptr(), state.numel())


@cache  # once torch's kernel is exchanged, the comparison would be of `draw` with itself
def draws_alike() -> bool:
    """Does this torch draw what `draw` does, in every dtype? Raises OSError where that cannot be compiled."""
    with outside_modes():
        theirs, ours = (torch.Generator().manual_seed(1) for _ in range(2))
        for dtype in ONES:
            for generator in (theirs, ours):
                torch.randint(9, (1,), generator=generator, device="cpu")  # it ends within a pair of words
            expected = torch.empty(LEAST_MASK, dtype=dtype, device="cpu").bernoulli_(0.3, generator=theirs)
            found = torch.empty_like(expected)
            draw(found, 0.3, ours)
            if not torch.equal(found, expected) or not torch.equal(ours.get_state(), theirs.get_state()):
                return False
    return True


def begin(told: Callable[[int], object]) -> Callable[[], None]:
    """Draw masks in blocks, in the whole process, until what this returns is called, by all who have begun.

    `told` gets how many numbers each mask has that is drawn so. Raises Refused where torch's kernel cannot be
    exchanged.
    """
    return _ours.begin(told)


def _instead(own: Callable[..., Any]) -> Callable[..., Any]:
    def bernoulli(mask: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        source = torch.default_generator if generator is None else generator
        suits = _ours.told and mask.numel() >= LEAST_MASK and mask.dtype in ONES and 0.0 <= p <= 1.0
        if not suits or not _is_dense(mask) or source.device.type != "cpu":
            own(mask, p, generator=generator)
            return mask
        draw(mask, p, source)
        _ours.tell(mask.numel())
        return mask

    return bernoulli


def _is_dense(mask: Tensor) -> bool:
    """Does it lie in memory without gaps, in one of the orders that torch fills from end to end?"""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = orders.get(mask.dim())
    return mask.is_contiguous() or (other is not None and mask.is_contiguous(memory_format=other))


_ours = Exchanged(lambda: exchange("bernoulli_.float", _instead))
