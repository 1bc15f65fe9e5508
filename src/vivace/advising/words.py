"""Numbers of an advice in a reader's units."""

from __future__ import annotations

DASH = "\N{EN DASH}"


def short(value: float) -> str:
    """Three significant digits with thousands separated."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2}f}" if value >= 1 else f"{value:.2g}"


def _unit(value: float) -> tuple[float, str]:
    """Seconds of a unit, and its name, in which a number of hours is told."""
    for limit, seconds, unit in ((1 / 60, 1, "s"), (1, 60, "min"), (72, 3600, "h")):
        if value < limit:
            return seconds, unit
    return 86400, "d"


def hours(value: float | None) -> str:
    """``38 s``, ``12 min``, ``4.2 h``, ``3.1 d``."""
    if value is None:
        return DASH
    seconds, unit = _unit(value)
    return f"{short(value * 3600 / seconds)} {unit}"


def time(value: float, low: float, high: float) -> str:
    """``4.2 h (3.5–5.1)``: the interval in the estimate's unit."""
    seconds, unit = _unit(value)
    shown = [short(number * 3600 / seconds) for number in (value, low, high)]
    return f"{shown[0]} {unit} ({shown[1]}{DASH}{shown[2]})"


def money(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """``$12.3 (9.80–15.1)``; ``no price`` without one."""
    if value is None:
        return "no price"
    text = f"${_cents(value)}"
    return text if low is None or high is None else f"{text} ({_cents(low)}{DASH}{_cents(high)})"


def _cents(value: float) -> str:
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(value: float) -> str:
    """Bytes in GiB, with a minus sign where there are too few."""
    return f"{value / 2**30:.1f} GiB".replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """``12 %``."""
    return f"{100 * value:.0f} %" if value >= 0.0995 or not value else f"{100 * value:.1f} %"


def energy(value: float | None) -> str:
    """Kilowatt hours; a dash where the board's power is not known."""
    return DASH if value is None else f"{short(value)} kWh"
