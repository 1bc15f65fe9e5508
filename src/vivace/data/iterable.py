"""Data that cannot be indexed: read as a stream, and brought back to a place in it after a stop.

Every batch is marked with a checksum that depends on all batches before it. A checkpoint keeps the mark, so
that a resumed run knows whether the stream came again as it did before.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from vivace.job import Batch
from vivace.technique.build import Stateful
from vivace.tensors.randomness import Streams, capture, from_plain, restore, to_plain
from vivace.tensors.trees import contents
from vivace.torch_internals.loaders import iterates_itself

STATE_SECONDS = 20.0  # between two states of the data: as much is read again after a stop
STATE_COSTS = 100  # times what it takes to tell a state lie between two, at least
KEPT = 64  # marks and states of the last batches; what techniques fetch ahead lies within
_MARKED = 64  # numbers of each tensor or array, letters of each text
_IN_NUMPY = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int32, torch.int64, torch.bool)
_PLAIN = (str, int, float, bool, type(None), torch.Tensor)

Place = dict[str, Any]


class IterableData:
    """One pass over an iterable: seeded, brought to a batch, each batch cut by `share`.

    To get behind `start_batch` batches they are read again and dropped; of data with `state_dict` and
    `load_state_dict` only those since the last state that `place` holds. Either way the marks are compared;
    where a state did not bring the data back, all is read again.

    Args:
        source: the person's loader, or any iterable of batches.
        seed: of the streams under which everything is drawn.
        epoch: given to ``set_epoch`` where the source, its dataset or a sampler of it has that.
        start_batch: batches to get behind.
        share: ``(batch) -> batch``, what one rank takes.
        place: what `place` returned in the process that was stopped.
        renew: ``() -> source`` makes the source anew; needed where `place` holds a state.

    `notices` says what was done, and `exact` whether the stream came as before.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        seed: int,
        epoch: int = 0,
        start_batch: int = 0,
        share: Callable[[Any], Any] = lambda batch: batch,
        place: Place | None = None,
        renew: Callable[[], Any] | None = None,
    ) -> None:
        self.source, self.seed, self.epoch, self.start_batch = source, seed, epoch, start_batch
        self.share, self.renew = share, renew
        fits = place is not None and (place["epoch"], place["batch"]) == (epoch, start_batch)
        self._wanted: Place = place if place is not None and fits else {}
        self.notices: list[str] = []
        self.first = b""  # the mark of the epoch's first batch, where that was read
        self._marks: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._states: deque[tuple[int, bytes, Any, Any]] = deque(maxlen=KEPT)
        self._state_due = 0.0

    @property
    def num_workers(self) -> int:
        """The same setting of the wrapped DataLoader."""
        return int(getattr(self.source, "num_workers", 0))

    @property
    def multiprocessing_context(self) -> Any:
        """The same setting of the wrapped DataLoader."""
        return getattr(self.source, "multiprocessing_context", None)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._from_start():
            yield self.share(batch)

    def place(self, batch: int) -> Place:
        """What a checkpoint keeps to get behind `batch` batches of this pass; plain values and tensors."""
        found: Place = {"epoch": self.epoch, "batch": batch, "mark": dict(self._marks).get(batch, b"").hex()}
        states = [state for state in self._states if state[0] < batch]  # at least one batch to check it by
        if states and found["mark"]:
            number, mark, state, streams = states[-1]
            found["state"] = {"batch": number, "mark": mark.hex(), "state": state, "streams": streams}
        return found

    def _from_start(self) -> Iterator[Any]:
        if not self.start_batch:
            yield from self._read(0, b"", None)
            return
        begin = time.monotonic()
        state = self._wanted.get("state")
        if state is not None and self.renew is not None:
            rest = self._behind(self._read(state["batch"], bytes.fromhex(state["mark"]), state))
            if self._came_again():
                self._tell(state["batch"], begin)
                yield from rest
                return
            self.notices.append("the state that the data gave did not bring them back to their place")
            self.source = self.renew()
        rest = self._behind(self._read(0, b"", None))
        self._tell(0, begin)
        yield from rest

    def _behind(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read up to the start; the marks tell how far that was possible."""
        self._marks.clear()
        while (not self._marks or self._marks[-1][0] < self.start_batch) and self._next(batches):
            pass
        return batches

    def _next(self, batches: Iterator[Any]) -> bool:
        missing = object()
        return next(batches, missing) is not missing

    def _came_again(self) -> bool:
        wanted = self._wanted.get("mark")
        return not wanted or (bool(self._marks) and self._marks[-1][1].hex() == wanted)

    def _tell(self, since: int, begin: float) -> None:
        seconds = time.monotonic() - begin
        where = f"batch {self.start_batch} of epoch {self.epoch + 1}"
        if not self._came_again():
            self.notices.append(
                f"resumed, not bit-exact: up to {where} the data came otherwise than before the stop: this "
                "epoch sees some samples twice and others never; a seed of its own makes a shuffle exact"
            )
        elif not since:
            spared = "" if seconds < 10 else "; a dataset that keeps its place (state_dict) would not"
            self.notices.append(
                f"to go on behind {where}, what comes before it was read again ({seconds:.1f} s): "
                f"the data can only be read in order{spared}"
            )

    def _read(self, number: int, mark: bytes, state: Place | None) -> Iterator[Any]:
        """The batches behind `number`, from a state of the source on or from its beginning."""
        streams = Streams(self.seed)
        keeper = keeper_of(self.source)
        self._states.clear()
        with streams:
            self._prepare()
            if state is not None:
                try:
                    keeper.load_state_dict(state["state"])
                except Exception:  # of another version of the data: as one that does not bring them back
                    return
            batches = iter(self.source)
            if state is not None:
                restore(from_plain(state["streams"]))
        while True:
            with streams:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                number, mark = number + 1, marked(mark, batch)
                self._marks.append((number, mark))
                self.first = mark if number == 1 else self.first
                if keeper is not None and time.monotonic() >= self._state_due:
                    self._keep_state(number, mark, keeper)
            yield batch

    def _prepare(self) -> None:
        generator = getattr(self.source, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(self.seed)
        owners: list[Any] = [self.source]
        owners += (getattr(self.source, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        owners.append(getattr(owners[-1], "sampler", None))
        for owner in {id(owner): owner for owner in owners}.values():
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)

    def _keep_state(self, number: int, mark: bytes, keeper: Stateful) -> None:
        begin = time.monotonic()
        try:
            state = keeper.state_dict()
        except Exception:  # a person's code: what gives no state is read again
            state = None
        cost = time.monotonic() - begin
        self._state_due = begin + max(STATE_SECONDS, STATE_COSTS * cost)
        if state is not None and is_plain(state):
            self._states.append((number, mark, state, to_plain(capture())))


def keeper_of(source: Any) -> Any:
    """What can tell the state of a stream and be brought back to it: the loader, or in one without workers
    its dataset; None where nothing can.
    """
    if keeps_state(source):
        return source
    plain = isinstance(source, DataLoader) and not iterates_itself(source)
    return source.dataset if plain and not source.num_workers and keeps_state(source.dataset) else None


def first_mark(source: Iterable[Batch], like: IterableData) -> bytes:
    """The mark of the first batch of another pass, begun as `like` was."""
    other = IterableData(source, like.seed, like.epoch)
    next(iter(other), None)
    return other.first


def keeps_state(thing: object) -> bool:
    """Has it what reads its state and what loads it?"""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def is_plain(state: object) -> bool:
    """Does it consist of what a checkpoint can hold and give back without running code?"""
    if isinstance(state, dict):
        return all(is_plain(part) for pair in state.items() for part in pair)
    if isinstance(state, (list, tuple)) and type(state) in (list, tuple):
        return all(map(is_plain, state))
    return type(state) in _PLAIN


def marked(before: bytes, batch: Batch) -> bytes:
    """16 bytes that depend on `before` and, by a few numbers or letters of each part, on `batch`."""
    found = hashlib.blake2b(before, digest_size=16)
    for part in contents(batch):
        if isinstance(part, str):  # of a path the name: the same file may lie elsewhere
            found.update(f"text {os.path.basename(part)[:_MARKED]} ".encode(errors="replace"))
            continue
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        few: Any = numpy.empty(0)
        if isinstance(part, numpy.ndarray):
            few = few if part.dtype.hasobject else part.reshape(-1)[:: max(1, part.size // _MARKED)]
        elif part.layout is torch.strided and part.numel():
            step = max(1, part.numel() // _MARKED)
            if part.dtype in _IN_NUMPY and part.device.type == "cpu":  # a quarter of the time
                few = part.detach().numpy().reshape(-1)[::step]
            else:
                few = part.detach().reshape(-1)[::step].cpu().contiguous().view(torch.uint8).numpy()
        found.update(few.tobytes())
    return found.digest()
