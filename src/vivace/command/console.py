"""The `rich` console of a command: standard error, whether or not it can still be written."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Lasting(Console):
    """Goes on silently where its pipe is closed or its disk full: a training must not end with its log."""

    def on_broken_pipe(self) -> None:
        """Rich's own ends the process."""
        self.quiet = True

    def print(self, *objects: Any, **how: Any) -> None:
        """Rich's own raises where the disk is full, and draws ``train.py:fire:2`` as a flame."""
        try:
            super().print(*objects, emoji=False, **how)
        except OSError:
            self.on_broken_pipe()
