"""The pictures of a profile, drawn with matplotlib, in stand-in colours that the page replaces."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vivace import words

# Stand-ins: the page replaces each by a CSS variable, so that the pictures follow light and dark.
COLOURS = {
    "ink": "#010101",
    "quiet": "#020202",
    "rule": "#030303",
    "grid": "#040404",
    "data": "#050505",
    "place": "#060606",
    "forward": "#070707",
    "backward": "#080808",
    "update": "#090909",
    "communication": "#0a0a0a",
    "idle": "#0b0b0b",
    "accent": "#0c0c0c",
}
PHASES = ("data", "place", "forward", "backward", "update", "communication", "idle")
WIDTH = 8.4  # inches; the page scales it


def draw_all(document: dict[str, Any]) -> dict[str, Figure]:
    """Every picture for which the profile holds data."""
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "vivace",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": COLOURS["rule"],
        "axes.labelcolor": COLOURS["quiet"],
        "xtick.color": COLOURS["quiet"],
        "ytick.color": COLOURS["quiet"],
        "text.color": COLOURS["ink"],
        "grid.color": COLOURS["grid"],
        "axes.axisbelow": True,
    }
    figures = {}
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        for name, draw in (("timeline", timeline), ("roofline", roofline), ("memory", memory)):
            figure = draw(document)
            if figure is not None:
                figures[name] = figure
    return figures


def _figure(height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def timeline(document: dict[str, Any]) -> Figure | None:
    """The traced steps: what the loop did when, from left to right."""
    spans = _whole_timeline(document)
    if not spans:
        return None
    figure, axes = _figure(1.15)
    total, starts = document["timeline_seconds"] * 1e3, document["step_starts"]
    for name, start, end in spans:
        width = (end - start) * 1e3
        axes.broken_barh([(start * 1e3, width)], (0, 1), color=COLOURS[name], linewidth=0)
        if width > 0.07 * total:
            middle = (start + end) / 2 * 1e3
            axes.text(middle, 1.12, name, ha="center", va="bottom", fontsize=9, color=COLOURS["quiet"])
    for start in starts[1:]:
        axes.axvline(start * 1e3, ymax=0.75, color=COLOURS["ink"], linewidth=1.2)
    steps = "one step" if len(starts) == 1 else f"{len(starts)} steps"
    axes.set(xlim=(0, total), ylim=(0, 1.5), yticks=[], xlabel=f"ms, {steps} under the profiler")
    axes.spines["left"].set_visible(False)
    return figure


def _whole_timeline(document: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The ranges of the trace with the loop's own code between them named, as the clock names it."""
    total = document.get("timeline_seconds") or 0.0
    spans: list[tuple[str, float, float]] = []
    last = 0.0
    for name, start, end in [*document.get("timeline", []), ["end", total, total]]:
        if start > last:
            between = {"backward": "forward", "update": "update"}.get(name, "idle")
            spans.append((between, last, start))
        if name in PHASES:
            spans.append((name, start, end))
        last = max(last, end)
    return spans


def roofline(document: dict[str, Any]) -> Figure | None:
    """Operations a second over operations a byte, under the measured roof."""
    ceilings = document["machine"]["ceilings"]
    bandwidth = ceilings.get("copy_device")
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
        document["work"]["precision"], "fp32"
    )
    rates = {key: ceilings[key] for key in ("matmul_fp32", f"matmul_{precision}") if key in ceilings}
    rows = [r for r in document["roofline"] if r["flops"] and r["bytes"] and r["seconds"]]
    if not bandwidth or not rates or not rows:
        return None
    figure, axes = _figure(3.6)
    intensities = [row["flops"] / row["bytes"] for row in rows]
    top = max(rates.values())
    low = min([*intensities, top / bandwidth]) / 30
    high = max([*intensities, top / bandwidth]) * 6
    for key, rate in rates.items():
        knee = rate / bandwidth
        axes.plot([low, knee, high], [low * bandwidth, rate, rate], color=COLOURS["quiet"], linewidth=1.2)
        label = f"{key.replace('_', ' ')}, {words.quantity(rate, 'FLOP/s')}"
        axes.text(high, rate * 1.12, label, ha="right", va="bottom", fontsize=9, color=COLOURS["quiet"])
    slope = 3 * low
    axes.annotate(
        f"memory, {bandwidth / 1e9:.3g} GB/s", (slope, slope * bandwidth), xytext=(10, -6),
        textcoords="offset points", va="top", fontsize=9, color=COLOURS["quiet"],
    )  # fmt: skip
    longest = max(row["seconds"] for row in rows)
    for row, intensity in zip(rows, intensities, strict=True):
        speed = row["flops"] / row["seconds"]
        size = 40 + 260 * row["seconds"] / longest
        axes.scatter([intensity], [speed], s=size, color=COLOURS["accent"], alpha=0.85, linewidth=0)
        axes.annotate(
            row["operator"], (intensity, speed), xytext=(10, -4), textcoords="offset points", fontsize=9
        )
    axes.set(
        xscale="log", yscale="log", xlim=(low, high), xlabel="operations a byte", ylabel="operations a second"
    )
    slowest = min(row["flops"] / row["seconds"] for row in rows)
    axes.set_ylim(bottom=min(low * bandwidth, slowest / 3), top=top * 2.4)
    axes.grid(True, linewidth=0.6)
    axes.minorticks_off()
    return figure


def memory(document: dict[str, Any]) -> Figure | None:
    """Live bytes over the traced step, on top of what stays between steps."""
    found = document["memory"]
    curve = found.get("curve") or []
    if len(curve) < 2:
        return None
    figure, axes = _figure(2.6)
    held = found["held_bytes"]
    scale, unit = _unit(found["peak_bytes"])
    times = [point[0] * 1e3 for point in curve]
    values = [(held + point[1]) / scale for point in curve]
    axes.fill_between(times, values, held / scale, step="post", color=COLOURS["forward"], linewidth=0)
    axes.fill_between([0, document["traced_seconds"] * 1e3], held / scale, color=COLOURS["idle"], linewidth=0)
    at = found["peak_at"]
    moment, height = at["seconds"] * 1e3, found["peak_bytes"] / scale
    what = " in ".join(filter(None, [at["operator"], at["module"]]))
    later = moment > 0.6 * document["traced_seconds"] * 1e3
    axes.plot([moment], [height], "o", color=COLOURS["accent"])
    side, shift = ("right", (-8, 4)) if later else ("left", (8, 4))
    axes.annotate(
        f"{words.size(found['peak_bytes'])}, {what}",
        (moment, height),
        xytext=shift,
        textcoords="offset points",
        ha=side,
        fontsize=9,
    )
    axes.set(xlim=(0, document["traced_seconds"] * 1e3), ylim=(0, height * 1.18), xlabel="ms", ylabel=unit)
    axes.grid(True, axis="y", linewidth=0.6)
    return figure


def _unit(size: float) -> tuple[float, str]:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 * 4:
            return {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20}[unit], unit
        size /= 1024
    return 2.0**30, "GiB"
