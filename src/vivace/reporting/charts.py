"""Geometry of the charts, without colour or markup: positions are percent, paths live in a box of 1000."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vivace.words import real

BOX = 1000
MOST_POINTS = 300
_NICE_RATIOS = (
    0.05,
    0.1,
    0.2,
    0.5,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` with the values at which it is labelled."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The position of a value in percent of the axis, kept inside it."""
        if self.logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(share, 0.0), 1.0), 2)


def linear(low: float, high: float, num_ticks: int = 5) -> Scale:
    """An axis over [low, high] with ticks at round values inside it."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(round(index * step, 12) for index in range(first, last + 1)))


def ratios(values: Iterable[float]) -> Scale:
    """A logarithmic axis that holds 1 and every positive value: twice and half are equally far from 1."""
    positive = [value for value in values if value > 0]
    low, high = min([*positive, 1.0]) / 1.04, max([*positive, 1.0]) * 1.04
    low, high = min(low, 0.93), max(high, 1.07)
    ticks: list[float] = [1.0]
    for tick in sorted(_NICE_RATIOS, key=lambda nice: abs(math.log(nice))):
        apart = all(abs(math.log(tick / other)) > math.log(high / low) / 6 for other in ticks)
        if low <= tick <= high and apart:
            ticks.append(tick)
    return Scale(low, high, tuple(sorted(ticks)), logarithmic=True)


def _decades(low: float, high: float) -> Scale:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 3)]
    inside = tuple(float(f"{tick:.6g}") for tick in ticks if low <= tick <= high)
    return Scale(low, high, inside[:: math.ceil(len(inside) / 6) or 1], logarithmic=True)


@dataclasses.dataclass(frozen=True)
class Plot:
    """Lines by name and a band as SVG paths, with the two axes."""

    across: Scale
    up: Scale
    lines: dict[str, str]
    band: str


def plot(
    steps: Sequence[Any],
    lines: Mapping[str, Sequence[Any]],
    band: Sequence[Sequence[Any]] = ((), ()),
    *,
    origin: bool = False,
) -> Plot | None:
    """Lines over steps with an optional (low, high) band; None where no finite point exists.

    Losses that fall far are drawn on a logarithmic axis; `origin` draws from zero.
    """
    places = [real(step) for step in steps]
    values = [v for series in (*lines.values(), *band) for v in map(real, series) if v is not None]
    known = [place for place in places if place is not None]
    if not values or not known:
        return None
    low, high = min(values), max(values)
    margin = 0.04 * (high - low)
    if origin:
        up = linear(0.0, high * 1.04)
    elif low > 0 and high / low > 20:
        up = _decades(low / 1.1, high * 1.1)
    else:
        up = linear(low - margin, high + margin)
    across = linear(min(known), max(known))
    drawn = {name: _path(_points(places, series, across, up)) for name, series in lines.items()}
    return Plot(across, up, drawn, _band(places, band, across, up))


def thin(rows: Sequence[Any], most: int = MOST_POINTS) -> list[list[Any]]:
    """Rows in at most `most` neighbouring groups of equal length."""
    length = math.ceil(len(rows) / most) or 1
    return [list(rows[start : start + length]) for start in range(0, len(rows), length)]


def _points(
    places: Sequence[float | None], values: Sequence[Any], across: Scale, up: Scale
) -> list[tuple[int, int] | None]:
    points: list[tuple[int, int] | None] = []
    for place, value in zip(places, map(real, values), strict=False):
        missing = place is None or value is None
        points.append(None if missing else _point(place or 0.0, value or 0.0, across, up))
    every = math.ceil(len(points) / MOST_POINTS) or 1
    return points[::every] + (points[-1:] if every > 1 else [])


def _point(place: float, value: float, across: Scale, up: Scale) -> tuple[int, int]:
    return round(across.at(place) * BOX / 100), round(BOX - up.at(value) * BOX / 100)


def _path(points: Sequence[tuple[int, int] | None]) -> str:
    """A line that is interrupted where a point is missing; a lone point becomes a dot."""
    parts, drawing = [], False
    for index, point in enumerate(points):
        if point is not None:
            parts.append(f"{'L' if drawing else 'M'}{point[0]} {point[1]}")
            if not drawing and (index + 1 == len(points) or points[index + 1] is None):
                parts.append("h0")
        drawing = point is not None
    return "".join(parts)


def _band(places: Sequence[float | None], band: Sequence[Sequence[Any]], across: Scale, up: Scale) -> str:
    lower, upper = (_points(places, side, across, up) for side in band)
    pairs = [(a, b) for a, b in zip(lower, upper, strict=False) if a is not None and b is not None]
    if len(pairs) < 2:
        return ""
    edge = [a for a, _ in pairs] + [b for _, b in reversed(pairs)]
    return "M" + "L".join(f"{x} {y}" for x, y in edge) + "Z"
