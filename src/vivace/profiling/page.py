"""The page of a profile: one self-contained HTML file, pictures inside, without a script or a link."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import jinja2

from vivace import words
from vivace.files import replace_text
from vivace.profiling import pictures

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the page. Raises FolderError where the folder cannot be written."""
    replace_text(path, render(document))


def render(document: dict[str, Any]) -> str:
    """The page as text. Every value is escaped; the pictures are our own SVG."""
    drawn = {name: _svg(figure) for name, figure in pictures.draw_all(document).items()}
    return environment().get_template("profile.html.jinja").render(d=document, pictures=drawn)


def environment() -> jinja2.Environment:
    """Where the page's template is found, with numbers as words for its filters."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    named = (words.size, words.duration, words.percent, words.quantity, words.number)
    found.filters.update({filter.__name__: filter for filter in named})
    return found


def _svg(figure: Any) -> str:
    """A figure as inline SVG: scales with the page, and its texts take the page's font and colours."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    body = text.getvalue()
    body = body[body.index("<svg") :]
    body = re.sub(
        r'(<svg[^>]*?) height="[^"]*" width="[^"]*"|(<svg[^>]*?) width="[^"]*" height="[^"]*"',
        r"\1\2",
        body,
        count=1,
    )
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for name, colour in pictures.COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return body
