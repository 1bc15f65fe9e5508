"""The pictures of a profile: what the loop did when, the roofline, memory over one step."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup

from vivace import words
from vivace.pages import charts
from vivace.profiling.record.clock import PHASES


def timeline(document: dict[str, Any]) -> Markup | None:
    """The traced steps: what the loop did when, from left to right."""
    spans = _whole_timeline(document)
    if not spans:
        return None
    starts = document["step_starts"]
    steps = "one step" if len(starts) == 1 else f"{len(starts)} steps"
    title = f"What the loop did when: {steps} under the profiler"
    scaled = [(name, start * 1e3, end * 1e3) for name, start, end in spans]
    marks = [start * 1e3 for start in starts[1:]]
    return charts.timeline(title, scaled, marks, document["timeline_seconds"] * 1e3)


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


def roofline(document: dict[str, Any]) -> Markup | None:
    """Operations a second over operations a byte, under the measured roof."""
    ceilings = document["machine"]["ceilings"]
    bandwidth = ceilings.get("copy_device")
    precision = document["work"]["precision"]
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(precision, precision)
    rates = {key: ceilings[key] for key in ("matmul_fp32", f"matmul_{precision}") if key in ceilings}
    rows = [row for row in document["roofline"] if row["flops"] and row["bytes"] and row["seconds"]]
    if not bandwidth or not rates or not rows:
        return None
    intensities = [row["flops"] / row["bytes"] for row in rows]
    speeds = [row["flops"] / row["seconds"] for row in rows]
    knees = [rate / bandwidth for rate in rates.values()]
    low, high = min(*intensities, *knees) / 10, max(*intensities, *knees) * 6
    across = charts.decades(low, high)
    up = charts.decades(min(low * bandwidth, min(speeds) / 3), max(rates.values()) * 2.4)
    longest = max(row["seconds"] for row in rows)
    dots = [
        charts.Dot(
            intensity,
            speed,
            intensity,
            intensity,
            row["operator"],
            f"{row['operator']}: {words.quantity(speed, 'FLOP/s')}, {words.duration(row['seconds'])}",
            best=True,
            radius=3 + 7 * math.sqrt(row["seconds"] / longest),
        )
        for row, intensity, speed in zip(rows, intensities, speeds, strict=True)
    ]
    roofs = [
        [(low, low * bandwidth), (knee, rate), (high, rate)]
        for knee, rate in zip(knees, rates.values(), strict=True)
    ]
    told = ", ".join(
        f"{key.replace('_', ' ')} {words.quantity(rate, 'FLOP/s')}" for key, rate in rates.items()
    )
    title = f"Operations a second under the roof: {told}, memory {words.quantity(bandwidth, 'B/s')}"
    tell = (lambda value: f"{value:g}", words.quantity)
    return charts.scatter(title, dots, across, up, "operations a byte", tell, roofs)


def memory(document: dict[str, Any]) -> Markup | None:
    """Live bytes over the traced step, on top of what stays between steps."""
    found = document["memory"]
    curve = found.get("curve") or []
    if len(curve) < 2:
        return None
    held, (scale, unit) = found["held_bytes"], _unit(found["peak_bytes"])
    times = [point[0] * 1e3 for point in curve]
    values = [(held + point[1]) / scale for point in curve]
    end = document["traced_seconds"] * 1e3
    if times[-1] < end:
        times, values = [*times, end], [*values, values[-1]]
    at = found["peak_at"]
    what = " of ".join(filter(None, [at["operator"], at["module"]]))
    told = f"at most {words.size(found['peak_bytes'])}" + (f", in {what}" if what else "")
    peak = (at["seconds"] * 1e3, found["peak_bytes"] / scale, told)
    return charts.area(f"Live memory over one step, {unit}: {told}", times, values, held / scale, peak)


def _unit(size: float) -> tuple[float, str]:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 * 4:
            return {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20}[unit], unit
        size /= 1024
    return 2.0**30, "GiB"
