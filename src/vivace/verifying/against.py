"""The parent's side of judging an edit: two child processes, and the files in which they meet."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from vivace.events import Tell
from vivace.machine import Machine
from vivace.processes.launch import Child, Source
from vivace.verifying.verdict import Verdict
from vivace.verifying.verifier import REPEATABLE, TIMEOUT_SECONDS

ORIGINAL, EDITED = "vivace.verifying.edits:Original", "vivace.verifying.edits:Edited"


def judge_edit(
    edited: Source,
    original: Source,
    machine: Machine,
    *,
    roundoff: float,
    seconds: float | None,
    tell: Tell,
) -> Verdict:
    """Is the edited training the same model as the original, but for rounding to `roundoff`?

    `seconds` bound the effort as they do for a plan.

    Raises InputError where their parameters are not the same, and as `verify` does.
    """
    begin = time.monotonic()
    arguments = {"machine": machine.to_dict()}
    with (
        tempfile.TemporaryDirectory(prefix="vivace-") as folder,
        Child(ORIGINAL, original, arguments, environment=REPEATABLE) as theirs,
        Child(EDITED, edited, arguments, environment=REPEATABLE) as mine,
    ):
        tell("prepared", theirs.ask("prepare", TIMEOUT_SECONDS, seconds=seconds))
        loan, answer = str(Path(folder, "loan")), str(Path(folder, "answer"))
        drawn = [str(Path(folder, name)) for name in ("edited", "original")]
        theirs.ask("lend", TIMEOUT_SECONDS, path=loan)
        mine.ask("run", TIMEOUT_SECONDS, loan=loan, path=answer, notes_halves=roundoff > 0.0)
        question: dict[str, Any] = {"answer": answer, "roundoff": roundoff}
        while wanted := (document := theirs.ask("weigh", TIMEOUT_SECONDS, **question)).get("ask"):
            if wanted == "means":
                mine.ask("run_means", TIMEOUT_SECONDS, path=answer)
            elif wanted == "gradients":
                for number in range(document["count"]):
                    step = {"number": number, "path": str(Path(folder, "gradient"))}
                    mine.ask("gradient", TIMEOUT_SECONDS, **step, apart=document["apart"])
                    theirs.ask("pair", TIMEOUT_SECONDS, **step)
            else:
                for child, path in zip((mine, theirs), drawn, strict=True):
                    child.ask("draw", TIMEOUT_SECONDS, path=path)
                question["drawn"] = drawn
    return Verdict.of(document | {"seconds": time.monotonic() - begin})
