"""The page of an advice: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from markupsafe import Markup

from vivace import words
from vivace.advising import tables
from vivace.advising.advice import Advice
from vivace.advising.answering import answer
from vivace.advising.predict import LIMITS
from vivace.errors import FolderError
from vivace.files import finite, replace_text, require_page
from vivace.pages import charts
from vivace.pages import render as pages

_TEMPLATE = Path(__file__).parent / "templates" / "advise.html.jinja"
MOST_POINTS = 60


def write(advice: Advice, folder: Path) -> Advice:
    """Write ``advise.html`` and ``advise.json``; returns the advice with the page's path. Raises
    FolderError."""
    page = folder / "advise.html"
    named = dataclasses.replace(advice, page_path=str(page))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_page(page)
        replace_text(page, render(named))
        replace_text(folder / "advise.json", json.dumps(finite(named.to_dict()), indent=1) + "\n")
    except OSError as error:
        raise FolderError(f"the advice cannot be written to '{folder}': {error.strerror}") from None
    return named


def render(advice: Advice) -> str:
    """The page as text. Every value is escaped."""
    return pages.render(
        _TEMPLATE,
        answer(advice),
        advice=advice,
        chart=chart(advice),
        rows=tables.shown(advice),
        marks=tables.marks_of(advice),
        fit_of=tables.fit_of,
        time_of=tables.time_of,
        worth_it=tables.worth_it,
        bought=tables.bought,
        limits=LIMITS,
    )


def chart(advice: Advice) -> Markup | None:
    """Time across and money up, of offers with a price; what no other beats in both stands out. None where
    fewer than two have one.
    """
    front = {offer.name for offer in advice.pareto}
    chosen = [offer.name for offer in advice.picks.values()]
    priced = [o for o in advice.offers if o.usd and o.prediction.fits]
    priced = sorted(
        priced,
        key=lambda o: (o.name not in chosen, o.name not in front, o.prediction.num_gpus, o.usd or 0.0),
    )[:MOST_POINTS]
    if len(priced) < 2:
        return None
    dots = [
        charts.Dot(
            offer.hours,
            offer.usd or 1.0,
            offer.low_hours,
            offer.high_hours,
            offer.name if offer.name in front or offer.name in chosen else "",
            f"{offer.name}: {tables.time_of(offer)}, {words.money(offer.usd, offer.low_usd, offer.high_usd)}",
            offer.name in front,
            4.5 if offer.name in front else 3.0,
        )
        for offer in priced
    ]
    across = _axis([v for o in priced for v in (o.low_hours, o.high_hours)], (1 / 3600, 1 / 60, 1.0, 24.0))
    up = _axis([o.usd or 1.0 for o in priced], (1.0,))
    tell = (lambda hours: words.duration(3600 * hours), lambda usd: f"${usd:g}")
    return charts.scatter("Time against money of every offer", dots, across, up, "time of the training", tell)


def _axis(values: list[float], units: tuple[float, ...]) -> charts.Scale:
    """A logarithmic axis around `values`, labelled at round numbers of its `units`."""
    low, high = min(values) / 1.15, max(values) * 1.15
    if high / low <= 2:
        low, high = low / 1.5, high * 1.5
    return charts.Scale(low, high, tuple(_ticks((low, high), units)), logarithmic=True)


def _ticks(axis: tuple[float, float], units: tuple[float, ...]) -> list[float]:
    """Round values inside an axis: 1, 2 and 5 times powers of ten of a unit, at most five."""
    found: list[float] = []
    for number, unit in enumerate(units):
        end = units[number + 1] if number + 1 < len(units) else math.inf
        for power in range(-6, 9):
            values = [unit * factor * 10.0**power for factor in (1, 2, 5)]
            low = unit if number else 0.0
            found += [v for v in values if axis[0] <= v <= axis[1] and low <= v < end]
    return found[:: math.ceil(len(found) / 5) or 1]
