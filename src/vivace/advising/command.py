"""What `vivace advise` does with its options: advice on a job, or the reverse for a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vivace.advising import answering, tables
from vivace.advising.catalogue import find_gpu, load_catalogue
from vivace.advising.ranking import advise
from vivace.advising.reverse import largest_model, trainable
from vivace.errors import InputError
from vivace.pages.answer import ending

OF_A_CARD = ("precision", "catalogue")  # options that count with --on
LEFT_OUT = {"probability": 0.8, "most": 8, "electricity": 0.25}  # what others are where nobody gave them


class Screen(Protocol):
    """Where documents, tables and lines go."""

    def document(self, content: dict[str, Any]) -> None:
        """Print JSON where it was asked for."""

    def show(self, draw: Callable[[Any], None]) -> None:
        """Draw on a console."""

    def say(self, text: str) -> None:
        """Print a line."""


def answer(
    subject: str | None, card: str | None, options: dict[str, Any], screen: Screen, *, details: bool = False
) -> int:
    """Answer on `screen` and return the exit code. Raises InputError where the question is none or two."""
    if (subject is None) == (card is None):
        raise InputError(
            "give a JOB, a profile or a model to advise on, or --on CARD for what a card could train"
        )
    if card is not None:
        needless = [
            name for name, value in options.items() if name not in OF_A_CARD and value != LEFT_OUT.get(name)
        ]
        if needless:
            option = needless[0].replace("_", "-")
            raise InputError(
                f"--on asks what a card could train, of which --{option} says nothing: leave it out"
            )
        return _reverse(card, options, screen)
    assert subject is not None
    advice = advise(subject, **options)
    screen.document(advice.to_dict())
    if details:
        screen.show(lambda console: tables.draw(advice, console))
    screen.show(lambda console: ending(answering.answer(advice), console))
    return advice.exit_code


def _reverse(card: str, options: dict[str, Any], screen: Screen) -> int:
    own: Path | None = options["catalogue"]
    gpu = find_gpu(card, load_catalogue(own))
    precision = "amp" if options["precision"] == "auto" else options["precision"]
    found = trainable(gpu, precision)
    largest = largest_model(gpu, precision)
    screen.document(
        {
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "largest_parameters": largest,
            "trainable": [entry.to_dict() for entry in found],
        }
    )
    screen.show(lambda console: tables.draw_card(gpu, found, largest, console, precision))
    return 0
