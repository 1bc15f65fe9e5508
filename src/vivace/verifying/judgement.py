"""From distances and envelopes to a verdict: pure functions, no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vivace.verifying.figures import DICTATED, GRADIENTS, LOSSES, Measure, Quantity

LIMIT = 8.0  # envelopes, for figures over the whole model
SPREAD_LIMIT = math.log(8.0)  # of 5 runs; by chance in fewer than one of a thousand pairs
LAYER_LIMIT = 20.0  # envelopes, for each of many layers
NEAR = 4.0  # times the limit: a figure that is off by less is judged again with more shadows
FAR = 8.0  # times the limit: a figure that is off by more is broken, and no coarser shadow is run
COMPUTED = ("loss", "gradient", "scale", "residual", "decay", "shrinking", "buffer")  # then the rest
SMALLEST_LOSS, SMALLEST_DECAY = 2.0**-22, 1e-3  # floors of an envelope beside those from the unit roundoff
SHADOW = "a shadow, the job rounded at random"


def root_mean_square(values: Sequence[float]) -> float:
    """The root of the mean of the squares."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def envelope_of(
    runs: Sequence[dict[Measure, float]], scale: float, smallest: dict[Measure, float]
) -> dict[Measure, float]:
    """Of each figure `scale` times the root mean square, `smallest` at least; NaN where it is not finite."""
    found = {name: scale * root_mean_square([run[name] for run in runs]) for name in runs[0]}
    return {n: max(v, smallest.get(n, 0.0)) if math.isfinite(v) else math.nan for n, v in found.items()}


