"""The forms that a search has tried, a line each as it goes on: whatever ends it, the next one knows them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vivace.compressing.result import Tried
from vivace.errors import InputError
from vivace.files import finite, replace_text
from vivace.serving.forms import form_named

FINAL = ("kept", "refused", "undecided", "slower", "failed")  # what need not be tried again


class Journal:
    """One JSON line on what was asked, and one for each form that was tried.

    Args:
        asked: what a search is for, in words: results count for the same alone.
    """

    def __init__(self, path: Path, asked: dict[str, str | int | float]) -> None:
        self.path, self.asked = path, asked

    def begin(self, known: Iterable[Tried] = ()) -> None:
        """Begin a new file, which forgets what an earlier search has written but for what is `known`. Raises
        FolderError.
        """
        replace_text(self.path, json.dumps({"asked": self.asked}) + "\n" + "".join(map(_line, known)))

    def add(self, one: Tried) -> None:
        """Write down a form that was tried, so that it need not be tried again."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(one))

    def recall(self) -> list[Tried]:
        """What an earlier search found that need not be tried again; the last word on each form counts.

        What a kill or a disk has damaged is not known. Begins anew where there is none. Raises InputError
        where something else was asked then, or the file does not say what, FolderError where it cannot be
        written.
        """
        lines = self._lines()
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
        found = dict[str, Tried]()
        for line in lines[1:]:
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                one = Tried.from_dict(line)
                found[form_named(one.name).name] = one
        self.begin(found.values())
        return [one for one in found.values() if one.status in FINAL]

    def _lines(self) -> list[Any]:
        """What stands in each line, None where it cannot be read."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        found = list[Any]()
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                found.append(None)
        return found


def _line(one: Tried) -> str:
    return json.dumps(finite(one.to_dict()), default=str) + "\n"
