"""An answer as a few lines of HTML, which a notebook shows where a cell ends with a result."""

from __future__ import annotations

from pathlib import Path

import jinja2

from vivace.pages.answer import Answer, capital, shown_parts

_TEMPLATES = Path(__file__).parent / "templates"
_COLOURS = {"good": "#0a6b64", "plain": "#98968d", "open": "#b98a00", "bad": "#b3261e"}


def card(answer: Answer) -> str:
    """The answer without a script, a style sheet or a link: it takes the notebook's own colours. Escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["capital"] = capital
    return environment.get_template("card.html.jinja").render(
        answer=answer, parts=shown_parts(answer.parts), colour=_COLOURS[answer.tone]
    )
