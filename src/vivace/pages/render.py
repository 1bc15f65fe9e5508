"""Pages from templates: each one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

from pathlib import Path

import jinja2

from vivace import words
from vivace.events import metric_title
from vivace.pages import charts
from vivace.pages.answer import Answer, capital, shown_parts

_TEMPLATES = Path(__file__).parent / "templates"
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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({filter.__name__: filter for filter in _FILTERS})
    parts = shown_parts(answer.parts)
    return environment.get_template(template.name).render(
        answer=answer, parts=parts, charts=charts, words=words, **values
    )
