"""Numbers smaller than float32's smallest normal one, 1.2e-38: processors are many times slower with them.

Whether they count as zero is a mode of each thread, which a new thread takes over from the one that starts it
(Intel's Software Developer's Manual, volume 1, sections 10.2.3.3 and 10.2.3.4).
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from vivace.words import number, percent

BITS = 71_362  # of 1e-40 as a float32; a thread that takes it for zero could not write it
SHARED = 32_768  # numbers from which torch shares an operator among threads, for each of them
RUNTIME = "libgomp"  # GNU's, which ends the threads of this thread alone; others end those of all
SLOWER = 1.25  # times, of a run's steps: then it is looked whether these numbers may be why
LEAST_SHARE = 1e-4  # of the numbers that its optimizer keeps, for that
LOOKS = 11  # at the time of a sample: so many in the beginning, and the newest ones
LOOKED_AT = 16_384  # numbers of each tensor
PAUSED_HARD = 2  # omp_pause_hard of OpenMP 5.0, section 3.2.44: the threads end


def are_flushed() -> bool:
    """Do all threads that share an operator of this one take them for zero?"""
    numbers = torch.full((2 * SHARED * torch.get_num_threads(),), BITS, dtype=torch.int32).view(torch.float32)
    return not bool((0.5 * numbers).view(torch.int32).any())  # a thread that flushes compares no bits


def flush(on: bool) -> None:
    """Take them for zero, or not, in this thread and those that share its operators. Where it cannot be done
    nothing is: ask `are_flushed`.
    """
    torch.set_flush_denormal(on)
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


def _openmp() -> list[str]:
    """GNU's OpenMP libraries that this process has loaded; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(path for path in paths if path.rpartition("/")[2].startswith(RUNTIME))


class SlowNumbers:
    """Tells once in a run that its steps have become slower, where these numbers may be why."""

    def __init__(self, device: torch.device) -> None:
        self._ended = device.type != "cpu"
        self._first: list[float] = []
        self._newest: deque[float] = deque(maxlen=LOOKS)

    def sentence(self, seconds: float, held: Callable[[], Iterable[torch.Tensor]]) -> str:
        """What has come of a run of which a sample takes so long now, and what helps; empty where its steps
        are as fast as they were, it is something else, or it was told before.

        `held` gives what its optimizer keeps, in which those of the gradients show.
        """
        if self._ended:
            return ""
        (self._first if len(self._first) < LOOKS else self._newest).append(seconds)
        if len(self._newest) < LOOKS:
            return ""
        slower = statistics.median(self._newest) / max(statistics.median(self._first), 1e-12)
        if slower < SLOWER:
            return ""
        self._newest.clear()  # the next answer is of other steps
        counts = [denormals(one, LOOKED_AT) for one in held()]
        share = sum(slow for _, slow in counts) / max(1, sum(least for least, _ in counts))
        if share < LEAST_SHARE:
            return ""
        self._ended = True
        return (
            f"a step takes {number(slower)} times as long as in the beginning, and {percent(share)} of what "
            "the optimizer keeps lies below 1.2e-38; with such numbers a processor is slow, and "
            "[techniques.flush_denormals] in a plan takes them for zero"
        )
