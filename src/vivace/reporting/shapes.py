"""What the records of a run look like, and what is left of those that look otherwise.

A folder may come from a stranger, another version or a torn disk: what has another form than the report reads
is left out and named, and the rest is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

LARGEST = 1e300  # an integer beyond it is no number that can be drawn


@dataclasses.dataclass(frozen=True)
class Each:
    """A table whose keys are names, and whose values all have one shape."""

    of: Any


class Number:
    """A number; a truth value is none."""


class Positive(Number):
    """A finite number above 0."""


ANY, TEXT, FLAG, NUMBER = object, str, bool, Number
NUMBERS, TEXTS = (NUMBER, ...), [TEXT]  # of a tuple all must fit, of a list those that do are kept
PAIR = (NUMBER, NUMBER)
RATIO = {"estimate": Positive, "low": Positive, "high": Positive}
JOB = {
    "name": TEXT,
    "signature": TEXT,
    "batch_size": NUMBER,
    "model": TEXT,
    "num_parameters": NUMBER,
    "optimizer": TEXT,
}
CHECK = {"name": TEXT, "value": NUMBER, "envelope": NUMBER, "score": NUMBER, "limit": NUMBER, "kept": FLAG}
TECHNIQUES = Each(Each(ANY))
DEVICE = {"kind": TEXT, "name": TEXT, "memory_bytes": NUMBER, "features": TEXTS}
MACHINE = {
    "devices": [DEVICE],
    "num_cores": NUMBER,
    "versions": Each(TEXT),
    "limits": Each(ANY),
    "ceilings": Each(NUMBER),
    "missing": TEXTS,
    "fingerprint": TEXT,
}
VERDICT = {
    "plan": TECHNIQUES,
    "kept": FLAG,
    "promise": TEXT,
    "loss_envelopes": NUMBER,
    "displacement_envelopes": NUMBER,
    "steps": NUMBER,
    "seeds": NUMBER,
    "reason": TEXT,
    "seconds": NUMBER,
    "checks": [CHECK],
    "num_checks": NUMBER,
    "curves": Each(NUMBERS),
    "metric": {"reference": NUMBERS, "plan": NUMBERS, "margin": NUMBER, "p": NUMBER, "n": NUMBER},
    "first": {"quantity": TEXT, "layer": TEXT, "step": NUMBER},
}
ENERGY = {"joules": NUMBER, "joules_per_sample": NUMBER, "counters": TEXTS, "reason": TEXT}
RUN = {
    "command": TEXT,
    "date": TEXT,
    "version": TEXT,
    "machine": MACHINE,
    "job": JOB,
    "budget_seconds": NUMBER,
    "allow": TEXT,
    "memory_bytes": NUMBER,
    "energy": ENERGY,
}
PROFILE = {
    "device": TEXT,
    "step_seconds": NUMBER,
    "shares": Each(NUMBER),
    "operator_shares": Each(NUMBER),
    "num_operators": NUMBER,
    "page_faults": NUMBER,
    "parameter_bytes": NUMBER,
    "peak_bytes": NUMBER,
    "features": Each(ANY),
}
RESULT = {
    "plan": TECHNIQUES,
    "does": Each(TEXT),
    "plan_path": TEXT,
    "speedup": RATIO,
    "baselines": Each(NUMBER),
    "baseline_notes": Each(TEXT),
    "promise": TEXT,
    "verdict": VERDICT,
    "break_even_steps": NUMBER,
    "input_pipeline": Each(RATIO),
    "waterfall": [{"step": TEXT, "ratio": RATIO}],
    "report_path": TEXT,
    "seconds": NUMBER,
    "interrupted": FLAG,
    "memory_bytes": NUMBER,
    "long_plan": {"plan": TECHNIQUES, "speedup": RATIO, "from_steps": NUMBER, "warmup_seconds": NUMBER},
}
TRIAL = {
    "techniques": TECHNIQUES,
    "role": TEXT,
    "status": TEXT,
    "predicted": PAIR,
    "promise": TEXT,
    "ratio": RATIO,
    "pairs": [PAIR],
    "samples_per_second": NUMBER,
    "peak_bytes": NUMBER,
    "warmup_seconds": NUMBER,
    "seconds": NUMBER,
    "reason": TEXT,
    "evidence": Each(TEXT),
    "joules": PAIR,
}
MEMORY = {
    "budget_bytes": NUMBER,
    "plan": TECHNIQUES,
    "peak_bytes": NUMBER,
    "kept_bytes": NUMBER,
    "step_seconds": NUMBER,
    "seconds": NUMBER,
    "curve": [PAIR],
    "reason": TEXT,
}
BATCH = {
    "samples": NUMBER,
    "samples_per_second": NUMBER,
    "ratio": RATIO,
    "peak_bytes": NUMBER,
    "reason": TEXT,
}
BATCHES = {"base_samples": NUMBER, "batches": [BATCH], "rule": TEXT, "reason": TEXT}
METRIC = {
    "step": NUMBER,
    "epoch": NUMBER,
    "loss": NUMBER,
    "samples_per_second": NUMBER,
    "seconds": NUMBER,
    "watch_score": NUMBER,
}
TRAINING = {
    "run_path": TEXT,
    "steps": NUMBER,
    "epochs": NUMBER,
    "metric": NUMBER,
    "loss": NUMBER,
    "seconds": NUMBER,
    "stepping_seconds": NUMBER,
    "samples_per_second": NUMBER,
    "resumed_from_step": NUMBER,
    "interrupted": FLAG,
    "interrupted_by": TEXT,
    "notices": TEXTS,
    "damaged": [{"index": ANY, "path": TEXT, "error": TEXT, "times": NUMBER}],
    "metric_data": TEXT,
    "metric_name": TEXT,
    "job": TEXT,
    "plan": TECHNIQUES,
    "does": Each(TEXT),
    "date": TEXT,
    "device": TEXT,
    "tuned": {"speedup": RATIO, "verdict": VERDICT},
    "found": {"outcome": TEXT, "reason": TEXT, "ratio": RATIO, "saved_seconds": NUMBER, "page": TEXT},
    "watched": Each(ANY),
    "machine": MACHINE,
    "energy": ENERGY,
    "ranks": NUMBER,
    "epochs_left": NUMBER,
}
NAMES = {Number: "number", Positive: "number above 0", str: "text", bool: "truth value"}


def fitting(value: Any, shape: Any, place: str, skipped: list[str]) -> Any:
    """What of `value` has the shape; None where nothing has. What is left out is named in `skipped`."""
    if value is None or shape is ANY:
        return value
    if isinstance(shape, (Each, dict)):
        if not _is(value, Mapping, "table", place, skipped):
            return None
        shapes = shape if isinstance(shape, dict) else dict.fromkeys(value, shape.of)
        kept = {}
        for key, one in value.items():
            found = fitting(one, shapes[key], f"{place}.{key}", skipped) if key in shapes else one
            if found is not None or one is None:
                kept[key] = found
        return kept
    if isinstance(shape, (list, tuple)):
        if not _is(value, list, "list", place, skipped):
            return None
        if shape == PAIR and len(value) != len(PAIR):
            skipped.append(f"{place} is no pair")
            return None
        before = len(skipped)
        parts = [fitting(one, shape[0], f"{place}[{at}]", skipped) for at, one in enumerate(value)]
        if shape == NUMBERS and len(skipped) == before:  # null is a number that was not finite
            return parts
        fits = [part for part in parts if part is not None]
        return None if isinstance(shape, tuple) and len(fits) < len(parts) else fits
    if isinstance(shape, type) and issubclass(shape, Number):
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = right and not (isinstance(value, int) and abs(value) > LARGEST)
        right = right and (shape is NUMBER or 0 < value <= LARGEST)
    else:
        right = isinstance(value, shape)
    if not right:
        skipped.append(f"{place} is no {NAMES[shape]}")
    return value if right else None


def _is(value: object, kind: type, name: str, place: str, skipped: list[str]) -> bool:
    if not isinstance(value, kind):
        skipped.append(f"{place} is no {name}")
    return isinstance(value, kind)
