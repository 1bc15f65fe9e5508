"""Numbers smaller than float32's smallest normal one, 1.2e-38: processors are many times slower with them.

Whether they count as zero is a mode of each thread, which a new thread takes over from the one that starts it
(Intel's Software Developer's Manual, volume 1, sections 10.2.3.3 and 10.2.3.4).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vivace.torch_internals.tensors import Operator, OperatorMode, outside_modes
from vivace.words import number, percent

BITS = 71_362  # of 1e-40 as a float32; a thread that takes it for zero could not write it
SHARED = 32_768  # numbers from which torch shares an operator among threads, for each of them
RUNTIME = "libgomp"  # GNU's, which ends the threads of this thread alone; others end those of all
SLOWER = 1.25  # times, of a run's steps: then it is looked whether these numbers may be why
LOOKS = 11  # at the time of a sample: so many in the beginning, and the newest ones
VECTOR = 16  # float32 numbers that the widest instructions take at once: one of them slows down all
LOOKED_AT = 2**18  # numbers of a tensor among which they are counted, about
PAUSED_HARD = 2  # omp_pause_hard of OpenMP 5.0, section 3.2.44: the threads end
_IMPORTED_BY = os.getpid()


def are_flushed() -> bool:
    """Do all threads that share an operator of this one take them for zero?"""
    num = 2 * SHARED * torch.get_num_threads()
    with outside_modes():
        numbers = torch.full((num,), BITS, dtype=torch.int32, device="cpu").view(torch.float32)
        return not bool((0.5 * numbers).view(torch.int32).any())  # a thread that flushes compares no bits


def flush(on: bool) -> None:
    """Take them for zero, or not, in this thread and those that share its operators. Where it cannot be done
    nothing is: ask `are_flushed`.
    """
    torch.set_flush_denormal(on)
    if torch.get_num_threads() == 1 and _is_forked():
        return  # it would wait for ever for threads that were left behind
    for path in _openmp():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(PAUSED_HARD)  # new threads take the mode over


def denormals(tensor: torch.Tensor, most: int) -> tuple[int, int]:
    """Of how many numbers how many they are: in a float32 tensor's first rows, about `most`; of another
    dtype's none.
    """
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided or not tensor.numel():
        return tensor.numel(), 0
    if tensor.numel() > most:
        tensor = tensor.narrow(0, 0, max(1, len(tensor) * most // tensor.numel()))
    bits = tensor.detach().view(torch.int32) & 0x7FFFFFFF
    return tensor.numel(), int(((bits > 0) & (bits < 0x00800000)).sum())


@functools.cache
def times_slower() -> float:
    """How many times slower is this processor with them than with normal numbers, in a matrix product or a
    root? Intel's are in the first, AMD's in the second.
    """

    def seconds(operator: Callable[[torch.Tensor], torch.Tensor], number: float) -> float:
        square, taken = torch.full((128, 128), number, dtype=torch.float32, device="cpu"), []
        for _ in range(9):
            begin = time.perf_counter()
            operator(square)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    operators = (lambda square: square @ torch.ones_like(square)), torch.sqrt
    with outside_modes():
        return max(seconds(each, 1e-39) / max(seconds(each, 1.0), 1e-9) for each in operators)


def _is_forked() -> bool:
    """May the threads that this one shared its operators with be in another process?"""
    return os.getpid() != _IMPORTED_BY or multiprocessing.parent_process() is not None


def _openmp() -> list[str]:
    """GNU's OpenMP libraries that this process has loaded; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(path for path in paths if path.rpartition("/")[2].startswith(RUNTIME))


class Denormals(OperatorMode):
    """While it is entered, counts these numbers, and all, in what operators give on the processor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = self.denormal = 0

    @property
    def share(self) -> float:
        """Of the numbers that were looked at."""
        return self.denormal / self.numbers if self.numbers else 0.0

    def run_operator(self, function: Operator, arguments: Any, keywords: Any) -> Any:
        """Run it, as the mode around this one would."""
        found = function(*arguments, **keywords)
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if type(one) is torch.Tensor and one.device.type == "cpu":
                number, slow = denormals(one, LOOKED_AT)
                self.numbers, self.denormal = self.numbers + number, self.denormal + slow
        return found


class SlowNumbers:
    """Tells once in a run that its steps have become slower, where these numbers may be why.

    They are counted in the backward pass of a step, which is slower for that, and whose numbers are the same:
    once in the beginning, and then. A disk or another process makes steps slower too: they may be why where
    so many more of them could explain it.
    """

    def __init__(self, device: torch.device) -> None:
        self._ended = device.type != "cpu"
        self._first: list[float] = []
        self._newest: deque[float] = deque(maxlen=LOOKS)
        self._before: float | None = None  # their share in the beginning
        self._slower = 0.0  # times

    @property
    def wants_a_share(self) -> bool:
        """Is the next step to be looked at?"""
        return self._slower > 0.0 or (self._before is None and len(self._first) == LOOKS)

    def note(self, seconds: float) -> None:
        """Since the last time a sample took so long."""
        if self._ended:
            return
        (self._first if len(self._first) < LOOKS else self._newest).append(seconds)
        if len(self._newest) == LOOKS:
            slower = statistics.median(self._newest) / max(statistics.median(self._first), 1e-12)
            self._slower = slower if slower >= SLOWER else 0.0

    def sentence(self, share: float) -> str:
        """What has come of the run, and what helps, where they are this share of a step's numbers; empty
        where that explains nothing.
        """
        if self._before is None:
            self._before = share
            return ""
        slower, self._slower = self._slower, 0.0
        self._newest.clear()  # the next answer is of other steps
        vectors = min(1.0, VECTOR * (share - self._before))  # that hold one, at most
        if vectors <= 0.0 or vectors * (times_slower() - 1.0) < slower - 1.0:
            return ""
        self._ended = True
        return (
            f"a step takes {number(slower)} times as long as in the beginning, and {percent(share)} of the "
            "numbers of its backward pass lie below 1.2e-38, with which this processor is up to "
            f"{number(times_slower())} times slower: that may be why, and [techniques.flush_denormals] in a "
            "plan takes them for zero"
        )
