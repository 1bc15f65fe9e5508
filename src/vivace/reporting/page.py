"""The page: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vivace import words
from vivace.errors import FolderError
from vivace.events import metric_title
from vivace.files import replace_text
from vivace.job import without_folder
from vivace.ledger import Ratio
from vivace.pages import charts, sameness
from vivace.pages import render as pages
from vivace.reporting import memory, phrases
from vivace.reporting.answering import answer
from vivace.reporting.content import Bar, Content
from vivace.reporting.course import Course, course
from vivace.reporting.pictures import drawn
from vivace.reporting.reading import load, page_of_another

_MOST_DOTS = 60
_TEMPLATE = Path(__file__).parent / "templates" / "report.html.jinja"


def report(folder: str | os.PathLike[str], *, beside: str | os.PathLike[str] | None = None) -> Path:
    """Write ``report.html`` into a run's folder and return its path; the path of the page where another verb,
    such as ``run`` or ``compress``, has written its own into that folder.

    `beside` is the folder of another training of the job, such as that in strict fp32, whose metric is drawn
    on the same axis of minutes.

    Raises FolderError where a folder is missing, holds no run (with `beside`: no metric at two times, in
    either of both, or another job or metric), or cannot be written.
    """
    where = Path(folder)
    if beside is None and (written := page_of_another(where)) is not None:
        return written[0]
    path = where / "report.html"
    replace_text(path, render(*loaded(where, beside)))
    return path


def loaded(
    folder: str | os.PathLike[str], beside: str | os.PathLike[str] | None
) -> tuple[Content, Content | None]:
    """A run, and the other training where one is named. Raises FolderError as `report` does."""
    content, other = load(Path(folder)), None if beside is None else load(Path(beside))
    if other is not None:
        _require_metric(other)
        _require_metric(content)
        _require_one_job(content, other)
    return content, other


def _require_metric(content: Content) -> None:
    """Raises FolderError where a run's metric cannot stand beside another's."""
    if len(course(content).metrics) < 2:
        raise FolderError(
            f"the run in '{content.folder}' has no metric at two times, so none to draw beside another's: "
            "leave --beside out, or let it evaluate more often"
        )


def _require_one_job(content: Content, other: Content) -> None:
    """Raises FolderError where two runs trained different jobs, or their metrics are different ones."""
    one, two = content.training, other.training
    jobs = [str(run.get("job") or "") for run in (one, two)]
    if all(jobs) and without_folder(jobs[0]) != without_folder(jobs[1]):
        differ = f"trained {jobs[0]}, and the other {jobs[1]}"
    elif metric_title(one) != metric_title(two):
        differ = f"has {metric_title(one)} for its metric, and the other {metric_title(two)}"
    else:
        return
    raise FolderError(
        f"the run in '{content.folder}' {differ}: --beside draws two trainings of one job; `vivace compare` "
        "tells what differs between two jobs"
    )


def render(content: Content, beside: Content | None = None) -> str:
    """The page as text, with the time and the metric of another training. Every value is escaped."""
    curves = content.verdict.get("curves") or {}
    other = None if beside is None else course(beside)
    return pages.render(
        _TEMPLATE,
        answer(content, None if beside is None else beside.training),
        content=content,
        setting=phrases.setting,
        steps=phrases.steps,
        plain=sameness.plain,
        again=f"vivace report {shlex.quote(str(content.folder))}",
        baselines=_bars(content.baselines, words.number),
        waterfall=_waterfall(content),
        ratios=charts.ratios(v for r in content.measured for v in (r.ratio.low, _top(r.ratio))),
        predictions=_predictions(content),
        verdict_curves=_verdict_curves(curves),
        training=_training(content, other),
        both=_both(content, other),
        pictures=drawn(content.pictures),
        memory_bars=_bars(content.memory, words.size),
        memory_curve=memory.pareto(content),
        memory_sentence=memory.sentence(content),
        batch_sizes=memory.sizes(content),
        batch_plots=memory.speeds(content),
        batch_advice=memory.advice(content),
        step_shares=_step_shares(content),
    )


def _bars(bars: list[Bar], tell: Callable[[Any], str]) -> Markup | None:
    shares = charts.lengths([bar.value for bar in bars])
    rows = [
        charts.Row(
            bar.name,
            charts.bar(share, "plan" if bar.kept else "plain"),
            tell(bar.value),
            note=bar.note,
            kept=bar.kept,
        )
        for bar, share in zip(bars, shares, strict=True)
    ]
    return charts.rows(rows) if rows else None


def _waterfall(content: Content) -> Markup | None:
    gains = content.waterfall
    scale = charts.linear(0.0, max([1.0, *(_top(gain.ratio) for gain in gains)]) * 1.02, 6)
    rows = [
        charts.Row(
            gain.name,
            charts.step(scale, gain.before, gain.ratio.counts, gain.ratio.low, gain.ratio.high),
            words.speed(gain.ratio),
            words.change(gain.before, gain.ratio.counts) if gain.before else "",
        )
        for gain in gains
    ]
    return charts.rows(rows, scale) if rows else None


def _predictions(content: Content) -> Markup | None:
    found = content.predictions
    scale = charts.ratios(v for p in found for v in (p.low, p.high, p.ratio.low, p.ratio.high))
    rows = []
    for each in found:
        ratio, kind = each.ratio, "plan" if each.held else "bad"
        drawing = charts.predicted(scale, (each.low, each.high), ratio.low, ratio.estimate, ratio.high, kind)
        rows.append(
            charts.Row(each.name, drawing, words.times(ratio.estimate), words.interval(each.low, each.high))
        )
    return charts.rows(rows, scale) if rows else None


def _step_shares(content: Content) -> Markup | None:
    shares = content.profile.get("shares")
    known = {
        name: words.real(share) or 0.0 for name, share in (shares.items() if isinstance(shares, dict) else ())
    }
    return charts.shares(known) if known else None


def _top(ratio: Ratio) -> float:
    """Where an axis for a ratio may end: an interval too wide for an estimate would dwarf the others."""
    return min(ratio.high, 2 * ratio.counts)


def _verdict_curves(curves: dict[str, Any]) -> list[Markup]:
    """The losses, and their difference from the reference: what the loss curves are too coarse to show."""
    steps, sides = curves.get("steps") or [], []
    for name in ("plan", "low", "high"):
        pairs = zip(curves.get(name) or [], curves.get("reference") or [], strict=False)
        known = [(words.real(value), words.real(base)) for value, base in pairs]
        sides.append([None if value is None or base is None else value - base for value, base in known])
    losses = {name: curves.get(name) or [] for name in ("plan", "reference")}
    band = (curves.get("low") or [], curves.get("high") or [])
    drawn = (
        charts.lines("Loss", steps, losses, band),
        charts.lines("Loss minus strict fp32", steps, {"plan": sides[0]}, (sides[1], sides[2])),
    )
    return [plot for plot in drawn if plot is not None]


def _training(content: Content, beside: Course | None) -> list[Markup]:
    """One chart for each of loss, metric and speed that a training run wrote; a point is a mean of steps."""
    found = [_metric_over_minutes(content, beside)]
    titles = [("loss", "Training loss"), ("samples_per_second", "Samples a second")]
    if found == [None]:
        titles.insert(1, ("metric", "Metric"))
    for key, title in titles:
        lines = [line for line in content.metrics if words.real(line.get(key)) is not None]
        groups = charts.thin(lines)
        means = [statistics.fmean(line[key] for line in group) for group in groups]
        steps = [group[-1]["step"] for group in groups]
        plot = charts.lines(title, steps, {"plan": means}, origin=key == "samples_per_second")
        if len(means) > 1:
            found.append(plot)
    found.append(_watched(content))
    return [plot for plot in found if plot is not None]


def _watched(content: Content) -> Markup | None:
    """How far the watched steps were from strict fp32, under the limit; of close ones the farthest."""
    lines = [line for line in content.metrics if words.real(line.get("watch_score")) is not None]
    watched = content.training.get("watched")
    limit = words.real(watched.get("limit")) if isinstance(watched, dict) else None
    if len(lines) < 2:
        return None
    groups = charts.thin(lines, _MOST_DOTS)
    worst = [max(group, key=lambda line: float(line["watch_score"])) for group in groups]
    steps, scores = [line["step"] for line in worst], [line["watch_score"] for line in worst]
    dots = [each for score in scores for each in (score, None)]
    places = [steps[0], steps[-1], *(each for step in steps for each in (step, None))]
    series = {"points": [None, None, *dots]} | ({"reference": [limit, limit]} if limit is not None else {})
    unit = "step" if limit is None else f"step; the dashed line is the limit, {limit:.0f}"
    return charts.lines("Watched steps: how far from strict fp32", places, series, origin=True, unit=unit)


def _metric_over_minutes(content: Content, beside: Course | None) -> Markup | None:
    """The metric as the person waited for it, above that of another training where there is one."""
    own = course(content)
    if len(own.metrics) < 2:
        return None
    title = metric_title(content.training)
    series = {"plan": own.points}
    if beside is not None:
        series = {"reference": beside.points, **series}
    return charts.courses(title[:1].upper() + title[1:], series)


def _both(content: Content, beside: Course | None) -> dict[str, str]:
    """What the two lines are, and when each came to the other's last metric; empty without another."""
    own = course(content)
    if beside is None or len(own.metrics) < 2:
        return {}
    name = metric_title(content.training)
    return {"own": own.name, "other": beside.name, "reached": own.against(beside, name)}
