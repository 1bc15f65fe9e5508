"""What `vivace advise` does with its options: on cards or software for a job, or the reverse for a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vivace.advising import answering, tables
from vivace.advising.catalogue import find_gpu, load_catalogue
from vivace.advising.ranking import advise
from vivace.advising.reverse import largest_model, trainable, trained_in
from vivace.advising.software import advise_on_software
from vivace.errors import InputError
from vivace.pages.answer import ending

OF_A_CARD = ("precision", "catalogue")  # options that count with --on
# What options are where nobody gave them.
LEFT_OUT = {"probability": 0.8, "most": 8, "electricity": 0.25, "precision": "auto"}


class Screen(Protocol):
    """Where documents, tables and lines go."""

    def document(self, content: dict[str, Any]) -> None:
        """Print JSON where it was asked for."""

    def show(self, draw: Callable[[Any], None]) -> None:
        """Let `draw` put tables and lines on a `rich` console, unless JSON was asked for."""

    def say(self, text: str) -> None:
        """Print one line of text on standard error."""


def answer(
    subject: str | None, card: str | None, options: dict[str, Any], screen: Screen, *, details: bool = False
) -> int:
    """Answer on `screen` and return the exit code. Raises InputError where the question is none or two."""
    if (subject is None) == (card is None):
        raise InputError(
            "give a JOB, a profile or a model to advise on, or --on CARD for what a card could train"
        )
    if card is not None:
        _refuse_others(options, OF_A_CARD, "--on asks what a card could train")
        return _reverse(card, options, screen, details=details)
    assert subject is not None
    advice = advise(subject, **options)
    screen.document(advice.to_dict())
    if details:
        screen.show(lambda console: tables.draw(advice, console))
    screen.show(lambda console: ending(answering.answer(advice), console, details=details))
    return advice.exit_code


def on_software(
    subject: str | None,
    card: str | None,
    options: dict[str, Any],
    records: Path | None,
    screen: Screen,
    *,
    asked: bool,
    details: bool,
) -> int:
    """Answer which framework and compute API, and return the exit code. Raises InputError for a wrong
    question."""
    if not asked:
        raise InputError("--records names what --software answers from: give --software too")
    if subject is None or card is not None:
        raise InputError("--software asks about a JOB on this machine: give a JOB, and no --on")
    _refuse_others(options, (), "--software asks which framework")
    advice = advise_on_software(subject, records=records)
    screen.document({"software": advice.to_dict()})
    if details:
        screen.show(lambda console: tables.draw_software(advice, console))
    screen.show(lambda console: ending(advice.ending(), console, details=details))
    return advice.exit_code


def _refuse_others(options: dict[str, Any], counted: tuple[str, ...], question: str) -> None:
    """Raises InputError where an option was given that says nothing about the question."""
    needless = [
        name for name, value in options.items() if name not in counted and value != LEFT_OUT.get(name)
    ]
    if needless:
        raise InputError(f"{question}, of which --{needless[0].replace('_', '-')} says nothing: leave it out")


def _reverse(card: str, options: dict[str, Any], screen: Screen, *, details: bool) -> int:
    own: Path | None = options["catalogue"]
    gpu = find_gpu(card, load_catalogue(own))
    if gpu.elsewhere:
        raise InputError(f"nothing is predicted for {card!r}: {gpu.elsewhere}")
    precision = trained_in(gpu, options["precision"])
    found = trainable(gpu, precision)
    largest = largest_model(gpu, precision)
    screen.document(
        {
            "gpu": gpu.name,
            "precision": precision,
            "memory_bytes": gpu.memory_bytes,
            "largest_parameters": largest,
            "trainable": [entry.to_dict() for entry in found],
        }
    )
    if details:
        screen.show(lambda console: tables.draw_card(gpu, found, largest, console, precision))
    brief = answering.answer_of_card(gpu, found, largest, precision, details=details)
    screen.show(lambda console: ending(brief, console, details=details))
    return 0
