"""The page of a compression: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from vivace import words
from vivace.compressing.answering import answer, in_order, stayed
from vivace.compressing.result import Compressed, Tried
from vivace.events import metric_title
from vivace.pages import charts
from vivace.pages import render as pages

_TEMPLATE = Path(__file__).parent / "templates" / "compress.html.jinja"


def render(found: Compressed) -> str:
    """The page as text. Every value is escaped."""
    return pages.render(
        _TEMPLATE,
        answer(found),
        found=found,
        chart=chart(found),
        rows=[found.reference, *in_order(found)],
        stayed=stayed,
        missing=[one for one in found.tried if one.status == "missing"],
    )


def judged(found: Compressed, one: Tried) -> bool:
    """Is the metric of this form known beside that of the model as it was trained?"""
    return one.change is not None or one is found.reference


def front(found: Compressed) -> list[Tried]:
    """The forms that no other one beats both in latency and in the metric."""
    known = [one for one in found.tried if one.p50 is not None and judged(found, one)]
    return [one for one in known if not any(_beats(found, other, one) for other in known if other is not one)]


def _beats(found: Compressed, one: Tried, other: Tried) -> bool:
    mine, theirs = _metric(found, one), _metric(found, other)
    assert one.p50 is not None
    assert other.p50 is not None
    return one.p50 <= other.p50 and mine >= theirs and (one.p50, -mine) != (other.p50, -theirs)


def _metric(found: Compressed, one: Tried) -> float:
    return float(one.change["value"] if one.change else found.subject["metric"])


def chart(found: Compressed) -> Markup | None:
    """Time of a call across and the metric up; what no other form beats in both stands out."""
    known = [one for one in found.tried if one.p50 is not None and one.ratio and judged(found, one)]
    if len(known) < 2:
        return None
    best = {one.name for one in front(found)}
    whole = found.reference.p50 or 0.0
    dots = []
    for one in sorted(known, key=lambda one: (one.name not in best, one.p50 or 0.0)):
        assert one.ratio is not None
        low, value, high = (whole / r for r in (one.ratio.high, one.ratio.estimate, one.ratio.low))
        text = f"{one.name}: {words.duration(value)}, {words.number(_metric(found, one))}"
        dots.append(
            charts.Dot(
                value,
                _metric(found, one),
                low,
                high,
                one.name,
                text,
                one.name in best,
                4.5 if one.name in best else 3.0,
            )
        )
    across = charts.decades(min(dot.low for dot in dots) / 1.3, max(dot.high for dot in dots) * 1.3)
    levels = [dot.up for dot in dots]
    room = max(max(levels) - min(levels), found.margin) * 0.6
    up = charts.linear(min(levels) - room, max(levels) + room)
    tell = (words.duration, words.number)
    title = f"Time of a call against {metric_title(found.subject)} of every form"
    return charts.scatter(title, dots, across, up, f"time of a call of {found.batch}", tell)
