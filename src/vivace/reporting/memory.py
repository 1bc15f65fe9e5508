"""Memory against time: what less of it costs, and what the size of the batch does, as charts and rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from markupsafe import Markup

from vivace import words
from vivace.ledger import Ratio
from vivace.pages import charts
from vivace.reporting.content import Content, ratio_of

_MIB = 2**20
_RULES = {
    "linear": "multiply the learning rate by the same factor",
    "square root": "multiply the learning rate by the factor's square root",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """One size of the batch: its speed against the job's own batch, its peak, or why it has none. `fastest`
    is that of those that are faster beyond noise, where any is.
    """

    samples: int
    speed: float | None
    ratio: Ratio | None
    peak_bytes: float | None
    reason: str
    fastest: bool


def pareto(content: Content) -> Markup | None:
    """Slowdown in per cent against peak memory in MiB: the curve, and the decisions that were taken."""
    choice = content.curves.get("memory", {})
    step, pairs = words.real(choice.get("step_seconds")), choice.get("curve") or []
    known = [(words.real(pair[0]), words.real(pair[1])) for pair in pairs if len(pair) == 2]
    points = [(size, seconds) for size, seconds in known if size is not None and seconds is not None]
    if not step or len(points) < 2:
        return None
    places = [size / _MIB for size, _ in points]
    slower = [100 * seconds / step for _, seconds in points]
    taken, cost = words.real(choice.get("peak_bytes")), words.real(choice.get("seconds"))
    lines: dict[str, list[Any]] = {"reference": slower}
    if taken is not None and cost is not None:
        places = [*places, taken / _MIB]
        lines = {"reference": [*slower, None], "points": [*[None] * len(points), 100 * cost / step]}
    return charts.lines("More time a step, %", places, lines, unit="peak memory, MiB")


def sentence(content: Content) -> str:
    """What the choice of blocks was, in one sentence; empty where none was made."""
    choice = content.curves.get("memory", {})
    if not choice:
        return ""
    budget = words.size(choice.get("budget_bytes"))
    if choice.get("reason"):
        return f"No decisions for the blocks were found within {budget}: {choice['reason']}."
    step, seconds = words.real(choice.get("step_seconds")), words.real(choice.get("seconds"))
    cost = f", at {100 * seconds / step:.1f} % more time by the blocks' own costs" if step and seconds else ""
    peaks = f"{words.size(choice.get('kept_bytes'))} become {words.size(choice.get('peak_bytes'))}"
    return f"The budget is {budget}: {peaks}{cost}."


def sizes(content: Content) -> list[Size]:
    """The batches that were tried, in ascending order."""
    found = []
    for each in content.curves.get("batches", {}).get("batches") or []:
        samples = words.real(each.get("samples")) if isinstance(each, dict) else None
        if samples is None:
            continue
        speed, peak = words.real(each.get("samples_per_second")), words.real(each.get("peak_bytes"))
        ratio, reason = ratio_of(each.get("ratio")), str(each.get("reason") or "")
        found.append(Size(int(samples), speed, ratio, peak, reason, False))
    sure = [size for size in found if size.ratio is not None and size.ratio.low > 1]
    speeds = [size.speed for size in sure or found if size.speed]
    return [dataclasses.replace(size, fastest=bool(speeds) and size.speed == max(speeds)) for size in found]


def speeds(content: Content) -> list[Markup]:
    """Samples a second against the batch's size, and its peak memory in MiB; nothing below two sizes."""
    able = [size for size in sizes(content) if size.speed and size.peak_bytes]
    places = [size.samples for size in able]
    titled: dict[str, list[Any]] = {
        "Samples a second": [size.speed for size in able],
        "Peak memory, MiB": [(size.peak_bytes or 0.0) / _MIB for size in able],
    }
    plots = [_dotted(title, places, values) for title, values in titled.items()]
    return [plot for plot in plots if plot is not None and len(able) > 1]


def _dotted(title: str, places: list[int], values: list[Any]) -> Markup | None:
    """A line with a dot and a tick at each place."""
    apart = [each for place in places for each in (place, None)]
    dots = [each for value in values for each in (value, None)]
    empty: list[Any] = [None] * len(places)
    lines = {"plan": [*values, *empty, *empty], "points": [*empty, *dots]}
    ticks: list[int] = []
    for place in places:
        if not ticks or place - ticks[-1] > (places[-1] - places[0]) / 12:
            ticks.append(place)
    return charts.lines(title, [*places, *apart], lines, origin=True, unit="samples at once", ticks=ticks)


def advice(content: Content) -> str:
    """What another batch would mean, with the rule for the learning rate."""
    found = content.curves.get("batches", {})
    base, rule = words.real(found.get("base_samples")), found.get("rule")
    fastest = next((size for size in sizes(content) if size.fastest), None)
    if base is None or fastest is None:
        return str(found.get("reason") or "")
    if fastest.samples == base or fastest.ratio is None or fastest.ratio.low <= 1:
        return f"No other size is faster than your batch of {base:.0f} beyond noise."
    follow = _RULES.get(str(rule), "let the learning rate follow")
    return (
        f"{fastest.samples} samples at once are the fastest beyond noise, {words.ratio(fastest.ratio)} of "
        f"your {base:.0f}. Nothing was changed: another batch is another training, which only the metric "
        f"can judge. The {rule} rule: {follow}."
    )
