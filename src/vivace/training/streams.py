"""The random streams of every rank of a machine as its last step left them, for when it is dead or hangs."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
from typing import Any

import torch

from vivace.tensors.randomness import to_plain
from vivace.training.ranks import Ranks

_SLOT_BYTES = 1 << 16
_HEAD = struct.Struct("<qqqq")  # the step (-1: being written), and the lengths of three parts
_KINDS = ("torch", "cuda")


class StreamBoard:
    """Memory without a name that the ranks of one machine share: it lives as long as one of them does.

    It holds two notes, of which one is whole whenever its writer dies.

    Args:
        ranks: of the run; a rank without others that watch it notes nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._others: dict[int, mmap.mmap] = {}
        self._own: mmap.mmap | None = None
        self._hosts: list[Any] = [None, None]
        self._packed: tuple[Any, bytes] = (None, b"")
        self._turn = 0
        self._step, self._foreseen, self._foresees = 0, torch.empty(0), True
        if ranks.watch is None:
            return
        memory = os.memfd_create("vivace-streams")
        os.truncate(memory, 2 * _SLOT_BYTES)
        self._own = mmap.mmap(memory, 2 * _SLOT_BYTES)
        for slot in range(2):
            _HEAD.pack_into(self._own, slot * _SLOT_BYTES, -1, 0, 0, 0)
        for rank, place in enumerate(ranks.gather((socket.gethostname(), os.getpid(), memory))):
            if rank != ranks.rank and place[0] == socket.gethostname():
                with contextlib.suppress(OSError):  # in another container
                    self._others[rank] = _opened(f"/proc/{place[1]}/fd/{place[2]}")
        ranks.gather(None)  # all have opened it
        os.close(memory)

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Note the streams (see `randomness.capture`) as they are after `step` steps."""
        if self._own is None:
            return
        self._foresees = self._foresees and (
            step != self._step + 1 or not len(self._foreseen) or torch.equal(self._foreseen, state["torch"])
        )
        self._step, self._foreseen = step, torch.empty(0)
        self._note(step, state)

    def foresee(self, state: dict[str, Any]) -> None:
        """Note the streams as the next step leaves them: only its update is to come, which draws nothing.

        Where an update has drawn from torch's stream before, nothing is noted.
        """
        if self._own is not None and self._foresees:
            self._foreseen = state["torch"]
            self._note(self._step + 1, state)

    def _note(self, step: int, state: dict[str, Any]) -> None:
        assert self._own is not None
        self._turn = 1 - self._turn
        begin, host = self._turn * _SLOT_BYTES, state["python"]
        if self._packed[0] is not host:
            plain = to_plain(state)
            self._packed = host, json.dumps([plain["python"], plain["numpy"]]).encode()
        parts = [bytes(state[kind].numpy()) if kind in state else b"" for kind in _KINDS]
        lengths = [*map(len, parts), len(self._packed[1])]
        if _HEAD.size + sum(lengths) > _SLOT_BYTES:
            return
        _HEAD.pack_into(self._own, begin, -1, *lengths)
        at = begin + _HEAD.size
        for part in parts:
            self._own[at : at + len(part)] = part
            at += len(part)
        if self._hosts[self._turn] is not host:
            self._own[at : at + lengths[2]] = self._packed[1]
            self._hosts[self._turn] = host
        _HEAD.pack_into(self._own, begin, step, *lengths)

    def read(self, rank: int, step: int) -> dict[str, Any] | None:
        """The streams of another rank after `step` steps, as `to_plain` gives them; None where unknown."""
        memory = self._others.get(rank)
        if memory is None:
            return None
        for slot in range(2):
            at = slot * _SLOT_BYTES
            noted, *lengths = _HEAD.unpack_from(memory, at)
            if noted != step:
                continue
            at, parts = at + _HEAD.size, list[bytes]()
            for length in lengths:
                parts.append(memory[at : at + length])
                at += length
            python, numpy = json.loads(parts[2])
            tensors = {
                kind: torch.frombuffer(bytearray(part), dtype=torch.uint8)
                for kind, part in zip(_KINDS, parts, strict=False)
                if part
            }
            return {"python": python, "numpy": numpy, **tensors}
        return None


def _opened(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 2 * _SLOT_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