def check(
    measure: Measure,
    position: int,
    value: float,
    envelope: float,
    roundoff: float,
    *,
    floor: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """One figure of the verdict: `value` in units of its envelope, against the limit of its quantity.

    `floor` and `limit` stand in place of the quantity's own smallest envelope and limit; the figure holds the
    larger of envelope and floor, by which the value was divided. An envelope that is NaN comes from a shadow
    that is not finite: then nothing is known, and `kept` and `score` are None.
    Infinite is that of a layer which does not move.
    """
    quantity, layer, _ = measure
    # Gradients themselves may be rounded, and a layer's update with them.
    share = 0.25 if layer or quantity in GRADIENTS else 0.02
    smallest = {
        Quantity.LOSS: SMALLEST_LOSS,
        Quantity.DECAY: max(SMALLEST_DECAY, roundoff / 2),
        Quantity.SHRINKING: max(SMALLEST_DECAY, roundoff / 2),
    }
    floor = smallest.get(quantity, share * roundoff) if floor is None else floor
    limit = (LAYER_LIMIT if layer else LIMIT) if limit is None else limit
    used = max(envelope, floor)  # NaN where the envelope is: it stands first
    score = abs(value) / used if value else 0.0
    return figure_of(measure, position, value, used, score, limit)


def widened(figure: dict[str, Any], reach: float) -> dict[str, Any]:
    """A broken figure where `reach` is allowed: how far from the reference shadows get."""
    limit, value = figure["limit"], abs(figure["value"])
    score = min(figure["score"], limit * value / reach) if reach > 0 else figure["score"]
    envelope = max(figure["envelope"], reach / limit)
    return {**figure, "envelope": envelope, "score": score, "kept": score <= limit}


def band(reference: Sequence[float], courses: Sequence[Sequence[float]], scale: float) -> list[float]:
    """Half the width of one envelope around the reference's loss curve, smoothed over 5 steps."""
    squares = [sum((c[i] - r) ** 2 for c in courses) / len(courses) for i, r in enumerate(reference)]
    smooth = []
    for i, r in enumerate(reference):
        window = squares[max(0, i - 2) : i + 3]
        smooth.append(max(scale * math.sqrt(sum(window) / len(window)), 2.0**-22 * abs(r), 1e-12))
    return smooth


def curve_check(
    curve: Sequence[float], reference: Sequence[float], widths: Sequence[float]
) -> dict[str, Any]:
    """The mean distance of two loss curves, in envelopes."""
    score = sum(abs(a - b) / w for a, b, w in zip(curve, reference, widths, strict=True)) / len(curve)
    envelope = 1.0 if all(map(math.isfinite, widths)) else math.nan
    outside = (
        i for i, (a, b) in enumerate(zip(curve, reference, strict=True)) if abs(a - b) > LIMIT * widths[i]
    )
    figure = figure_of(Measure(Quantity.LOSS_CURVE), None, score, envelope, score, LIMIT)
    return figure | {"step": next(outside, 0)}


def spread_check(position: int, mine: float, theirs: float) -> dict[str, Any]:
    """How much a plan's steps vary with the random stream, beside how much the reference's do."""
    score = abs(math.log(mine / theirs)) if mine and theirs else (math.inf if mine != theirs else 0.0)
    return figure_of(Measure(Quantity.SPREAD), position, mine, theirs, score, SPREAD_LIMIT)


def figure_of(
    measure: Measure, step: int | None, value: float, envelope: float, score: float, limit: float
) -> dict[str, Any]:
    """One figure as data; `step` is None for one of the whole course."""
    known = None if math.isnan(envelope) else math.inf if math.isnan(score) else score
    kept = None if known is None else known <= limit
    found = {"value": value, "envelope": envelope, "score": known, "limit": limit, "kept": kept}
    return {**_named(measure, step), **found}


def _named(measure: Measure, step: int | None = None) -> dict[str, Any]:
    """For people the name, for programs quantity, layer (None: the whole model) and step."""
    name = str(measure) if step is None else f"{measure}, from step {step}"
    return {"name": name, "quantity": measure.quantity, "layer": measure.layer or None, "step": step}


def summary(checks: list[dict[str, Any]], note: str = "") -> dict[str, Any]:
    """The verdict's fields over all checks; of the layers only the worst and the broken ones are listed.

    `kept` is None where nothing is broken and something cannot be judged.
    """
    judged = [c for c in checks if c["kept"] is not None]
    unknown = [c for c in checks if c["kept"] is None]
    worst = sorted(judged, key=lambda c: c["score"] / c["limit"], reverse=True)[:5]
    broken = [c for c in judged if not c["kept"]]
    shown = [c for c in checks if c["layer"] is None]
    shown += [c for c in [*worst, *broken[:50], *unknown[:50]] if c not in shown]
    loss = [c["score"] for c in judged if c["quantity"] in LOSSES]
    rest = [c["score"] * LIMIT / c["limit"] for c in judged if c["quantity"] not in LOSSES]
    guilty = worst[:1] if broken else unknown[:1]
    return {
        "kept": False if broken else None if unknown else True,
        "reason": "; ".join(filter(None, (*map(sentence_of, guilty), note))),
        "loss_envelopes": max(loss, default=math.nan),
        "displacement_envelopes": max(rest, default=math.nan),
        "checks": shown,
        "num_checks": len(checks),
        "first": first_broken(checks),
    }


def first_broken(checks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Where a training leaves its envelope first: quantity, layer (None: the whole model) and step.

    The earliest step; in it, the first quantity in the order in which a step computes them; of its layers
    the one that is furthest off.
    """

    def order(check: dict[str, Any]) -> tuple[Any, ...]:
        quantity = check["quantity"]
        computed = next(
            (i for i, begins in enumerate(COMPUTED) if quantity.startswith(begins)), len(COMPUTED)
        )
        return check["step"] or 0, computed, -check["score"] / (check["limit"] or 1.0)

    broken = sorted((check for check in checks if check["kept"] is False), key=order)
    if not broken:
        return None
    first = {key: broken[0][key] for key in ("quantity", "layer", "step")}
    return first | {"quantity": Quantity.LOSS} if first["quantity"] in LOSSES else first


def is_near(document: dict[str, Any]) -> bool:
    """Is a broken verdict so near to the limits that a judgement with more shadows may find otherwise?

    A rehearsal's figures need none.
    """
    broken = [check for check in document["checks"] if check["kept"] is False]
    return not any(c["quantity"] in DICTATED or c["score"] > NEAR * c["limit"] for c in broken)


def outright(kept: bool, reason: str, quantity: Quantity) -> dict[str, Any]:
    """A verdict that needs no envelope."""
    score = 0.0 if kept else math.inf
    only = {**_named(Measure(quantity)), "value": score, "envelope": 0.0, "score": score}
    only |= {"limit": 0.0, "kept": kept}
    fields = {"loss_envelopes": score, "displacement_envelopes": score, "checks": [only], "num_checks": 1}
    return {"kept": kept, "reason": reason, **fields, "first": first_broken([only])}


def unknown(reason: str) -> dict[str, Any]:
    """A verdict's fields where nothing can be said, and why."""
    return {**summary([]), "kept": None, "reason": reason}


def sentence_of(worst: dict[str, Any]) -> str:
    """What a check found, as the reason of a verdict says it."""
    if worst["kept"] is None:
        shadow = f"{SHADOW} as coarsely as the plan may round"
        return f"{worst['name']}, cannot be judged: {shadow}, is not finite there"
    if worst["quantity"] == Quantity.SPREAD:
        return f"{worst['name']}, is {worst['value']:.3g}, and {worst['envelope']:.3g} in the job"
    return (
        f"{worst['name']}, is {worst['score']:.3g} envelopes off, and rounding explains {worst['limit']:.0f}"
    )
