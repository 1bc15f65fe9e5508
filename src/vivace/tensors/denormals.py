"""Numbers smaller than float32's smallest normal one, 1.2e-38: processors are many times slower with them.

Whether they count as zero is a mode of each thread, which a new thread takes over from the one that starts it
(Intel's Software Developer's Manual, volume 1, sections 10.2.3.3 and 10.2.3.4).
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

BITS = 71_362  # of 1e-40 as a float32; a thread that takes it for zero could not write it
SHARED = 32_768  # numbers from which torch shares an operator among threads, for each of them
RUNTIME = "libgomp"  # GNU's, which ends the threads of this thread alone; others end those of all
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
