"""The model card as a page: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

from pathlib import Path

from vivace.exporting.answering import answer
from vivace.exporting.result import Exported
from vivace.pages import render as pages

_TEMPLATE = Path(__file__).parent / "templates" / "export.html.jinja"


def render(found: Exported) -> str:
    """The page as text. Every value is escaped."""
    return pages.render(_TEMPLATE, answer(found), found=found)
