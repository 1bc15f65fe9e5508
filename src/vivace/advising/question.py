"""How much training, by when, for how much money: a person's words as numbers, or one sentence of what is
wrong."""

from __future__ import annotations

import dataclasses
import math
import numbers

from vivace import words
from vivace.advising.source import Subject
from vivace.errors import InputError

SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
EXAMPLE_STEPS = 100_000
MOST = 1e18  # epochs, steps or samples of a training


@dataclasses.dataclass(frozen=True)
class Amount:
    """How many samples are trained on, and in which words to say it."""

    samples: float
    words: str


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of the cards.

    Args:
        length: of the training.
        limits: budget in dollars and deadline in seconds, None where there is none.
        probability: with which they are to be kept.
        most: largest number of cards of an offer.
        electricity: US dollars a kWh.
        how: a sentence on precision and memory order.
        asked: cards that the table shows in any case.
        hints: sentences on what was asked and is not answered.
    """

    length: Amount
    limits: tuple[float | None, float | None]
    probability: float
    most: int
    electricity: float
    how: str
    asked: tuple[str, ...]
    hints: tuple[str, ...] = ()


def amount(subject: Subject, epochs: float | None, steps: float | None, target: str | None) -> Amount:
    """The training's length: at most one of epochs, steps of the job's batch, and samples (``90M``).

    Without any, the job's own epochs; without those, 100,000 steps as an example. Raises InputError.
    """
    given = [
        name
        for name, value in (("--epochs", epochs), ("--steps", steps), ("--target", target))
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} say the same thing twice: give one")
    for name, value in (("--epochs", epochs), ("--steps", steps)):
        _require_number(name, value)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be more than 0, not {value:g}")
        if value is not None and value > MOST:
            raise InputError(f"{name} {value:g} is too much: no training has more than {MOST:g}")
    if target is not None:
        samples = _number(target, SIZES, "--target", "a number of samples such as 90M")
        if samples > MOST:
            raise InputError(f"--target {target} is too much: no training has more than {MOST:g} samples")
        return Amount(samples, f"{target} samples")
    if steps is not None:
        return Amount(steps * subject.samples_a_step, f"{steps:,.10g} steps")
    if subject.steps_per_epoch is None:
        if epochs is not None:
            raise InputError(
                "the job does not say how long an epoch is: give --steps or --target instead of --epochs"
            )
        return Amount(EXAMPLE_STEPS * subject.samples_a_step, f"{EXAMPLE_STEPS:,} steps, as an example")
    number = epochs if epochs is not None else subject.epochs or 1
    samples = number * subject.steps_per_epoch * subject.samples_a_step
    return Amount(samples, f"{number:g} epoch{'' if number == 1 else 's'}")


def seconds_of(text: str | None) -> float | None:
    """A deadline such as ``12h``, ``90min`` or ``3d``. Raises InputError, also without a unit."""
    return None if text is None else _number(text, words.SECONDS, "--deadline", "a time such as 12h or 3d")


def dollars(value: float | None) -> float | None:
    """A budget; raises InputError where it is none."""
    _require_number("--budget-usd", value)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise InputError(f"--budget-usd must be more than 0 dollars, not {value:g}")
    return value


def _require_number(option: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise InputError(f"{option} must be a number, not {value!r}")


def _number(text: str, units: dict[str, float], option: str, example: str) -> float:
    found = words.amount(text, units) if isinstance(text, str) else None
    if found is None:
        raise InputError(f"{option} must be {example}, not {text!r}")
    return found
