"""The page of a profile: one self-contained HTML file, pictures inside, without a script or a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.pages import charts
from vivace.pages import render as pages
from vivace.profiling import pictures, together
from vivace.profiling.answering import answer

_TEMPLATE = Path(__file__).parent / "templates" / "profile.html.jinja"
_TOGETHER = _TEMPLATE.with_name("together.html.jinja")


def render(document: dict[str, Any]) -> str:
    """The page as text. Every value is escaped."""
    shares = charts.shares(document["shares"])
    if "law" in document:
        found = answer(document)
        return pages.render(_TOGETHER, found, d=document, shares=shares, basis=together.known_from)
    return pages.render(
        _TEMPLATE,
        answer(document),
        d=document,
        shares=shares,
        timeline=pictures.timeline(document),
        roofline=pictures.roofline(document),
        memory=pictures.memory(document),
    )
