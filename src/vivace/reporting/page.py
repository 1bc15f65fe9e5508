"""The page: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

import os
import shlex
import statistics
import webbrowser
from pathlib import Path
from typing import Any

import jinja2

from vivace import words
from vivace.files import replace_text
from vivace.ledger import Ratio
from vivace.reporting import charts, memory, phrases
from vivace.reporting.content import Content
from vivace.reporting.reading import load

_TEMPLATES = Path(__file__).parent / "templates"


def report(folder: str | os.PathLike[str], *, open_page: bool = False) -> Path:
    """Write ``report.html`` into a run's folder and return its path; `open_page` shows it in the browser.

    Raises FolderError where the folder is missing, holds no run, or cannot be written.
    """
    where = Path(folder)
    content = load(where)
    path = where / "report.html"
    replace_text(path, render(content))
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    return path


def render(content: Content) -> str:
    """The page as text. Every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = (
        words.number,
        words.times,
        words.speed,
        words.ratio,
        words.percent,
        words.size,
        words.duration,
        phrases.steps,
    )
    environment.filters.update({filter.__name__: filter for filter in named})
    environment.filters["setting"] = phrases.setting
    curves = content.verdict.get("curves") or {}
    return environment.get_template("page.html.jinja").render(
        content=content,
        words=words,
        again=f"vivace report {shlex.quote(str(content.folder))}",
        bars=_lengths([bar.value for bar in content.baselines]),
        memory_bars=_lengths([bar.value for bar in content.memory]),
        waterfall=charts.linear(0.0, max([1.0, *(_top(g.ratio) for g in content.waterfall)]) * 1.02, 6),
        ratios=charts.ratios(v for r in content.measured for v in (r.ratio.low, _top(r.ratio))),
        predicted=charts.ratios(v for p in content.predictions for v in (p.low, p.high, *_ends(p.ratio))),
        loss=_loss(curves),
        difference=_difference(curves),
        training=_training(content),
        memory_curve=memory.pareto(content),
        memory_sentence=memory.sentence(content),
        batch_sizes=memory.sizes(content),
        batch_plots=memory.speeds(content),
        batch_advice=memory.advice(content),
    )


def _ends(ratio: Any) -> tuple[float, float]:
    return ratio.low, ratio.high


def _top(ratio: Ratio) -> float:
    """Where an axis for a ratio may end: an interval too wide for an estimate would dwarf the others."""
    return min(ratio.high, 2 * ratio.counts)


def _lengths(values: list[float | None]) -> list[float]:
    """Bar lengths in percent of the longest."""
    longest = max([value for value in values if value] or [1.0])
    return [round(100 * (value or 0.0) / longest, 2) for value in values]


def _loss(curves: dict[str, Any]) -> charts.Plot | None:
    lines = {name: curves.get(name) or [] for name in ("plan", "reference")}
    return charts.plot(curves.get("steps") or [], lines, (curves.get("low") or [], curves.get("high") or []))


def _difference(curves: dict[str, Any]) -> charts.Plot | None:
    """The plan's loss and the envelope minus the reference: what the loss curves are too coarse to show."""
    sides = []
    for name in ("plan", "low", "high"):
        pairs = zip(curves.get(name) or [], curves.get("reference") or [], strict=False)
        known = [(words.real(value), words.real(base)) for value, base in pairs]
        sides.append([None if value is None or base is None else value - base for value, base in known])
    return charts.plot(curves.get("steps") or [], {"plan": sides[0]}, (sides[1], sides[2]))


def _training(content: Content) -> list[tuple[str, charts.Plot]]:
    """One chart for each of loss, metric and speed that a training run wrote; a point is a mean of steps."""
    found = []
    for key, title in (("loss", "Loss"), ("metric", "Metric"), ("samples_per_second", "Samples a second")):
        lines = [line for line in content.metrics if words.real(line.get(key)) is not None]
        groups = charts.thin(lines)
        means = [statistics.fmean(line[key] for line in group) for group in groups]
        plot = charts.plot(
            [group[-1]["step"] for group in groups], {"plan": means}, origin=key == "samples_per_second"
        )
        if plot is not None and len(means) > 1:
            found.append((title, plot))
    return found
