"""The page of a profile: one self-contained HTML file, pictures inside, without a script or a link."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import jinja2

from vivace.files import replace_text
from vivace.inspection.table import human_bytes
from vivace.profiling import pictures

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(document: dict[str, Any], path: Path) -> None:
    """Write the page. Raises FolderError where the folder cannot be written."""
    replace_text(path, render(document))


def render(document: dict[str, Any]) -> str:
    """The page as text. Every value is escaped; the pictures are our own SVG."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        size=human_bytes, milliseconds=milliseconds, percent=percent, count=count, rate=rate
    )
    drawn = {name: _svg(figure) for name, figure in pictures.draw_all(document).items()}
    return environment.get_template("profile.html.jinja").render(d=document, pictures=drawn)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with three digits."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    if 0 < value < 0.01:
        return "<0.01 ms"
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def percent(share: float | None) -> str:
    """A share as a percentage; "<1 %" where it would read as nothing."""
    if share is None:
        return "-"
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def count(number: float | None) -> str:
    """A large number with a decimal prefix."""
    if not number:
        return "-"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}".rstrip()
        number /= 1000
    return f"{number:.3g} P"


def rate(number: float) -> str:
    """A rate with as many digits as can be read: 1,505 or 12.3."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


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
