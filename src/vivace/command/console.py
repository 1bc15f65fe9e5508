"""The `rich` console of a command: standard error, whether or not somebody still reads it."""

from __future__ import annotations

from rich.console import Console


class Lasting(Console):
    """Goes on silently where its pipe is closed: a training must not end with what read its progress."""

    def on_broken_pipe(self) -> None:
        """Rich's own ends the process."""
        self.quiet = True
