"""Charts as SVG and HTML: a small writer, for every page.

Horizontal places are percent of the chart's own width, so that a chart fits every screen and its texts keep
their size; paths live in a box of 1000. Colours are classes of the style sheet, and follow light and dark.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vivace.words import duration, number, percent, real

BOX = 1000
MOST_POINTS = 300
LETTER, LINE = 2.4, 6.0  # percent of a chart on a telephone that a letter and a line of text take
_NICE_RATIOS = (
    0.05,
    0.1,
    0.2,
    0.5,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
)

SMALLEST = 1e-150  # that is not drawn as zero


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` with the values at which it is labelled."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The position of a value in percent of the axis, kept inside it."""
        if self.logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(share, 0.0), 1.0), 2)


def linear(low: float, high: float, num_ticks: int = 5) -> Scale:
    """An axis over [low, high] with ticks at round values inside it."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(float(f"{index * step:.12g}") for index in range(first, last + 1)))


def ratios(values: Iterable[float]) -> Scale:
    """A logarithmic axis that holds 1 and every positive value: twice and half are equally far from 1."""
    positive = [value for value in values if value > 0]
    low, high = min([*positive, 1.0]) / 1.04, max([*positive, 1.0]) * 1.04
    low, high = min(low, 0.93), max(high, 1.07)
    ticks: list[float] = [1.0]
    for tick in sorted(_NICE_RATIOS, key=lambda nice: abs(math.log(nice))):
        apart = all(abs(math.log(tick / other)) > math.log(high / low) / 6 for other in ticks)
        if low <= tick <= high and apart:
            ticks.append(tick)
    return Scale(low, high, tuple(sorted(ticks)), logarithmic=True)


def decades(low: float, high: float) -> Scale:
    """A logarithmic axis over [low, high], labelled at 1 and 3 times powers of ten; where that makes fewer
    than three labels, at 1 to 9 times.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: tuple[float, ...] = ()
    for factors in ((1, 3), range(1, 10)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = tuple(float(f"{tick:.6g}") for tick in ticks if low <= tick <= high)
        if len(inside) >= 3:
            break
    return Scale(low, high, inside[:: math.ceil(len(inside) / 6) or 1], logarithmic=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a list of bars: what it is, its drawing, its figure, and a smaller one beside that."""

    name: str
    drawing: Markup
    value: str
    small: str = ""
    note: str = ""
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Dot:
    """A point of a scatter: its place on both axes, its interval across, what it is called and what it is."""

    across: float
    up: float
    low: float
    high: float
    label: str
    title: str
    best: bool = False
    radius: float = 3.0


def element(name: str, *inside: Markup | str, **attributes: object) -> Markup:
    """An element; all that is not markup is escaped. ``class_`` and ``stroke_width`` as in HTML."""
    told = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), told, Markup("").join(inside))


def rows(found: Iterable[Row], scale: Scale | None = None) -> Markup:
    """Bars under each other, over the axis of `scale` where there is one."""
    parts = []
    for row in found:
        value = [element("small", row.small)] if row.small else []
        parts.append(
            element(
                "div",
                element("span", row.name, class_="name kept" if row.kept else "name"),
                row.drawing,
                element("span", row.value, " " if value else "", *value, class_="value"),
                *([element("p", row.note, class_="note")] if row.note else []),
                class_="row",
            )
        )
    if scale is not None:
        parts.append(element("div", axis(scale), class_="row foot"))
    return element("div", *parts, class_="rows" if scale is None else "rows wide")


def axis(scale: Scale) -> Markup:
    """The labels of an axis of ratios."""
    labels = (
        element("span", f"{tick:g}\N{MULTIPLICATION SIGN}", style=f"left:{scale.at(tick)}%")
        for tick in scale.ticks
    )
    return element("div", *labels, class_="axis", aria_hidden="true")


def bar(share: float, kind: str = "plain") -> Markup:
    """A bar of a share of the whole width."""
    box = element("rect", class_=kind, width=f"{100 * min(max(share, 0.0), 1.0):.2f}%", height="14", rx="2")
    return element("svg", box, class_="track", height="14", aria_hidden="true")


def lengths(values: Sequence[float | None]) -> list[float]:
    """Shares of the longest."""
    longest = max([value for value in values if value] or [1.0])
    return [(value or 0.0) / longest for value in values]


def point(scale: Scale, low: float, value: float, high: float, kind: str = "dot") -> Markup:
    """An estimate with its interval."""
    return _track(scale, _whisker(scale, low, high), _dot(scale.at(value), kind))


def step(scale: Scale, before: float, after: float, low: float, high: float) -> Markup:
    """A step of a waterfall, from the estimate before it to the one after it, with that one's interval."""
    start, end = scale.at(min(before, after)), scale.at(max(before, after))
    kind = "plain" if not before else "plan" if after >= before else "bad"
    whisker = [_whisker(scale, low, high)] if high > low else []
    return _track(scale, _box(start, max(end - start, 0.3), 16, kind), *whisker)


def predicted(
    scale: Scale, bounds: tuple[float, float], low: float, value: float, high: float, kind: str
) -> Markup:
    """An estimate with its interval on the band in which it was expected."""
    start = scale.at(bounds[0])
    band = _box(start, max(scale.at(bounds[1]) - start, 0.5), 10, "band")
    return _track(scale, band, _whisker(scale, low, high), _dot(scale.at(value), kind))


def _track(scale: Scale, *marks: Markup) -> Markup:
    grid = (
        element("line", class_="one" if tick == 1 else "grid", x1=place, x2=place, y1="0", y2="100%")
        for tick, place in ((tick, f"{scale.at(tick)}%") for tick in scale.ticks)
    )
    return element("svg", *grid, *marks, class_="track", aria_hidden="true")


def _box(start: float, width: float, height: int, kind: str) -> Markup:
    half = f"translate(0 -{height // 2})"
    return element(
        "rect",
        class_=kind,
        x=f"{start}%",
        width=f"{width:.2f}%",
        y="50%",
        height=height,
        rx="2",
        transform=half,
    )


def _whisker(scale: Scale, low: float, high: float) -> Markup:
    left, right = f"{scale.at(low)}%", f"{scale.at(high)}%"
    return element("line", class_="whisker", x1=left, x2=right, y1="50%", y2="50%")


def _dot(place: float, kind: str) -> Markup:
    return element("circle", class_=kind, cx=f"{place}%", cy="50%", r="3.5")


def frame(
    title: str,
    across: Scale,
    up: Scale,
    marks: Iterable[Markup],
    unit: str,
    tell: tuple[Callable[[float], str], Callable[[float], str]] | None = None,
    kind: str = "",
) -> Markup:
    """Marks between two axes with their labels; `tell` turns a place across, and up, into words."""
    tell_across, tell_up = tell or (_whole, _short)
    levels = [(tick, up.at(tick)) for tick in up.ticks]
    grid = (
        element("line", class_="grid", x1="0", x2="100%", y1=f"{100 - at:.2f}%", y2=f"{100 - at:.2f}%")
        for _, at in levels
    )
    told = [tell_up(tick) for tick in up.ticks]
    if len(set(told)) < len(told):  # values so near to each other need all their digits
        told = [_short(tick) for tick in up.ticks]
    left = (element("span", text, style=f"bottom:{at}%") for text, (_, at) in zip(told, levels, strict=True))
    below = (element("span", tell_across(tick), style=f"left:{across.at(tick)}%") for tick in across.ticks)
    logarithmic = [" ", element("small", "logarithmic")] if up.logarithmic else []
    return element(
        "figure",
        element("figcaption", title, *logarithmic),
        element("div", *left, class_="up"),
        element("svg", *grid, *marks),
        element("div", *below, class_="across"),
        element("p", unit, class_="unit"),
        class_=f"plot {kind}".strip(),
        role="img",
        aria_label=title,
    )


def _whole(value: float) -> str:
    return number(int(value) if value == int(value) else value)


def _short(value: float) -> str:
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def lines(
    title: str,
    steps: Sequence[Any],
    series: Mapping[str, Sequence[Any]],
    band: Sequence[Sequence[Any]] = ((), ()),
    *,
    origin: bool = False,
    unit: str = "step",
    ticks: Sequence[float] = (),
) -> Markup | None:
    """Lines over steps, each of a class of its own, with an optional (low, high) band; None where no finite
    point exists.

    Losses that fall far are drawn on a logarithmic axis; `origin` draws from zero; `ticks` are places across
    that are labelled in place of round ones.
    """
    places = [_drawn(step) for step in steps]
    values = [v for line in (*series.values(), *band) for v in map(_drawn, line) if v is not None]
    known = [place for place in places if place is not None]
    if not values or not known:
        return None
    low, high = min(values), max(values)
    margin = 0.04 * (high - low)
    if origin:
        up = linear(0.0, high * 1.04)
    elif low > 0 and high / low > 20:
        up = decades(low / 1.1, high * 1.1)
    else:
        up = linear(low - margin, high + margin)
    across = linear(min(known), max(known))
    if ticks:
        across = dataclasses.replace(across, ticks=tuple(ticks))
    covered = _band(places, band, across, up)
    drawn = [element("path", class_="band", d=covered)] if covered else []
    for name, line in series.items():
        path = _path(_points(places, line, across, up))
        drawn.append(element("path", class_=f"line {name}", d=path))
    return frame(title, across, up, [_stretched(*drawn)], unit)


def courses(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Markup | None:
    """Lines over minutes, each through points of its own and of a class of its own; None where no point has a
    place.
    """
    placed = {name: [(_drawn(x), _drawn(y)) for x, y in line] for name, line in series.items()}
    known = {
        name: [(x, y) for x, y in line if x is not None and y is not None] for name, line in placed.items()
    }
    if not any(known.values()):
        return None
    across = linear(*_ends([x for line in known.values() for x, _ in line]))
    low, high = _ends([y for line in known.values() for _, y in line])
    margin = 0.04 * (high - low)
    up = linear(low - margin, high + margin)
    drawn = (
        element("path", class_=f"line {name}", d=_path([_point(x, y, across, up) for x, y in line]))
        for name, line in known.items()
    )
    return frame(title, across, up, [_stretched(*drawn)], "minutes")


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _stretched(*paths: Markup) -> Markup:
    """Paths of a box of 1000 over the whole of a chart, whatever its shape; lines keep their width."""
    box = f"0 0 {BOX} {BOX}"
    return element("svg", *paths, viewBox=box, preserveAspectRatio="none", width="100%", height="100%")


def scatter(
    title: str,
    dots: Sequence[Dot],
    across: Scale,
    up: Scale,
    unit: str,
    tell: tuple[Callable[[float], str], Callable[[float], str]],
    roofs: Iterable[Sequence[tuple[float, float]]] = (),
) -> Markup:
    """Dots between two axes, the first ones on top, under lines through the points of `roofs`.

    A label that would cover an earlier one is left out: its dot says what it is when pointed at.
    """
    paths = []
    for roof in roofs:
        path = _path([_point(x, y, across, up) for x, y in roof])
        paths.append(element("path", class_="line roof", d=path))
    marks = [
        _marked(dot, label, across, up) for dot, label in zip(dots, _labels(dots, across, up), strict=True)
    ]
    return frame(title, across, up, [_stretched(*paths), *reversed(marks)], unit, tell, "tall")


def _labels(dots: Sequence[Dot], across: Scale, up: Scale) -> list[tuple[str, bool]]:
    """The label of each dot and whether it stands left of it; empty where it would cover another."""
    taken: list[tuple[float, float, float]] = []
    found = []
    for dot in dots:
        x, y, width = across.at(dot.across), up.at(dot.up), LETTER * len(dot.label) + 3.0
        label = ("", False)
        for start, left in ((x, False), (x - width, True)):
            free = all(
                start + width < low or start > high or abs(y - level) > LINE for low, high, level in taken
            )
            if dot.label and not label[0] and free and start > -5 and start + width <= 100:
                label = (dot.label, left)
                taken.append((start, start + width, y))
        found.append(label)
    return found


def _marked(dot: Dot, label: tuple[str, bool], across: Scale, up: Scale) -> Markup:
    x, y = f"{across.at(dot.across)}%", f"{100 - up.at(dot.up):.2f}%"
    marks = [element("title", dot.title)]
    if dot.high > dot.low:
        left, right = f"{across.at(dot.low)}%", f"{across.at(dot.high)}%"
        marks.append(element("line", class_="whisker", x1=left, x2=right, y1=y, y2=y))
    marks.append(element("circle", cx=x, cy=y, r=f"{dot.radius:g}"))
    text, beside = label
    if text:
        place = {"dx": "-8", "text_anchor": "end"} if beside else {"dx": "8"}
        marks.append(element("text", text, x=x, y=y, dy="-6", **place))
    return element("g", *marks, class_="best" if dot.best else "other")


def area(
    title: str,
    times: Sequence[float],
    values: Sequence[float],
    held: float,
    peak: tuple[float, float, str],
) -> Markup:
    """A quantity over milliseconds, in steps, above what is held all the time, with its peak marked."""
    across, up = linear(0.0, times[-1]), linear(0.0, peak[1] * 1.15)
    corners = [(times[0], held)]
    for index, (time, value) in enumerate(zip(times, values, strict=True)):
        corners += [(time, values[index - 1] if index else value), (time, value)]
    corners.append((times[-1], held))
    under = [(0.0, 0.0), (0.0, held), (times[-1], held), (times[-1], 0.0)]
    drawn = [
        element("path", class_=kind, d=_path([_point(x, y, across, up) for x, y in places]) + "Z")
        for kind, places in (("held", under), ("live", corners))
    ]
    moment, height, label = peak
    dot = Dot(moment, height, moment, moment, "", label, best=True, radius=4.0)
    marks = [_stretched(*drawn), _marked(dot, ("", False), across, up)]
    return frame(title, across, up, marks, "ms")


def shares(found: Mapping[str, float]) -> Markup:
    """A bar that is divided by shares of the step, each in the colour of its name, and its legend."""
    shown = {name: share for name, share in found.items() if share >= 0.001}
    parts = (element("i", class_=name, style=f"width:{100 * share:.2f}%") for name, share in shown.items())
    legend = (
        element("li", element("i", class_=name), f"{name} ", element("b", percent(share)))
        for name, share in shown.items()
    )
    bar = element("div", *parts, class_="shares", role="img", aria_label="Shares of the step")
    return bar + element("ul", *legend, class_="legend")


def timeline(
    title: str, spans: Iterable[tuple[str, float, float]], marks: Iterable[float], end: float
) -> Markup:
    """What happened when, from left to right: spans by name, in milliseconds, and marks between them."""
    across = linear(0.0, end)
    boxes = []
    for name, start, stop in spans:
        left = across.at(start)
        box = element(
            "rect",
            element("title", f"{name}, {duration((stop - start) / 1e3)}"),
            class_=name,
            x=f"{left}%",
            width=f"{across.at(stop) - left:.2f}%",
            height="100%",
        )
        boxes.append(box)
    ends = (
        element("line", class_="mark", x1=f"{across.at(at)}%", x2=f"{across.at(at)}%", y1="-4", y2="100%")
        for at in marks
    )
    return frame(title, across, Scale(0.0, 1.0, ()), [*boxes, *ends], "ms", kind="flat")


def thin(rows: Sequence[Any], most: int = MOST_POINTS) -> list[list[Any]]:
    """Rows in at most `most` neighbouring groups of equal length."""
    length = math.ceil(len(rows) / most) or 1
    return [list(rows[start : start + length]) for start in range(0, len(rows), length)]


def _points(
    places: Sequence[float | None], values: Sequence[Any], across: Scale, up: Scale
) -> list[tuple[int, int] | None]:
    points: list[tuple[int, int] | None] = []
    for place, value in zip(places, map(_drawn, values), strict=False):
        missing = place is None or value is None
        points.append(None if missing else _point(place or 0.0, value or 0.0, across, up))
    every = math.ceil(len(points) / MOST_POINTS) or 1
    return points[::every] + (points[-1:] if every > 1 else [])


def _drawn(value: object) -> float | None:
    """A number that has a place on an axis: none beyond what the axis's own arithmetic can hold."""
    found = real(value)
    if found is None or abs(found) > 1 / SMALLEST:
        return None
    return found if abs(found) > SMALLEST else 0.0


def _point(place: float, value: float, across: Scale, up: Scale) -> tuple[int, int]:
    return round(across.at(place) * BOX / 100), round(BOX - up.at(value) * BOX / 100)


def _path(points: Sequence[tuple[int, int] | None]) -> str:
    """A line that is interrupted where a point is missing; a lone point becomes a dot."""
    parts, drawing = [], False
    for index, point in enumerate(points):
        if point is not None:
            parts.append(f"{'L' if drawing else 'M'}{point[0]} {point[1]}")
            if not drawing and (index + 1 == len(points) or points[index + 1] is None):
                parts.append("h0")
        drawing = point is not None
    return "".join(parts)


def _band(places: Sequence[float | None], band: Sequence[Sequence[Any]], across: Scale, up: Scale) -> str:
    lower, upper = (_points(places, side, across, up) for side in band)
    pairs = [(a, b) for a, b in zip(lower, upper, strict=False) if a is not None and b is not None]
    if len(pairs) < 2:
        return ""
    edge = [a for a, _ in pairs] + [b for _, b in reversed(pairs)]
    return "M" + "L".join(f"{x} {y}" for x, y in edge) + "Z"


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """One upright axis of parallel coordinates: its name, where each line crosses it, in percent from below,
    and the labels of both ends.
    """

    name: str
    places: tuple[float, ...]
    low: str
    high: str


def axis_of(name: str, values: Sequence[Any], tell: Callable[[Any], str]) -> Coordinate:
    """The axis of values: numbers by size, logarithmic where all are above 0 and far apart; else one place
    for each value, in order of their texts.
    """
    numbers = [found for found in map(_drawn, values) if found is not None]
    if len(numbers) < len(values):
        kinds = sorted({tell(value) for value in values})
        scale = linear(0.0, float(max(1, len(kinds) - 1)))
        places = tuple(scale.at(kinds.index(tell(value))) for value in values)
        return Coordinate(name, places, kinds[0], kinds[-1])
    low, high = min(numbers), max(numbers)
    logarithmic = low > 0 and high / low >= 20
    scale = Scale(low, high if high > low else low + max(1.0, abs(low)), (), logarithmic)
    ends = (tell(values[numbers.index(end)]) for end in (low, high))
    return Coordinate(name, tuple(scale.at(number) for number in numbers), *ends)


def parallel(title: str, axes: Sequence[Coordinate], told: Sequence[tuple[str, bool]]) -> Markup:
    """A line for each of `told` (what it is, and whether it stands out) through all axes; those on top."""
    across = [100 * index / max(1, len(axes) - 1) for index in range(len(axes))]
    order = sorted(range(len(told)), key=lambda index: told[index][1])
    drawn = []
    for index in order:
        corners = zip(across, (axis.places[index] for axis in axes), strict=True)
        points: list[tuple[int, int] | None] = [
            (round(x * BOX / 100), round(BOX - y * BOX / 100)) for x, y in corners
        ]
        kind = "plan" if told[index][1] else "one"
        drawn.append(
            element("path", element("title", told[index][0]), class_=f"line {kind}", d=_path(points))
        )
    uprights = [element("line", class_="grid", x1=f"{x}%", x2=f"{x}%", y1="0", y2="100%") for x in across]
    ends = [
        element("span", element("b", axis.name), element("small", axis.high), style=f"left:{x}%")
        for axis, x in zip(axes, across, strict=True)
    ]
    below = [
        element("span", element("small", axis.low), style=f"left:{x}%")
        for axis, x in zip(axes, across, strict=True)
    ]
    drawing = element(
        "figure",
        element("figcaption", title),
        element("div", *ends, class_="coordinates"),
        element("svg", *uprights, _stretched(*drawn)),
        element("div", *below, class_="across"),
        class_="plot parallel",
        style=f"min-width:{6 * len(axes)}rem",
        role="img",
        aria_label=title,
    )
    return element("div", drawing, class_="scrolled")
