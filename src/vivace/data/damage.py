"""Samples that cannot be read: which, what is done about them, and where they are listed."""

from __future__ import annotations

import bisect
import contextlib
import json
import operator
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from vivace import words
from vivace.blame import blame, file_of
from vivace.data.checksums import Checksums
from vivace.errors import JobError, SampleError
from vivace.files import open_own, read_own
from vivace.job import Job
from vivace.tensors.randomness import seed_streams
from vivace.torch_internals.loaders import FILE_LISTS

MOST_SHARE = 0.1  # of the samples read; more is no longer damage here and there
FEWEST = 10
# What Python raises where code is wrong; a file that is damaged raises something else.
_MISTAKES = (
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    NotImplementedError,
    SampleError,
    TypeError,
)


class Damage:
    """What a job does about samples that cannot be read, and the list of them. Workers get a copy.

    Args:
        policy: ``raise``, ``skip`` (the batch is smaller) or ``replace`` (by the batch's next readable one).
        path: where they are listed, one JSON line each; None: nowhere.
        checksums: of the files; one that differs cannot be read.
    """

    def __init__(
        self, policy: str = "raise", path: Path | None = None, checksums: Checksums | None = None
    ) -> None:
        self.policy, self.path, self.checksums = policy, path, checksums
        self.before = self._times()  # of an earlier part of the run
        self.reading: Callable[[str | int], None] = _nobody  # is told what is read, or the sample's index

    @classmethod
    def of(cls, job: Job, path: Path | None = None) -> Damage:
        """The policy and the checksums of a Job; `path` is the list of damaged samples."""
        return cls(job.damaged, path, None if job.checksums is None else Checksums(job.checksums))

    def read(self, dataset: Dataset[Any], indices: Sequence[Any], seed: int, many: bool = True) -> Any:
        """The samples of one batch; an empty list where all are skipped. `seed` is where its random streams
        begin. What the dataset's `__getitems__` gives is as it is: a collate function may count on that.

        Raises SampleError with index, path and what the dataset raised.
        """
        try:
            return self._read(dataset, indices, seed, many)
        finally:
            self.reading("")

    def _read(self, dataset: Dataset[Any], indices: Sequence[Any], seed: int, many: bool) -> Any:
        at_once = getattr(dataset, "__getitems__", None) if many else None
        if at_once is None and type(dataset) is TensorDataset:  # rows of tensors neither hang nor are damaged
            at_once = partial(_each, dataset)
        if at_once is not None and self.checksums is None:
            self.reading(f"samples {list(indices)}")
            try:
                return at_once(indices)
            except _MISTAKES:
                raise
            except Exception:  # one by one, to find out which
                seed_streams(seed)
        found = [self._one(dataset, index) for index in indices]
        good = [sample for one in found if one is not None for sample in one]
        if self.policy == "skip" or len(good) == len(found):
            return good
        if not good:
            raise SampleError(f"none of the samples {list(indices)} can be read: nothing could replace them")
        return [self._next(found, number) for number in range(len(found))]

    def _one(self, dataset: Dataset[Any], index: object) -> tuple[Any] | None:
        """The sample in a tuple; None where it is damaged and the policy says how to go on."""
        told = _plain(index)
        self.reading(told if type(told) is int else f"sample {told!r}")
        try:
            if self.checksums is not None:
                self.checksums.require(path_of(dataset, index))
            return (dataset[index],)
        except _MISTAKES:
            raise
        except Exception as error:
            path = path_of(dataset, index) or file_of(error)
            text = blame(error, path)
            if self.policy == "raise":
                raise SampleError(
                    f"sample {told!r}{_where(path)} cannot be read: {text}; mend it, or give the Job "
                    "damaged='skip' or 'replace'"
                ) from error
            self._list({"index": told, "path": path, "error": text})
            return None

    def _next(self, found: list[tuple[Any] | None], number: int) -> Any:
        turned = found[number:] + found[:number]
        return next(sample[0] for sample in turned if sample is not None)

    def _list(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            line = json.dumps(entry, default=repr) + "\n"
            file = open_own(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(file, line.encode())  # one call: lines of several workers do not mix
            finally:
                os.close(file)

    def listed(self) -> list[dict[str, Any]]:
        """Each damaged sample once, by its first reading: index, path, error, and `times` it was met."""
        found: dict[str, dict[str, Any]] = {}
        lines = read_own(self.path).splitlines() if self.path is not None else []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was torn
                entry = json.loads(line)
                known = found.setdefault(repr(entry["index"]), {**entry, "times": 0})
                known["times"] += 1
        return list(found.values())

    def _times(self) -> int:
        return sum(entry["times"] for entry in self.listed())

    def sentence(self) -> str:
        """How many were damaged, the first few of them, and where the others stand; empty where none was."""
        few = self.few()
        return few and f"{few}; all are listed in '{self.path}'"

    def few(self) -> str:
        """How many were damaged, and the first few of them; empty where none was."""
        found = self.listed()
        if not found:
            return ""
        few = "; ".join(map(_told, found[:3]))
        done = "skipped" if self.policy == "skip" else "replaced"
        were = f"{words.count(len(found), 'damaged sample')} {'was' if len(found) == 1 else 'were'}"
        return f"{were} {done}: {few}"

    def require_few(self, num_read: int) -> None:
        """Raises JobError where, beside `num_read` others, more than a tenth of the samples were damaged."""
        times = self._times() - self.before
        num_read += times
        if times > max(FEWEST, MOST_SHARE * num_read):
            first = _told(self.listed()[0])
            raise JobError(
                f"{times} of {num_read} samples could not be read, more than damaged='{self.policy}' may "
                f"hide; the first was {first}"
            )


def path_of(dataset: Any, index: object) -> str:
    """The file of a sample, where the dataset keeps a list of files as torchvision's do; else empty.

    A Subset's dataset, and those that a ConcatDataset joins, are asked.
    """
    index = _plain(index)
    if isinstance(dataset, ConcatDataset) and isinstance(index, int) and 0 <= index < len(dataset):
        number = bisect.bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[number - 1] if number else 0
        return path_of(dataset.datasets[number], index - before)
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
        return path_of(dataset.dataset, dataset.indices[index])
    for name in FILE_LISTS:
        try:
            entries = getattr(dataset, name)
            if isinstance(entries, Dataset):  # which this one wraps: it has the list, and reads its samples
                return path_of(entries, index)
            entry = entries[index]
            first = entry[0] if isinstance(entry, (tuple, list)) else entry
        except Exception:  # it has none, or what reads files, and fails once more
            continue
        if isinstance(first, (str, os.PathLike)):
            return os.fspath(first)
    return ""


def _where(path: str) -> str:
    return f" ('{path}')" if path else ""


def _told(entry: dict[str, Any]) -> str:
    return f"{entry['index']}{_where(entry['path'])}: {entry['error']}"


def _plain(index: object) -> object:
    """A sample's index as an int, where NumPy or torch holds the number; any other one as it is."""
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return index


def _each(dataset: TensorDataset, indices: Sequence[Any]) -> list[Any]:
    return [dataset[index] for index in indices]


def _nobody(_: str | int) -> None: ...
