"""Measured ceilings: what this machine reaches, beside which every speed is read. Imports torch to measure.

Keys and units (a key that could not be measured is absent, and named with its reason):

    matmul_DTYPE                 FLOP/s (int8: operations/s) of one large square product
    convolution_DTYPE_LAYOUT     FLOP/s of a 3x3 convolution as in ResNet-50's third stage, 256 -> 256
                                 channels on 14x14, padding 1: forward and both gradients; nchw or nhwc
    copy_device                  bytes/s read plus bytes/s written, between buffers larger than the caches
    host_to_device_pageable, host_to_device_pinned, device_to_host_pinned      bytes/s, one copy at a time
    launch_seconds               seconds a tiny operator takes to be handed over, many in a row
    all_reduce                   bytes/s on the bus, 2 (n - 1) / n times size / time, between n ranks
    disk_read                    bytes/s of four readers of a file in the working folder, past the page cache
    jpeg_decode_per_core         images/s of 500x375 pixels, decoded by Pillow to RGB on one core

fp32 is strict; matmul_tf32 and convolution_tf32_* have TF32 allowed. Every gauge is read once a round, rounds
follow each other until the time is up, so that a disturbance hits all gauges alike and an interruption keeps
what was read. A ceiling is the median of the better half of its readings: what disturbs, only slows down. Its
spread is how far apart that half's readings lie, as a share of the ceiling.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TypeAlias

from vivace.inspection.reading import Gauge, Reading, Unmeasured

LOWER_IS_BETTER = ("launch_seconds",)
LARGEST_ROUNDS = 25

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the share of the time that is spent, and what is measured now."""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """One measured ceiling: its value in SI units, the spread of its readings, and when."""

    value: float
    spread: float
    num_readings: int
    measured_at: str


@dataclasses.dataclass
class Survey:
    """All that one measurement found: ceilings by key, and the reason of every key that is absent.

    Those `unreached` are absent because it ended first.
    """

    ceilings: dict[str, Ceiling] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = False
    unreached: set[str] = dataclasses.field(default_factory=set)

    @property
    def values(self) -> dict[str, float]:
        """The ceilings alone, in SI units."""
        return {key: ceiling.value for key, ceiling in self.ceilings.items()}


def survey(device: str, *, seconds: float, progress: Progress | None = None) -> Survey:
    """Measure the ceilings of `device` (``cpu``, ``cuda`` or ``cuda:1``) in about `seconds`, in SI units.

    Nothing is stored. An interruption (Ctrl-C) ends it with what was read until then.
    """
    tell = progress or (lambda share, what: None)
    begin = time.monotonic()
    tell(0.0, "importing torch")
    found = Survey()
    readings: dict[str, list[float]] = {}
    try:
        from vivace.inspection import gauges

        with gauges.open_device(device, found.absent) as all_gauges:
            _read_rounds(all_gauges, begin, seconds, tell, readings, found.absent)
    except KeyboardInterrupt:
        found.interrupted = True
    except Exception as error:  # torch missing or broken, or the device unknown to it
        found.absent[device] = reason_of(error)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for key, values in readings.items():
        if values:
            value, spread = best_half(values, lower_is_better=key in LOWER_IS_BETTER)
            found.ceilings[key] = Ceiling(value, spread, len(values), now)
        elif key not in found.absent:
            found.absent[key] = "interrupted" if found.interrupted else "no time was left for it"
            found.unreached.add(key)
    return found


def best_half(values: list[float], *, lower_is_better: bool = False) -> tuple[float, float]:
    """Median of the better half of readings, and that half's range as a share of it."""
    half = sorted(values, reverse=not lower_is_better)[: (len(values) + 1) // 2]
    value = statistics.median(half)
    return value, (max(half) - min(half)) / value


def reason_of(error: BaseException) -> str:
    """The first line of an error, with its class where the text does not stand alone."""
    lines = str(error).strip().splitlines()
    if isinstance(error, Unmeasured):
        return lines[0]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def _read_rounds(
    gauges: list[Gauge],
    begin: float,
    seconds: float,
    tell: Progress,
    readings: dict[str, list[float]],
    absent: dict[str, str],
) -> None:
    """Fill `readings`, gauge by gauge and round by round, until the time is up; failures go to `absent`."""
    readings.update({gauge.key: [] for gauge in gauges})
    ready: dict[str, Reading] = {}
    for gauge in _in_rounds(gauges):
        spent = (time.monotonic() - begin) / seconds
        if spent >= 1:
            return
        if gauge.key in absent:
            continue
        tell(spent, gauge.key)
        try:
            if gauge.key not in ready:
                ready[gauge.key] = gauge.prepare()
            readings[gauge.key].append(ready[gauge.key]())
        except Exception as error:  # an operator that this build lacks, memory that is not there
            absent[gauge.key] = reason_of(error)
            ready.pop(gauge.key, None)
            del readings[gauge.key]


def _in_rounds(gauges: list[Gauge]) -> Iterator[Gauge]:
    for _ in range(LARGEST_ROUNDS):
        yield from gauges
