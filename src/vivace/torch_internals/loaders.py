"""Private names of the DataLoader, and of torchvision's data sets."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from vivace.torch_internals import attribute, named

LoaderIterator: Any = named(
    "torch.utils.data.dataloader._BaseDataLoaderIter", lost="the time that a loop waits for data is not seen"
)
"""What iterating over a DataLoader gives."""

WorkersIterator: Any = named(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    lost="the time that workers take to end counts as training",
)
"""The same where the loader has workers."""

END_WORKERS = "_shutdown_workers"
"""The method of `WorkersIterator` that ends the workers."""
attribute(WorkersIterator, END_WORKERS, lost="the time that workers take to end counts as training")
has_ended: Callable[[Any], bool] = attribute(
    WorkersIterator, "_shutdown", lost="the time that workers take to end counts as training"
)
"""Are the workers of this iterator told to end?"""


def end_workers_of(error: BaseException) -> bool:
    """End the workers of the loader that raised `error`; returns whether such a loader did.

    Else the error's traceback keeps the loader's iterator until garbage is collected, perhaps after the
    queues by which it tells its workers to end: torch then waits five seconds for each of them (torch 2.15).
    """
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    iterators = [owner for owner in owners if isinstance(owner, WorkersIterator)]
    for iterator in iterators:
        getattr(iterator, END_WORKERS)()
    return bool(iterators)


_page_lock: Any = named(
    "torch.utils.data._utils.pin_memory.pin_memory",
    lost="a lack of page-locked memory for a loader is told as the GPU's",
)


def while_page_locking(error: BaseException) -> bool:
    """Was `error` raised as a loader with ``pin_memory=True``, and no workers, copied a batch?"""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is getattr(_page_lock, "__code__", None) for frame in frames)


FETCHERS: tuple[Any, ...] = (
    named("torch.utils.data._utils.fetch._MapDatasetFetcher", lost="it is not seen what fetching data does"),
    named(
        "torch.utils.data._utils.fetch._IterableDatasetFetcher",
        lost="it is not seen what fetching streamed data does",
    ),
)
"""The classes whose ``fetch`` reads and collates one batch, in the process or in a worker."""

raise_if_worker_died: Callable[[], None] = named(
    "torch._C._error_if_any_worker_fails", lost="the death of a loader's worker is noticed late"
)
"""Raises RuntimeError where a worker of any loader has died."""

handle_deaths: Callable[[], None] = named(
    "torch.utils.data._utils.signal_handling._set_SIGCHLD_handler",
    lost="the death of a loader's worker may cut a step in two",
)
"""Puts torch's handler of dead workers in place; it does so once in a process, whoever calls it."""

FILE_LISTS = ("samples", "imgs", "paths", "files", "image_paths", "filenames", "_image_files", "images")
"""Attributes under which data sets keep their files: torchvision's, and those of the many like them."""

_ITERATING = "_get_iterator"
attribute(DataLoader, _ITERATING, lost="a loader that makes its batches in its own way is not told apart")


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Does its class make batches in its own way, which a plain loader with the same functions lacks?"""
    kind = type(loader)
    own = getattr(kind, _ITERATING, None) is not getattr(DataLoader, _ITERATING, None)
    return own or kind.__iter__ is not DataLoader.__iter__


attribute(DataLoader, "_iterator", lost="persistent workers of which one has died cannot be started again")


def workers_run(loader: object) -> bool:
    """Has the loader persistent workers that are running already?"""
    return getattr(loader, "_iterator", None) is not None


def forget_workers(loader: DataLoader[Any]) -> None:
    """Let the loader start its persistent workers again: one of them is dead."""
    if workers_run(loader):
        loader._iterator = None
