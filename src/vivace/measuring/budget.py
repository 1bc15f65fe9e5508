"""The words of a budget of time: `tune` and `compress` take the same."""

from __future__ import annotations

from vivace.errors import InputError
from vivace.words import SECONDS, amount

BUDGETS = {"fast": 120.0, "balanced": 600.0, "max": 3600.0}
SHARE = 0.1  # of the whole training: what `auto` spends at most
LONGEST_SECONDS = 30 * SECONDS["d"]


def parse_budget(budget: str | float) -> float | None:
    """Seconds of a budget's word, number or time such as ``5m``; None of ``auto``. Raises InputError."""
    if budget == "auto":
        return None
    if isinstance(budget, str) and budget in BUDGETS:
        return BUDGETS[budget]
    seconds = amount(str(budget), {"": 1.0, **SECONDS})
    if seconds is None or not 5 <= seconds <= LONGEST_SECONDS:
        raise InputError(
            f"the budget is {budget!r}; it must be fast, balanced, max, auto, a time such as 5m, or seconds "
            "from 5 on, 30 days at most"
        )
    return seconds
