"""The forms that a search has tried, a line each as it goes on: whatever ends it, the next one knows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.compressing.result import Tried
from vivace.errors import InputError

FINAL = ("kept", "refused", "undecided", "slower", "failed")  # what need not be tried again


class Journal:
    """One JSON line on what was asked, and one for each form that was tried.

    Args:
        asked: what a search is for, in words: results count for the same alone.
    """

    def __init__(self, path: Path, asked: dict[str, str | int | float]) -> None:
        self.path, self.asked = path, asked

    def begin(self) -> None:
        """Begin a new file, which forgets what an earlier search has written."""
        self.path.write_text(json.dumps({"asked": self.asked}) + "\n", encoding="utf-8")

    def add(self, one: Tried) -> None:
        """Write down a form that was tried, so that it need not be tried again."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(one.to_dict(), default=str) + "\n")

    def recall(self) -> list[Tried]:
        """What an earlier search found that need not be tried again; the last word on each form counts.

        Begins anew where there is none. Raises InputError where something else was asked then.
        """
        lines = list(self._lines())
        if not lines:
            self.begin()
            return []
        before = lines[0].get("asked") if isinstance(lines[0], dict) else None
        if not isinstance(before, dict):
            raise InputError(f"'{self.path}' is not what vivace compress wrote: leave --resume out")
        for name, value in self.asked.items():
            if before.get(name, value) != value:
                raise InputError(
                    f"the search in '{self.path.parent}' has {name} {before.get(name)}, not {value}: "
                    "resume it with what was asked then, or leave --resume out"
                )
        found = [Tried.from_dict(one) for one in {one["name"]: one for one in lines[1:]}.values()]
        self.begin()  # a kill may have cut the last line
        for one in found:
            self.add(one)
        return [one for one in found if one.status in FINAL]

    def _lines(self) -> Sequence[Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a kill may have cut the last one
                break
        return found
