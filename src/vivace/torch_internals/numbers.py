"""Private names of NumPy's global random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from vivace.torch_internals import attribute

_BITS = "_bit_generator"
_get_state: Any = numpy.random.get_state
_global = _get_state.__self__  # whose methods the functions of numpy.random are
attribute(numpy.random.RandomState, _BITS, lost="keeping NumPy's random numbers apart takes 0.1 ms more")
_can_leave_out_bits = hasattr(_global, _BITS)


class _NoBits:
    """Stands in for the bit generator, the copy of whose state takes nearly all of the time."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "", "state": {}}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        pass


@contextmanager
def _bits_left_out() -> Iterator[None]:
    if not _can_leave_out_bits:
        yield
        return
    before = getattr(_global, _BITS)
    setattr(_global, _BITS, _NoBits())
    try:
        yield
    finally:
        setattr(_global, _BITS, before)


def second_normal() -> dict[str, Any]:
    """What ``numpy.random.normal`` keeps for its next call, having drawn two numbers; lost with every change
    of the bit generator.
    """
    with _bits_left_out():
        state = _global.get_state(legacy=False)
    return {"has_gauss": state["has_gauss"], "gauss": state["gauss"]}


def put_second_normal(kept: dict[str, Any]) -> None:
    """Let the next call of ``numpy.random.normal`` begin with what `second_normal` told."""
    with _bits_left_out():
        _global.set_state({**_global.get_state(legacy=False), **kept})
