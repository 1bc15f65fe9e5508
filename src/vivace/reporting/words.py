"""Numbers and names in a reader's units: three significant digits, and a dash for what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vivace.inspection.table import human_ceiling
from vivace.ledger import Outcome, Ratio

UNKNOWN = _DASH = "\N{EN DASH}"
_TIMES = "\N{MULTIPLICATION SIGN}"
REFERENCE = "strict fp32"
METRIC = {"training": "metric on the training data"}  # by what it is of; else the metric alone
ENDINGS = {  # of a search that has no faster plan
    Outcome.NOTHING_HELPS: "Nothing was faster beyond noise: train as you do",
    Outcome.NONE_KEPT: "Nothing faster kept its promise: train as you do",
    Outcome.COULD_NOT_MEASURE: "Nothing could be measured, and nothing is decided",
    Outcome.NOTHING_TRIED: "Nothing was tried, and nothing is decided",
}
_ROLES = {
    "baseline_strict_fp32": REFERENCE,
    "baseline_default": "PyTorch defaults",
    "baseline_tf32": "TF32 allowed",
}


def real(value: Any) -> float | None:
    """`value` as a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: Any) -> str:
    """Three significant digits, with thousands separated: ``1,235``, ``41.2``, ``0.00312``, ``4.1e-07``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    size = abs(found)
    if isinstance(value, int) or size >= 100:
        return f"{found:,.0f}"
    if size >= 1:
        return f"{found:.{1 if size >= 10 else 2}f}"
    return f"{found:.3g}"


def times(value: Any) -> str:
    """A speed ratio: ``2.31×``, ``41.2×``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return (f"{found:.2f}" if abs(found) < 10 else number(found)) + _TIMES


def interval(low: Any, high: Any) -> str:
    """The bounds of a ratio: ``2.24–2.38``."""
    return _DASH.join(times(bound).removesuffix(_TIMES) for bound in (low, high))


def speed(value: Ratio) -> str:
    """What a ratio is known to be: ``2.31×``; of an interval too wide for an estimate ``at least 1.40×``."""
    if value.wide and value.low > 1.0:
        return f"at least {times(value.low)}"
    return times(value.estimate)


def ratio(value: Ratio | None) -> str:
    """A ratio with its interval: ``2.31× (2.24–2.38)``, ``at least 1.40× (1.40–3.24)``."""
    return f"{speed(value)} ({interval(value.low, value.high)})" if value else UNKNOWN


def metric(data: Any) -> str:
    """The metric's name, which says where it is of the data that were trained on."""
    return METRIC.get(str(data), "metric")


def percent(value: Any) -> str:
    """A share, or a gain where the sign matters to the reader: ``42 %``, ``3.1 %``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return f"{100 * found:.{0 if abs(found) >= 0.0995 or found == 0 else 1}f} %"


def change(before: float, after: float) -> str:
    """What a step adds to the speed, with its sign: ``+42 %``."""
    return f"{(after / before - 1) * 100:+.0f} %".replace("-", "\N{MINUS SIGN}") if before else UNKNOWN


def size(value: Any) -> str:
    """A number of bytes: ``11.4 GiB``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    index = min(max(int(math.log(abs(found) or 1, 1024)), 0), len(units) - 1)
    return f"{number(found / 1024**index if index else int(found))} {units[index]}"


def duration(value: Any) -> str:
    """Seconds as a person says them: ``38 ms``, ``4.2 s``, ``6 min 10 s``, ``2 h 05 min``."""
    found = real(value)
    if found is None:
        return UNKNOWN
    if 0 < found < 1:
        return f"{number(found * 1e3)} ms" if found >= 1e-3 else f"{number(found * 1e6)} µs"
    if found < 59.95:
        return f"{found:.1f} s" if found < 10 and found != int(found) else f"{found:.0f} s"
    minutes, seconds = divmod(round(found), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def steps(value: Any) -> str:
    """A number of steps to gain back a cost: ``41 steps``, ``at once``, ``never``."""
    if value == math.inf:
        return "never"
    found = real(value)
    if found is None:
        return UNKNOWN
    whole = math.ceil(found)
    return "at once" if whole <= 0 else f"{whole:,} step{'' if whole == 1 else 's'}"


def longer(
    name: str, speedup: Ratio | None, steps: Any, warmup_seconds: Any, path: str, *, verified: bool
) -> str:
    """A plan that wins in longer trainings only."""
    judged = "promise kept" if verified else "not verified yet"
    return (
        f"For trainings of {number(steps)} steps and more: {name}, {ratio(speedup)}, after a warm-up of "
        f"{duration(warmup_seconds)}; {judged}; saved as {path}"
    )


def setting(settings: Mapping[str, Any]) -> str:
    """A technique's settings: ``mode=default, dynamic=False``."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def plan_name(techniques: Mapping[str, Mapping[str, Any]], role: str = "candidate") -> str:
    """What a trial ran: its techniques with their settings, or the baseline's name."""
    named = (f"{name} ({setting(chosen)})" if chosen else name for name, chosen in techniques.items())
    return _ROLES.get(role) or " + ".join(named) or REFERENCE


def plain(value: Any) -> Any:
    """A fact without a unit: ``yes``, ``1,024``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else value


def count(value: Any, noun: str) -> str:
    """How many of something: ``1 epoch``, ``3 epochs``, ``1,200 steps``."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def fact(name: str, value: Any, group: str = "") -> str:
    """A machine's fact in its unit, judged by its name's suffix, or by its name where it is a ceiling."""
    if group == "ceilings" and real(value) is not None:
        return human_ceiling(name, value)
    if name.endswith("_bytes"):
        return size(value)
    return number(value) if real(value) is not None else str(value)
