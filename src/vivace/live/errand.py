"""What the launcher tells the script's process, in one variable of its environment."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from vivace.files import LOCK

VARIABLE = "VIVACE_RUN"
OWN = ("plan.toml", "ledger.jsonl", "run.json", "run.html", "unseen.json", LOCK)
PLAN, LEDGER, DOCUMENT, PAGE, UNSEEN, _ = OWN  # the fifth: the document of what left the earlier ones there


def lying_in(folder: Path) -> dict[str, int]:
    """When each file that an earlier run has left there was written, in ns since 1970, by its name."""
    return {name: (folder / name).stat().st_mtime_ns for name in OWN[:-1] if (folder / name).is_file()}


@dataclasses.dataclass(frozen=True)
class Errand:
    """`folder` in full and `shown` as the person wrote it; `plan` by technique, or None to search.

    `launcher` is the process that started the script, or, `became`, that is it now; 0 where the script asked
    itself. Where it is `quiet`, nothing is said at the end; with `details`, all that the page holds. Within
    `search_seconds` the script is run for the plan alone, and ends when that is found; left out, it trains
    on. `launch_seconds` have gone before the script began. `lock` is the number of the file by which a
    process that `became` the script holds its folder. `first_tells`: the process that the
    person started says at its end what came of one that it started, whose output may be for itself.
    `earlier` is what was `lying_in` the folder: it goes when there is something to put in its place.
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
    earlier: dict[str, int] = dataclasses.field(default_factory=dict)

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

    def is_earlier(self, name: str) -> bool:
        """Does a file of that name lie in the folder as an earlier run has left it?"""
        with contextlib.suppress(FileNotFoundError):
            return (Path(self.folder) / name).stat().st_mtime_ns == self.earlier.get(name)
        return False

    @property
    def is_told(self) -> bool:
        """Has a process of this run said what came of it?"""
        told = (name for name in (DOCUMENT, UNSEEN) if not self.is_earlier(name))
        return any((Path(self.folder) / name).exists() for name in told)

    def make_way(self) -> None:
        """Remove what an earlier run has left; a given plan lies in the folder from here on.

        One process at a time: another's new file is no earlier one. The given plan may be the earlier one,
        which is replaced and never missing.
        """
        folder = Path(self.folder)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the folder is gone, or its disk has no such locks
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for name in filter(self.is_earlier, self.earlier):
                if name != PLAN or self.plan is None:
                    (folder / name).unlink(missing_ok=True)
            if self.plan is not None and (self.is_earlier(PLAN) or not (folder / PLAN).exists()):
                from vivace.plan import Plan

                Plan.from_dict(self.plan).save(folder / PLAN)

    def take_document(self) -> dict[str, Any] | None:
        """What came of the script; None where it has not said that."""
        found = None
        for name in (UNSEEN, DOCUMENT):
            with contextlib.suppress(OSError, ValueError):
                if not self.is_earlier(name):
                    found = json.loads((Path(self.folder) / name).read_text(encoding="utf-8"))
        (Path(self.folder) / UNSEEN).unlink(missing_ok=True)
        return found
