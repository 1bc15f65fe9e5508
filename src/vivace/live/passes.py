"""A script's iterations over its loaders: for which of them workers can fetch, and what comes next."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vivace import words
from vivace.live.fetching import changed_memory, memory
from vivace.torch_internals.loaders import HereIterator, indices_of, num_yielded, replace_indices

if TYPE_CHECKING:
    from vivace.live.crew import Crew

NEAREST = 100  # things of a data set that are looked at before each batch
# Those of torch draw nothing between two batches that the script could see; Accelerate's is one of these.
SAMPLERS = {
    *(f"{kind.__module__}.{kind.__qualname__}" for kind in (SequentialSampler, RandomSampler)),
    *(f"{kind.__module__}.{kind.__qualname__}" for kind in (SubsetRandomSampler, WeightedRandomSampler)),
    "accelerate.data_loader.SeedableRandomSampler",
    "builtins.list",
    "builtins.range",
    "builtins.tuple",
}


class Ahead:
    """The indices of a pass: what the script asks for, some of it having been asked for ahead.

    `own` is what the script's iterator had, and `left` how many may still be taken from it ahead.
    """

    def __init__(self, own: Iterator[Any], left: int) -> None:
        self.own, self.left = own, left
        self.waiting: deque[Any] = deque()
        self.at_end: Callable[[], object] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        try:
            return self._pulled()
        except StopIteration:
            self.at_end()
            raise

    def _pulled(self) -> Any:
        self.left -= 1
        return next(self.own)

    def look(self, place: int) -> tuple[Any, ...]:
        """What comes so many places after the next one, as a tuple; empty where that may not be asked yet."""
        while len(self.waiting) <= place:
            if self.left <= 0:
                return ()
            self.waiting.append(self._pulled())
        return (self.waiting[place],)


class Pass:
    """One iteration over a loader. `why_not` says why workers cannot fetch for it, or is empty."""

    def __init__(self, loader: DataLoader[Any], iterator: object) -> None:
        self.why_not = _why_not(loader, iterator)
        self.data = loader.dataset, loader.collate_fn, loader.batch_size
        self.num_batches = 0 if self.why_not else len(loader)
        self.sampler = _sampler(loader)
        self.ahead: Ahead | None = None
        self.crew: Crew | None = None
        self.sent: deque[Any] = deque()  # asked of the crew, and not taken
        self._known: dict[str, object] = {}  # of the data, when the crew was forked
        self.crew_seconds = 0.0  # to start the newest crew and to end it

    def reads_as(self, other: Pass) -> bool:
        """Is the same read in the same way?"""
        (data, collate, size), (others, other_collate, other_size) = self.data, other.data
        code = getattr(collate, "__code__", collate)
        return (
            data is others
            and size == other_size
            and code is getattr(other_collate, "__code__", other_collate)
        )

    def begin(self, iterator: object) -> None:
        """Stand between the script's iterator and its indices."""
        if self.ahead is None:
            # The last may end the sampler, which draws from a generator of the script's then.
            last = 0 if getattr(self.sampler, "generator", None) is None else 1
            left = self.num_batches - last - num_yielded(iterator) - 1
            self.ahead = Ahead(indices_of(iterator), left)
            self.ahead.at_end = self.close
            replace_indices(iterator, self.ahead)  # type: ignore[arg-type]
            weakref.finalize(iterator, self.close)

    def man(self, crew: Crew) -> None:
        """Workers that were forked just now."""
        self.crew = crew
        self._known = self._memory()

    def leave_stale(self) -> None:
        """End workers that were forked before the script changed its data."""
        if self.crew is not None and changed_memory(self._known, self._memory()):
            self.close()

    def _memory(self) -> dict[str, object]:
        return memory(*self.data[:2], most=NEAREST)[0]

    def taken(self, index: object, *, twice: bool) -> Any:
        """The batch of `index` from the crew, who is told what comes next. Raises CannotFetch."""
        assert self.crew is not None
        assert self.ahead is not None
        while self.sent and self.sent[0] is not index:  # the script has read it meanwhile
            self.sent.popleft()
            self.crew.pass_over()
        if not self.sent:
            self._send(index, twice)
        self.sent.popleft()
        while len(self.sent) + 1 < self.crew.room:  # and the one that is waited for
            following = self.ahead.look(len(self.sent))
            if not following:
                break
            self._send(following[0], twice)
        return self.crew.take()

    def _send(self, index: object, twice: bool) -> None:
        assert self.crew is not None
        self.crew.ask(index, twice=twice)
        self.sent.append(index)

    def close(self) -> None:
        """End the workers."""
        self.sent.clear()
        if self.crew is not None:
            crew, self.crew = self.crew, None
            crew.close()
            self.crew_seconds = crew.own_seconds


def _why_not(loader: DataLoader[Any], iterator: object) -> str:
    """Why a loader's batches cannot be asked for ahead, in other processes; or empty."""
    if loader.num_workers:
        return f"its loader has {words.count(loader.num_workers, 'worker')} of its own"
    data, batches, sampler = loader.dataset, loader.batch_sampler, _sampler(loader)
    if isinstance(data, IterableDataset) or not isinstance(iterator, HereIterator):
        return "its data are a stream (IterableDataset), which workers would have to share"
    kind = type(sampler)
    if batches is not None and type(batches) is not BatchSampler:
        kind = type(batches)
    if f"{kind.__module__}.{kind.__qualname__}" not in SAMPLERS:
        return f"its {kind.__name__} may look at the training when it is asked for the next indices"
    if isinstance(sampler, RandomSampler) and sampler.generator is not None:
        own = sampler.replacement or sampler.num_samples != len(sampler.data_source)
        if own:
            return "its sampler draws from a generator of the script's own in the middle of a pass"
    return _of_system()


def _of_system() -> str:
    method = multiprocessing.get_start_method(allow_none=True)
    if sys.platform != "linux":
        return "workers that see the script's data as they are need Linux"
    if method not in (None, "fork"):
        return f"the script has chosen to start its processes by '{method}', and these would be forked"
    if multiprocessing.current_process().daemon:
        return "it is a process that may start no others"
    return ""


def _sampler(loader: DataLoader[Any]) -> Any:
    """What gives the order of samples; a loader that was given batches has another one beside, of no use."""
    batches = loader.batch_sampler
    return batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
