"""A call of the model that failed under a plan: whose fault that is, and what it had changed by then."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from vivace.errors import ran_out_of_memory
from vivace.live.refusals import device_of
from vivace.profiling.record.signals import raised_by_handler
from vivace.profiling.record.silence import silence
from vivace.tensors import randomness
from vivace.tensors.outside import PLAIN, Outside, of_library
from vivace.tensors.randomness import StreamNotes
from vivace.training.snapshot import BufferNotes


class Before:
    """What a call of the root changes beside its weights, as it was before the newest one: random streams,
    buffers, and plain values that modules of the person's own keep.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._streams = StreamNotes(device)
        self._buffers = BufferNotes([root], captured=False)
        self._spaces = [vars(module) for module in root.modules() if not of_library(type(module).__module__)]
        self._values: list[dict[str, Any]] = []
        self.lost = ""  # what could not be put back

    def take(self, *, whole: bool = False) -> None:
        """Note it all; before every call. With `whole`, every stream."""
        self._streams.take(whole=whole)
        self._buffers.take()
        self._values = [_values(space) for space in self._spaces]

    def put_back(self) -> None:
        """Let it be so again."""
        for space, values in zip(self._spaces, self._values, strict=True):
            for name in _values(space).keys() - values.keys():
                del space[name]
            space.update(values)
        self.lost = "; ".join(filter(None, (self._buffers.put_back(), self._streams.put_back())))


def _values(space: dict[str, Any]) -> dict[str, Any]:
    """What is no work of torch's or of a plan's."""
    return {name: one for name, one in space.items() if isinstance(one, PLAIN) and not name.startswith("_")}


def fails_alone(
    error: Exception,
    method: str,
    root: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> bool:
    """Does a copy of the root, which is as it was before the call of its `method`, fail without a plan by the
    same kind of error? Random numbers and what the root's code keeps in Python are left as they are.
    """
    if ran_out_of_memory(error):
        return False  # nor does the memory hold a copy
    outside, begun = Outside((), [root]), False
    streams = randomness.capture(device_of(root))
    try:
        with silence():
            copied = copy.deepcopy((root, arguments, keywords))
            begun = True
            getattr(copied[0], method)(*copied[1], **copied[2])
    except Exception as other:
        if raised_by_handler(other):
            raise
        return begun and type(other) is type(error) and not ran_out_of_memory(other)
    finally:
        outside.put_back()
        randomness.restore(streams, device_of(root))
    return False
