"""HTML from templates: pages, each one self-contained file without a script or an outside link, and cards."""

from __future__ import annotations

from pathlib import Path

import jinja2

from vivace import words
from vivace.events import metric_title
from vivace.pages import charts
from vivace.pages.answer import Answer, capital, shown_parts

_TEMPLATES = Path(__file__).parent / "templates"
_COLOURS = {"good": "#0a6b64", "plain": "#98968d", "open": "#b98a00", "bad": "#b3261e"}
_FILTERS = (
    capital,
    metric_title,
    words.duration,
    words.fast,
    words.number,
    words.percent,
    words.quantity,
    words.ratio,
    words.size,
    words.speed,
    words.times,
)


def render(template: Path, answer: Answer, **values: object) -> str:
    """The page of `template`, which extends ``base.html.jinja``, opened by `answer`. Values are escaped."""
    parts = shown_parts(answer)
    return _template(template).render(answer=answer, parts=parts, charts=charts, words=words, **values)


def card(answer: Answer) -> str:
    """An answer as a few lines of HTML, which a notebook shows where a cell ends with a result: without a
    script, a style sheet or a link, in the notebook's own colours. Escaped.
    """
    template, colour = _template(_TEMPLATES / "card.html.jinja"), _COLOURS[answer.tone]
    return template.render(answer=answer, parts=shown_parts(answer), colour=colour)


def _template(path: Path) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, _TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({filter.__name__: filter for filter in _FILTERS})
    return environment.get_template(path.name)
