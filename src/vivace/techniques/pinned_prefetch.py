"""Copy the next batch to the GPU while this one trains: page-locked memory, a stream of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch

MOST_ITERATORS = 8  # that are remembered at a time, with what was begun of them
MOST_HELD = 2  # of those that live on by it, with their loaders' workers: one to train and one to validate on


@dataclasses.dataclass(frozen=True)
class PinnedPrefetch(Technique):
    """One batch ahead, in the loader's order; costs the GPU memory of one more batch.

    Where a loop leaves an iterator before its end, the batch that is ahead is the first of the next pass over
    it.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.EXACT,
        summary="the next batch copied to the GPU while this one trains",
        source="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        devices=("cuda",),
        step_memory="batch",
        measured_on=("cuda",),
    )

    def apply(self, build: Build) -> None:
        """Start the copies in the seam `batches`; placing a batch that is there already costs nothing."""
        begun = _Begun()
        build.on_close(begun.clear)

        def batches(following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
            begin, complete = _copies(build.device)
            build.notes["prefetched"] = True
            with pinning(loader, build.device):  # so do the copies of it that other techniques make here
                arriving = following(loader)
            waiting = begun.of(loader)
            passing = one_ahead(arriving, begin, complete, waiting)
            return _while_pinning(loader, build.device, passing, lambda: begun.leave(waiting))

        build.wrap(Seam.BATCHES, batches)
        build.wrap(Seam.VALIDATION, batches)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Batches that came through the session were on the GPU before their step."""
        if not seen.notes.get("prefetched"):
            raise Refused("it changed nothing: no batch was read through the session")
        return "the next batch is copied on a stream of its own"

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At best the placing of a batch costs no time at all, and the loader works ahead of the GPU."""
        waiting = profile.shares.get("place", 0.0) + profile.shares.get("data", 0.0)
        return (0.98, 1 / max(0.05, 1 - waiting))


class _Begun:
    """Batches that were begun and not handed out, by the iterator that they came from."""

    def __init__(self) -> None:
        self._kept: list[tuple[Callable[[], object], list[Any]]] = []
        self._held: list[tuple[Iterator[Batch], list[Any]]] = []

    def of(self, loader: Iterable[Batch]) -> list[Any]:
        """The list of such batches of an iterator; a new one where each pass begins anew."""
        if not isinstance(loader, Iterator):
            return []
        self._kept = [pair for pair in self._kept if pair[0]() is not None][-MOST_ITERATORS:]
        for known, waiting in (*((ref(), waiting) for ref, waiting in self._kept), *self._held):
            if known is loader:
                return waiting
        found: list[Any] = []
        try:
            self._kept.append((weakref.ref(loader), found))
        except TypeError:  # as of a cycle or a zip
            self._held = [*self._held[1 - MOST_HELD :], (loader, found)]
        return found

    def leave(self, waiting: list[Any]) -> None:
        """A pass over its iterator is over: unless a batch is waiting, another begins as the first did."""
        if not waiting:
            self._kept = [pair for pair in self._kept if pair[1] is not waiting]
            self._held = [pair for pair in self._held if pair[1] is not waiting]

    def clear(self) -> None:
        """Let them go."""
        self._kept.clear()
        self._held.clear()


def one_ahead(
    batches: Iterable[Any], begin: Callable[[Any], Any], complete: Callable[[Any], Any], waiting: list[Any]
) -> Iterator[Any]:
    """``complete(begin(batch))`` for every batch in order, each begun before the one ahead is handed out.

    First come those that are `waiting`, where what was begun and not handed out stays when a loop leaves.
    """
    for batch in batches:
        waiting.append(begin(batch))
        if len(waiting) == 2:
            yield complete(waiting.pop(0))
    while waiting:
        yield complete(waiting.pop(0))


@contextlib.contextmanager
def pinning(loader: Iterable[Batch], device: torch.device) -> Iterator[None]:
    """While entered, a DataLoader gives batches in page-locked memory, where it is read for a GPU.

    With workers a thread of torch's own copies them there, and not the one that launches kernels: for 256
    images of ResNet-50 that takes as long as a step. Neither order nor random streams change.
    """
    from torch.utils.data import DataLoader

    from vivace.tensors.settings import hold

    with contextlib.ExitStack() as stack:
        if device.type == "cuda" and isinstance(loader, DataLoader):
            write = partial(setattr, loader, "pin_memory")
            stack.callback(hold((id(loader), "pin_memory"), lambda: loader.pin_memory, write, True))
        yield


def _while_pinning(
    loader: Iterable[Batch], device: torch.device, batches: Iterator[Any], leave: Callable[[], None]
) -> Iterator[Any]:
    try:
        with pinning(loader, device):
            yield from batches
    finally:
        leave()


def _copies(device: torch.device) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Begin copying a batch on a side stream, and make the training stream wait for exactly that copy."""
    import torch

    from vivace.tensors.page_locked import page_locking
    from vivace.tensors.trees import map_tensors, tensors

    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # What no DataLoader with workers has pinned is pinned here, by the thread that has loaded it, too.
        with page_locking():
            pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    def begin(batch: Batch) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            moved = map_tensors(batch, copy)
            return moved, side.record_event()

    def complete(begun: tuple[Any, torch.cuda.Event]) -> Any:
        moved, copied = begun
        training = torch.cuda.current_stream(device)
        training.wait_event(copied)
        for tensor in (one for one in tensors(moved) if one.is_cuda):  # lengths of packed sequences are not
            tensor.record_stream(training)  # the side stream owns its memory: reuse must wait for us
        return moved

    return begin, complete
