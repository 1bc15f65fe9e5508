"""What the launcher tells the script's process, in one variable of its environment."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from vivace.files import LOCK

VARIABLE = "VIVACE_RUN"
PLAN, LEDGER, DOCUMENT, PAGE, _ = OWN = ("plan.toml", "ledger.jsonl", "run.json", "run.html", LOCK)


@dataclasses.dataclass(frozen=True)
class Errand:
    """`folder` in full and `shown` as the person wrote it; `plan` by technique, or None to search.

    `launcher` is the process that started the script, or, `became`, that is it now; 0 where the script asked
    itself. Where it is `quiet`, nothing is said at the end; with `details`, all that the page holds. Within
    `search_seconds` the script is run for the plan alone, and ends when that is found; left out, it trains
    on. `launch_seconds` have gone before the script began. `lock` is the number of the file by which a
    process that `became` the script holds its folder. `first_tells`: the process that the
    person started says at its end what came of one that it started, whose output may be for itself.
    """

    folder: str
    shown: str
    command: str
    plan: dict[str, dict[str, Any]] | None = None
    launcher: int = 0
    became: bool = False
    quiet: bool = False
    details: bool = False
    search_seconds: float | None = None
    launch_seconds: float = 0.0
    lock: int = -1
    first_tells: bool = False

    def dumps(self) -> str:
        """The variable's value."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Errand:
        """The inverse of `dumps`."""
        return cls(**json.loads(text))

    @property
    def is_for_this_process(self) -> bool:
        """Is this the process that the person started, and not one that their script started?"""
        return self.launcher in (0, os.getpid() if self.became else os.getppid())
