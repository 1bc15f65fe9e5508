"""Batches that arrive in time: is their copying hidden under compute, and what do bytes save?"""

from __future__ import annotations

from pathlib import Path

from book import Book, Case, Server

from vivace.processes.launch import Child, Source

TINY = Source(f"{Path(__file__).resolve().parent / 'tiny.py'}:cnn")
CASES = {"overlap of ResNet-50": "overlap", "floats against bytes": "sent"}


def feed(book: Book) -> None:
    """Both cases in one child process; demanded: at least 95 % of the placing hidden, and equal bits."""
    if book.done(*CASES):
        return
    with Server(lambda: Child("arrivals:Arrivals", TINY, {"dry": book.dry})) as server:
        for name, command in CASES.items():
            timeout = book.patience(180.0)
            book.case(name, lambda c=command, t=timeout: judged(server.ask(c, t)), seconds=8)


def judged(found: dict[str, float]) -> Case:
    """A case whose bits must be equal, where it has some."""
    if not found.get("bits_equal", 1.0):
        return {"found": found, "status": "broken", "reason": "a batch sent as bytes has other bits"}
    return {"found": found}
