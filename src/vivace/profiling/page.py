"""The page of a profile: one self-contained HTML file, pictures inside, without a script or a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.files import replace_text
from vivace.pages import charts
from vivace.pages import render as pages
from vivace.profiling import pictures
from vivace.profiling.answering import answer

_TEMPLATE = Path(__file__).parent / "templates" / "profile.html.jinja"


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the page. Raises FolderError where the folder cannot be written."""
    replace_text(path, render(document))


def render(document: dict[str, Any]) -> str:
    """The page as text. Every value is escaped."""
    return pages.render(
        _TEMPLATE,
        answer(document),
        d=document,
        shares=charts.shares(document["shares"], "Shares of the step"),
        timeline=pictures.timeline(document),
        roofline=pictures.roofline(document),
        memory=pictures.memory(document),
    )
