"""Keep freed memory in the process.

glibc hands large blocks back to the kernel, and every step faults them in again, page by page.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class HostAllocator(Technique):
    """Large tensors from the heap instead of own mappings, and a heap that never shrinks.

    Acts on the whole process. glibc cannot be asked for its thresholds, so closing sets them to where glibc's
    own adaptation ends (mappings from 32 MiB, trimming from 64 MiB); what it adapted to before is lost.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.EXACT,
        summary="freed memory stays in the process instead of being faulted in again every step",
        source="https://man7.org/linux/man-pages/man3/mallopt.3.html",
        devices=("cpu",),
        measured_on=("cpu",),
        varies=True,
    )

    def apply(self, build: Build) -> None:
        """Raise glibc's thresholds through mallopt; refuse another C library, and a glibc that declines."""
        libc = ctypes.CDLL(None)
        build.require(hasattr(libc, "gnu_get_libc_version"), "the C library of this system is not glibc")
        build.on_close(lambda: _back_to_defaults(libc))
        # Older glibc takes no threshold above 32 MiB; then no mappings at all.
        mapped = libc.mallopt(M_MMAP_THRESHOLD, 1024 * MIB) or libc.mallopt(M_MMAP_MAX, 0)
        kept = libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and libc.mallopt(M_TOP_PAD, 64 * MIB)
        build.require(mapped and kept, "glibc's mallopt declined the thresholds")

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Page faults of a step, which must have fallen by at least half."""
        text = f"{reference.page_faults:.0f} -> {seen.page_faults:.0f} page faults a step"
        if not seen.page_faults <= reference.page_faults / 2 or not reference.page_faults:
            raise Refused(f"it changed nothing: {text}")
        return text

    def plain(self) -> Plain:
        """glibc's variables, which it reads when a program starts."""
        return Plain(
            environment={
                "MALLOC_MMAP_MAX_": "0",
                "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
                "MALLOC_TOP_PAD_": str(64 * MIB),
            }
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Nothing where a step faults in less than a MiB."""
        return [cls()] if profile.page_faults >= 256 else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """A fault costs 0.1 to 1 microsecond for each of the threads that wait."""
        share = min(0.5, profile.page_faults * 1e-6 * machine.num_cores / profile.step_seconds)
        return (1.0, 1 / (1 - share))


def _back_to_defaults(libc: ctypes.CDLL) -> None:
    libc.mallopt(M_MMAP_MAX, 65536)
    libc.mallopt(M_MMAP_THRESHOLD, 32 * MIB)
    libc.mallopt(M_TRIM_THRESHOLD, 64 * MIB)
    libc.mallopt(M_TOP_PAD, 128 * 1024)
    libc.malloc_trim(0)
