"""The page of an advice: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jinja2

from vivace import words
from vivace.advising import tables
from vivace.advising.advice import Advice
from vivace.advising.choose import Offer
from vivace.advising.predict import LIMITS
from vivace.errors import FolderError
from vivace.files import replace_text

_TEMPLATES = Path(__file__).parent / "templates"
MOST_POINTS = 60
WIDE, TALL = 16.0, 5.0  # percent of the chart that a label takes


@dataclasses.dataclass(frozen=True)
class Point:
    """An offer on the chart: positions in percent, its whisker of time, and what it is."""

    x: float
    y: float
    low: float
    high: float
    label: str
    title: str
    best: bool


@dataclasses.dataclass(frozen=True)
class Chart:
    """Time across and money up, both logarithmic."""

    points: tuple[Point, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


def write(advice: Advice, folder: Path) -> Advice:
    """Write ``advise.html`` and ``advise.json``; returns the advice with the page's path. Raises
    FolderError."""
    page = folder / "advise.html"
    named = dataclasses.replace(advice, page_path=str(page))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(page, render(named))
        replace_text(folder / "advise.json", json.dumps(named.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise FolderError(f"the advice cannot be written to '{folder}': {error.strerror}") from None
    return named


def render(advice: Advice) -> str:
    """The page as text. Every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("advise.html.jinja").render(
        advice=advice,
        headline=headline(advice),
        chart=chart(advice),
        rows=tables.shown(advice),
        marks={offer.name: name for name, offer in reversed(advice.picks.items())},
        fit_of=tables.fit_of,
        time_of=tables.time_of,
        worth_it=tables.worth_it,
        limits=LIMITS,
        words=words,
    )


def headline(advice: Advice) -> tuple[str, str]:
    """The figure and the sentence that open the page."""
    best = advice.picks.get("best value") or advice.picks.get("fastest")
    if best is None:
        return "No", "card meets the budget and the deadline with enough memory"
    cost = f" for {words.money(best.usd, best.low_usd, best.high_usd)}" if best.usd is not None else ""
    return (
        best.name,
        f"{advice.amount.words} in {tables.time_of(best)}{cost}",
    )


def chart(advice: Advice) -> Chart | None:
    """Offers with a price; the Pareto front stands out. None where fewer than two have one."""
    front = {offer.name for offer in advice.pareto}
    priced = [o for o in advice.offers if o.usd and o.prediction.fits]
    priced = sorted(priced, key=lambda o: (o.name not in front, o.prediction.num_gpus, o.usd or 0.0))[
        :MOST_POINTS
    ]
    if len(priced) < 2:
        return None
    across = _axis([v for o in priced for v in (o.low_hours, o.high_hours)])
    up = _axis([o.usd or 1.0 for o in priced])
    points = [_point(o, across, up, o.name in front) for o in priced]
    points = list(reversed(_apart(points)))
    return Chart(
        tuple(points),
        tuple(
            (_at(v, across), words.duration(3600 * v)) for v in _ticks(across, (1 / 3600, 1 / 60, 1.0, 24.0))
        ),
        tuple((_at(v, up), f"${v:g}") for v in _ticks(up, (1.0,))),
    )


def _point(offer: Offer, across: tuple[float, float], up: tuple[float, float], best: bool) -> Point:
    title = f"{offer.name}: {tables.time_of(offer)}, {words.money(offer.usd, offer.low_usd, offer.high_usd)}"
    x, low, high = (_at(v, across) for v in (offer.hours, offer.low_hours, offer.high_hours))
    return Point(x, 100 - _at(offer.usd or 1.0, up), low, high, offer.name if best else "", title, best)


def _apart(points: list[Point]) -> list[Point]:
    """The points with only those labels that cover no other."""
    kept: list[Point] = []
    for point in points:
        near = any(abs(p.x - point.x) < WIDE and abs(p.y - point.y) < TALL for p in kept if p.label)
        kept.append(dataclasses.replace(point, label="") if near else point)
    return kept


def _axis(values: list[float]) -> tuple[float, float]:
    low, high = min(values) / 1.15, max(values) * 1.15
    return (low, high) if high / low > 2 else (low / 1.5, high * 1.5)


def _at(value: float, axis: tuple[float, float]) -> float:
    return round(100 * math.log(value / axis[0]) / math.log(axis[1] / axis[0]), 2)


def _ticks(axis: tuple[float, float], units: tuple[float, ...]) -> list[float]:
    """Round values inside an axis: 1, 2 and 5 times powers of ten of a unit, at most seven."""
    found: list[float] = []
    for number, unit in enumerate(units):
        end = units[number + 1] if number + 1 < len(units) else math.inf
        for power in range(-6, 9):
            values = [unit * factor * 10.0**power for factor in (1, 2, 5)]
            low = unit if number else 0.0
            found += [v for v in values if axis[0] <= v <= axis[1] and low <= v < end]
    return found[:: math.ceil(len(found) / 7) or 1]
