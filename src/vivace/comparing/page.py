"""The page of a comparison: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from markupsafe import Markup

from vivace import words
from vivace.comparing.compared import Compared, answer
from vivace.comparing.sides import Side
from vivace.files import finite, replace_text, require_page
from vivace.pages import charts
from vivace.pages import render as pages

_TEMPLATE = Path(__file__).parent / "templates" / "compare.html.jinja"
OWN = ("compare.html", "compare.json")


def write(found: Compared, folder: Path) -> Compared:
    """Write ``compare.html`` and ``compare.json``; returns it with the page's path. Raises FolderError."""
    page = folder / "compare.html"
    named = dataclasses.replace(found, page_path=str(page))
    require_page(page)
    replace_text(page, render(named))
    replace_text(folder / "compare.json", json.dumps(finite(named.to_dict()), indent=1) + "\n")
    return named


def render(found: Compared) -> str:
    """The page as text. Every value is escaped."""
    return pages.render(
        _TEMPLATE, answer(found), found=found, picture=_picture(found), courses=_courses(found)
    )


def _picture(found: Compared) -> Markup | None:
    """What a step takes on both sides, beside each other; None where that may not be compared."""
    if found.not_comparable:
        return None
    sides = (("before", found.before, "plain"), ("after", found.after, "plan"))
    shares = charts.lengths([side.unit_seconds for _, side, _ in sides])
    rows = [
        charts.Row(name, charts.bar(share, kind), words.duration(side.unit_seconds), note=_spread(side))
        for (name, side, kind), share in zip(sides, shares, strict=True)
    ]
    return charts.rows(rows)


def _courses(found: Compared) -> Markup | None:
    """The metric of both trainings on one axis of minutes; None where one of them has none at two times,
    or their metrics are different ones.
    """
    series = {"reference": found.before.course, "plan": found.after.course}
    if min(map(len, series.values())) < 2 or found.before.metric_name != found.after.metric_name:
        return None
    name = found.after.metric_name
    return charts.courses(name[:1].upper() + name[1:], series)


def _spread(side: Side) -> str:
    """How much the blocks of steps vary."""
    if not side.blocks:
        return side.path
    told = " to ".join(map(words.duration, (min(side.blocks), max(side.blocks))))
    return f"{side.path}: {words.count(len(side.blocks), 'block')} of steps, {told}"
