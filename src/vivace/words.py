"""Numbers as people read and write them: the one owner of units, digits, plurals, intervals. No torch here.

Numbers have three significant digits, and thousands separated; a unit changes where the number would have a
fourth digit. What is not known, None or not finite, is a dash. No value is told in two ways: whoever shows a
number calls this module.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Protocol

_LONGEST_SECONDS = 1e15
_LARGEST = 1e15  # from here on a float is told by its power of ten
UNKNOWN = _DASH = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_FOURTH_DIGIT = 999.5  # from here on a number rounded to three digits has four
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_CLOCK = ((59.5, 1.0, "s"), (59.5 * 60, 60.0, "min"), (71.5 * 3600, 3600.0, "h"), (math.inf, 86400.0, "d"))


SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_AMOUNT = re.compile(r"(\d*\.?\d+(?:e\d+)?)\s*([a-z]*)\s*")


class Estimate(Protocol):
    """A ratio with the bounds of its interval; a wide one has no estimate worth telling."""

    @property
    def estimate(self) -> float:
        """The most likely value of the ratio."""

    @property
    def low(self) -> float:
        """The lower end of its 95 % interval."""

    @property
    def high(self) -> float:
        """The upper end of its 95 % interval."""

    @property
    def wide(self) -> bool:
        """Is the interval too wide for an estimate?"""


def real(value: object) -> float | None:
    """`value` as a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for one
        return None


def number(value: object) -> str:
    """Three significant digits, and whole numbers in full: ``1,235``, ``41.2``, ``0.00312``, ``4.1e-07``, and
    ``3.2e+22``, which has no more digits.
    """
    found = real(value)
    if found is None:
        return UNKNOWN
    sign = _MINUS if found < 0 else ""
    rounded = abs(float(f"{found:.3g}"))
    if isinstance(value, int):
        return f"{sign}{abs(value):,}"
    if 100 <= rounded < _LARGEST or not rounded:
        return f"{sign}{abs(found):,.0f}"
    if 1 <= rounded < 100:
        return f"{sign}{abs(found):.{1 if rounded >= 10 else 2}f}"
    return f"{sign}{abs(found):.3g}"


def count(value: object, noun: str) -> str:
    """How many of something: ``1 epoch``, ``3 epochs``, ``1,200 steps``."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def size(value: object) -> str:
    """A number of bytes: ``0 B``, ``512 MiB``, ``11.4 GiB``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    scaled, unit = _scaled(found, _BINARY, 1024.0)
    return f"{number(round(scaled) if unit == 'B' else scaled)} {unit}"


def quantity(value: object, unit: str = "") -> str:
    """A rate, or a number too large to be told in full, with its prefix: ``768 TFLOP/s``, ``25.6 M``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    scaled, prefix = _scaled(found, _DECIMAL, 1000.0)
    whole = not prefix and scaled == int(scaled)
    return f"{number(int(scaled) if whole else scaled)} {prefix}{unit}".rstrip()


def _scaled(value: float, units: tuple[str, ...], step: float) -> tuple[float, str]:
    """The number of the smallest unit in which it has three digits, and that unit."""
    for unit in units[:-1]:
        if abs(value) < _FOURTH_DIGIT:
            return value, unit
        value /= step
    return value, units[-1]


def duration(value: object) -> str:
    """Seconds: ``1.70 µs``, ``38.4 ms``, ``4.2 s``, ``6 min 10 s``, ``2 h 05 min``, ``3 d 02 h``."""
    found = real(value)
    if found is None or abs(found) > _LONGEST_SECONDS:
        return UNKNOWN
    if found < 0:
        return _MINUS + duration(-found)
    scale, unit = _clock(found)
    if scale < 1.0:
        return f"{number(found / scale)} {unit}"
    if unit == "s":
        return f"{found:.1f} s" if found < 9.95 and found != int(found) else f"{found:.0f} s"
    parts, smaller = {"min": (60, "s"), "h": (60, "min"), "d": (24, "h")}[unit]
    whole, rest = divmod(round(found * parts / scale), parts)
    return f"{whole} {unit} {rest:02d} {smaller}" if rest else f"{whole} {unit}"


def durations(value: float, low: float, high: float) -> str:
    """An estimate of seconds with its interval, in the estimate's unit: ``4.20 h (3.50–5.10)``."""
    scale, unit = _clock(value)
    told, *bounds = (number(float(seconds) / scale) for seconds in (value, low, high))
    return f"{told} {unit} ({_DASH.join(bounds)})"


