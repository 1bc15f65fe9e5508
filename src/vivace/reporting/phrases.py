"""What a report calls plans, trials, endings and a machine's facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vivace import words
from vivace.inspection.table import ceiling_in_words
from vivace.ledger import Outcome

REFERENCE = "strict fp32"
ENDINGS = {  # of a search that has no faster plan
    Outcome.NOTHING_HELPS: "Nothing was faster beyond noise: train as you do",
    Outcome.NONE_KEPT: "Nothing faster kept its promise: train as you do",
    Outcome.COULD_NOT_MEASURE: "Nothing is decided",
    Outcome.NOTHING_TRIED: "Nothing was tried, and nothing is decided",
    Outcome.TIME_ENDED: "Too little time was given, and nothing is decided",
    Outcome.NOTHING_FITS: "Nothing fits into the memory that is allowed",
    Outcome.TOO_SHORT: "This training is too short to tune: train as you do",
}
_ROLES = {
    "baseline_strict_fp32": REFERENCE,
    "baseline_default": "PyTorch defaults",
    "baseline_tf32": "TF32 allowed",
}


def steps(value: object) -> str:
    """A number of steps to gain back a cost: ``41 steps``, ``at once``, ``never``."""
    if value == math.inf:
        return "never"
    found = words.real(value)
    if found is None:
        return words.UNKNOWN
    whole = math.ceil(found)
    return "at once" if whole <= 0 else words.count(whole, "step")


def setting(settings: Mapping[str, Any] | None) -> str:
    """A technique's settings: ``mode=default, dynamic=False``; a file of any kind may have none."""
    return ", ".join(f"{name}={value}" for name, value in (settings or {}).items())


def plan_name(techniques: Mapping[str, Mapping[str, Any]], role: str = "candidate") -> str:
    """What a trial ran: its techniques with their settings, or the baseline's name."""
    named = (f"{name} ({setting(chosen)})" if chosen else name for name, chosen in techniques.items())
    return _ROLES.get(role) or " + ".join(named) or REFERENCE


def plain(value: object) -> Any:
    """A fact without a unit: ``yes``, ``1,024``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return words.number(value) if isinstance(value, (int, float)) else value


def energy(found: Mapping[str, Any]) -> str:
    """What the counters of a machine told, or why they told nothing; `words.UNKNOWN` in older records."""
    counters = ", ".join(map(str, found.get("counters") or []))
    joules, each = (words.quantity(found.get(key), "J") for key in ("joules", "joules_per_sample"))
    if counters:
        told = "" if joules == words.UNKNOWN else f"{joules}, {each} a sample, "
        return f"{told}counted by {counters}"
    return f"not measured: {found['reason']}" if found.get("reason") else words.UNKNOWN


def fact(name: str, value: object, group: str = "") -> str:
    """A machine's fact in its unit, judged by its name's suffix, or by its name where it is a ceiling."""
    number = words.real(value)
    if group == "ceilings" and number is not None:
        return ceiling_in_words(name, number)
    if name.endswith("_bytes"):
        return words.size(value)
    return words.number(value) if number is not None else str(value)
