"""The page of a sweep: one self-contained HTML file, without a script or an outside link."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from vivace import words
from vivace.pages import charts
from vivace.pages import render as pages
from vivace.pages.answer import capital
from vivace.sweeping.answering import answer, cost_told, verdict
from vivace.sweeping.record import TrialRecord
from vivace.sweeping.result import Swept
from vivace.sweeping.space import told, value_told

_TEMPLATE = Path(__file__).parent / "templates" / "sweep.html.jinja"
MOST_ROWS = 100  # of the table of trials


def render(found: Swept) -> str:
    """The page as text. Every value is escaped."""
    order = sorted(found.trials, key=lambda t: -(t.metric if t.metric is not None else -1e300))
    return pages.render(
        _TEMPLATE,
        answer(found),
        found=found,
        history=history(found),
        importance=importance(found),
        parallel=parallel(found),
        front=front(found),
        rows=order[:MOST_ROWS],
        left_out=max(0, len(order) - MOST_ROWS),
        parameters_told=told,
        cost_told=cost_told,
        verdict=verdict(found),
    )


def history(found: Swept) -> Markup | None:
    """Every trial's metric in their order, and the best so far; None without two of them."""
    seen = [trial for trial in found.trials if trial.metric is not None]
    if len(seen) < 2:
        return None
    best, roof = -float("inf"), list[tuple[float, float]]()
    for trial in seen:
        if trial.state == "complete":
            best = max(best, trial.metric or 0.0)
        if best > -float("inf"):
            roof.append((trial.number, best))
    dots = [
        charts.Dot(t.number, t.metric or 0.0, t.number, t.number, "", _title(t), t.state == "complete")
        for t in seen
    ]
    values = [t.metric or 0.0 for t in seen]
    margin = 0.04 * (max(values) - min(values)) or 0.01
    across = charts.linear(0.0, max(1.0, float(seen[-1].number)))
    up = charts.linear(min(values) - margin, max(values) + margin)
    name = f"{capital(found.metric_title)} of every trial, and the best so far; grey: pruned"
    return charts.scatter(name, dots, across, up, "trial", (_whole, _short), [roof])


def importance(found: Swept) -> Markup | None:
    """How much each parameter matters, with its interval; None where too few trials tell."""
    if not found.importances:
        return None
    scale = charts.Scale(0.0, 1.0, ())
    rows = [
        charts.Row(
            name,
            charts.point(scale, share["low"], share["estimate"], share["high"]),
            words.percent(share["estimate"]),
            f"{words.percent(share['low'])} to {words.percent(share['high'])}",
        )
        for name, share in found.importances.items()
    ]
    return charts.rows(rows, scale)


def parallel(found: Swept) -> Markup | None:
    """Parallel coordinates: a line a trial through its parameters and metric; the best tenth stands out."""
    seen = [trial for trial in found.trials if trial.state == "complete"]
    names = [
        name
        for name in (seen[0].parameters if seen else ())
        if len({repr(one.parameters[name]) for one in seen}) > 1
    ]
    if len(seen) < 2 or not names:
        return None
    best = sorted(seen, key=lambda t: -(t.metric or 0.0))[: max(1, len(seen) // 10)]
    axes = [(name, [trial.parameters[name] for trial in seen]) for name in names]
    axes.append((found.metric_title, [trial.metric for trial in seen]))
    return charts.parallel(
        "A line a trial; the best tenth stands out",
        [charts.axis_of(name, values, value_told) for name, values in axes],
        [(_title(trial), trial in best) for trial in seen],
    )


def front(found: Swept) -> Markup | None:
    """The metric against what it costs; None where only the metric counts."""
    if len(found.objectives) < 2:
        return None
    cost = [(t, t.costs.get(found.objectives[1])) for t in found.trials if t.state == "complete"]
    known = [(t, c) for t, c in cost if c]
    if len(known) < 2:
        return None
    dots = [
        charts.Dot(
            c,
            t.metric or 0.0,
            c,
            c,
            value_told(t.number) if t.number in found.front else "",
            _title(t),
            t.number in found.front,
        )
        for t, c in known
    ]
    values, costs = [t.metric or 0.0 for t, _ in known], [c for _, c in known]
    margin = 0.04 * (max(values) - min(values)) or 0.01
    across = charts.decades(min(costs) / 1.1, max(costs) * 1.1)
    up = charts.linear(min(values) - margin, max(values) + margin)
    tell = words.duration if found.objectives[1] == "seconds" else words.quantity
    unit = "a step" if found.objectives[1] == "seconds" else "parameters"
    title = f"{capital(found.metric_title)} against cost; coloured: no other is better in both"
    return charts.scatter(title, dots, across, up, unit, (tell, _short))


def _title(trial: TrialRecord) -> str:
    return f"trial {trial.number}: {words.number(trial.metric)}, {told(trial.parameters)}"


def _whole(value: float) -> str:
    return words.number(int(value)) if value == int(value) else ""


def _short(value: float) -> str:
    return f"{value:.4g}"