def _clock(seconds: float) -> tuple[float, str]:
    """The unit in which a time is told, in seconds, and its name."""
    if 0.0 < seconds < 1e-3 * _FOURTH_DIGIT:
        return (1e-3, "ms") if seconds >= 1e-6 * _FOURTH_DIGIT else (1e-6, "µs")
    return next((scale, unit) for limit, scale, unit in _CLOCK if seconds < limit)


def percent(value: object) -> str:
    """A share: ``42 %``, ``3.1 %``, ``<0.1 %``, ``0 %``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    shown = abs(found) * 100
    if 0.0 < shown < 0.05:
        return "<0.1 %" if found > 0 else f"{_MINUS}<0.1 %"
    return f"{_MINUS if found < 0 else ''}{shown:.{0 if shown >= 9.95 or not shown else 1}f} %"


def change(before: float, after: float) -> str:
    """What a step adds to the speed, with its sign: ``+42 %``."""
    return f"{(after / before - 1) * 100:+.0f} %".replace("-", _MINUS) if before else UNKNOWN


def times(value: object) -> str:
    """A ratio: ``2.31×``, ``41.2×``, ``0.04×``, ``0.0013×``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return (f"{found:.2f}" if not found or 0.01 <= abs(found) < 9.995 else number(found)) + _TIMES


def interval(low: object, high: object) -> str:
    """The bounds of a ratio: ``2.24–2.38``."""
    return _DASH.join(times(bound).removesuffix(_TIMES) for bound in (low, high))


def speed(value: Estimate) -> str:
    """What a ratio is known to be: ``2.31×``; of an interval too wide for an estimate ``at least 1.40×``."""
    if value.wide and value.low > 1.0:
        return f"at least {times(value.low)}"
    return times(value.estimate)


def ratio(value: Estimate | None) -> str:
    """A ratio with its interval: ``2.31× (2.24–2.38)``, ``at least 1.40× (1.40–3.24)``."""
    return f"{speed(value)} ({interval(value.low, value.high)})" if value else UNKNOWN


def fast(value: Estimate) -> str:
    """How fast something is beside something else: ``2.31× as fast``; another wording is there none."""
    return f"{speed(value)} as fast"


def fast_between(low: float, high: float) -> str:
    """The same of bounds alone: ``1.20–1.50× as fast``."""
    return f"{interval(low, high)}{_TIMES} as fast"


def money(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """US dollars: ``$12.3 (9.80–15.1)``, ``under $0.01``; ``no price`` without one."""
    if value is None:
        return "no price"
    text = "under $0.01" if 0 < value < 0.01 else f"${_dollars(value)}"
    return text if low is None or high is None else f"{text} ({_dollars(low)}{_DASH}{_dollars(high)})"


def _dollars(value: float) -> str:
    return f"{value:.2f}" if value < 1.0 else number(float(value))


def energy(value: float | None) -> str:
    """Kilowatt hours: ``12.3 kWh``; a dash where the board's power is not known."""
    return UNKNOWN if value is None else f"{number(float(value))} kWh"


def unless_said(text: str, said: str) -> str:
    """`text`, or nothing where `said` holds it already, whatever its case."""
    return "" if text.lower() in said.lower() else text


def less(text: str, told: str) -> str:
    """`text` without `told` at its beginning, and the semicolon behind that."""
    return text.removeprefix(told).removeprefix("; ")


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A number with one of `units` (in small letters; empty: without one) as a person writes it: ``5m``,
    ``20GiB``, ``1h30m``, ``6 min 10 s``. None where it is none, or is not more than 0.
    """
    written = text.strip().lower()
    parts = list(_AMOUNT.finditer(written))
    sizes = [units.get(part[2], math.nan) for part in parts]
    falling = all(larger > smaller for larger, smaller in itertools.pairwise(sizes))
    several_without = len(parts) > 1 and any(not part[2] for part in parts)
    if "".join(part[0] for part in parts) != written or not falling or several_without:
        return None
    value = sum(float(part[1]) * size for part, size in zip(parts, sizes, strict=True))
    return value if 0 < value < math.inf else None
