"""What a step changes before it updates the weights, noted so that a step that fails can be taken again.

These are random streams and buffers. Noting all of them would take longer than a small model's whole step, so
what steps leave alone is noted seldom, and looked at again before it is relied on.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from vivace.session.session import Session
from vivace.tensors.randomness import StreamNotes
from vivace.torch_internals.modules import RunningNorm, own_tensors
from vivace.torch_internals.tensors import foreach_copy, version_of


class Snapshot:
    """The random streams and the buffers of a session's models as they were before a step."""

    def __init__(self, session: Session) -> None:
        captured = any(technique.card.captures for technique in session.plan.techniques)
        self.streams = StreamNotes(session.build.device)
        self.buffers = BufferNotes(session.build.models, captured)

    def take(self) -> None:
        """Note the present state; called before every step."""
        self.streams.take()
        self.buffers.take()

    def put_back(self) -> str:
        """Make the state what it was at the last `take`; returns what could not be, else an empty string."""
        return self.buffers.put_back() or self.streams.put_back()


@dataclasses.dataclass(slots=True)
class _Copy:
    """A buffer and what it held; `often`: steps write it, so it is copied before every step."""

    buffer: torch.Tensor
    values: torch.Tensor
    version: int
    often: bool


class BufferNotes:
    """The buffers: which tensors the modules hold, and their contents.

    Those of normalizations, and with `captured` (a replayed step counts no versions) all of them, are
    copied before every step; so is any other from its first change on. Until then one copy, made before the
    first step in main memory, serves them.
    """

    def __init__(self, models: list[nn.Module], captured: bool) -> None:
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._owned = [own_tensors(module)[1] for module in modules]
        self._often = [captured or isinstance(module, RunningNorm) for module in modules]
        self._held: list[dict[str, torch.Tensor | None]] = []
        self._copies: dict[int, _Copy] = {}
        self._num_takes = 0

    def take(self) -> None:
        """Note the present state; called before every step."""
        if not any(self._owned) and not self._copies:  # as in most models without normalization
            self._held = [{}] * len(self._owned)
            self._num_takes += 1
            return
        self._held = [dict(owned) for owned in self._owned]
        copies: dict[int, _Copy] = {}
        stale: list[_Copy] = []
        for held, often in zip(self._held, self._often, strict=True):
            for buffer in held.values():
                if buffer is not None:
                    copy = self._copies.get(id(buffer)) or self._first_copy(buffer, often)
                    copies[id(buffer)] = copy
                    if copy.often or self._changed(copy):
                        stale.append(copy)
        self._copies = copies
        self._num_takes += 1
        if stale:
            _refresh(stale)

    def _first_copy(self, buffer: torch.Tensor, often: bool) -> _Copy:
        often = often or buffer.layout is not torch.strided
        seldom = not often and not self._num_takes
        values = buffer.detach().to("cpu", copy=True) if seldom else buffer.detach().clone()
        return _Copy(buffer, values, version_of(buffer), often)

    def _changed(self, copy: _Copy) -> bool:
        """Has the buffer changed since it was copied? Writes through `.data`, which count no version, are
        looked for after the first step.
        """
        return version_of(copy.buffer) != copy.version or (self._num_takes == 1 and not _is_unchanged(copy))

    def put_back(self) -> str:
        """Make them what they were at the last `take`; returns what could not be, else an empty string."""
        unknown = (c for c in self._copies.values() if not c.often and c.version == version_of(c.buffer))
        if not all(map(_is_unchanged, unknown)):
            return "a buffer was written through `.data`, in this step or one shortly before"
        with torch.no_grad():
            for copy in self._copies.values():
                if copy.often or copy.version != version_of(copy.buffer):
                    copy.buffer.copy_(copy.values)
        for owned, held in zip(self._owned, self._held, strict=True):
            owned.clear()
            owned.update(held)
        return ""


def _refresh(stale: list[_Copy]) -> None:
    """Copy buffers that steps write; the first time onto their own device."""
    with torch.no_grad():
        for copy in stale:
            like = copy.values.device == copy.buffer.device and copy.values.shape == copy.buffer.shape
            if not like:
                copy.values = torch.empty_like(copy.buffer)
            copy.version, copy.often = version_of(copy.buffer), True
        foreach_copy([copy.values for copy in stale], [copy.buffer for copy in stale])


def _is_unchanged(copy: _Copy) -> bool:
    now, before = copy.buffer.detach().to(copy.values.device), copy.values
    return now.shape == before.shape and bool(((now == before) | ((now != now) & (before != before))).all())
