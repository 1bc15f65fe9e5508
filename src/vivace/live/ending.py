"""What is said at a script's end, on standard error, and the document beside the ledger."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.errors import printable
from vivace.files import finite, replace_text
from vivace.ledger import Ledger
from vivace.live.answering import answer_of, details
from vivace.live.errand import DOCUMENT, LEDGER, PAGE, PLAN, UNSEEN, Errand
from vivace.live.spending import least_seconds
from vivace.pages.answer import in_letters, lines
from vivace.processes import scripts

if TYPE_CHECKING:
    from vivace.live.course import Course
    from vivace.live.loop import Loop

PREFIX = "vivace: "  # before every line on a stream that is the script's
NARROWEST = 20  # letters of a line, however narrow the terminal says to be


def tell(loop: Loop) -> None:
    """Write the document, its page, and say it in a few lines. All but the page also count what that took."""
    begin = loop.clock.wall()
    rank = str(loop.ranks.rank) if loop.ranks is not None else os.environ.get("RANK", "0")
    if rank != "0":  # the first one says it, but for what is no decision
        for problem in loop.problems:
            print(f"{PREFIX}process {rank}: {problem.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
        return
    document = document_of(loop)
    if document["steps"] and not document["plan"]:
        document["next"] = f"vivace profile -- {_by_torchrun(loop.errand)}{loop.errand.command}"
    errand, name = loop.errand, DOCUMENT
    if document["tried"] or (document["steps"] and errand.search_seconds is None):
        errand.make_way()
    elif any(map(errand.is_earlier, (PLAN, LEDGER, PAGE))):  # more than that nothing was seen
        name = UNSEEN
        document["reason"] += f"; an earlier result stays in {errand.shown}"
    try:
        if document["tried"]:
            from vivace.live.page import page

            records = _records(errand, document)
            replace_text(Path(errand.folder) / PAGE, page(document, records, errand.command))
    finally:
        _took(document, loop.clock.wall() - begin)
        say(errand, document)
        if name == DOCUMENT or (errand.launcher and not errand.became):  # else nobody waits for it
            replace_text(Path(errand.folder) / name, json.dumps(finite(document)))


def say(errand: Errand, document: dict[str, Any]) -> None:
    """Say what a run's document holds, where anything is said."""
    if errand.search_seconds is None and not errand.quiet:  # else the one who asked says it
        told = said(document, errand.command, _records(errand, document) if errand.details else None)
        print(*told, sep="\n", file=sys.stderr, flush=True)


def _records(errand: Errand, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the process that the document is of: others may share its ledger."""
    every = Ledger(Path(errand.folder) / LEDGER).read()
    return [record for record in every if record.get("process") == document["process"]]


def _took(document: dict[str, Any], seconds: float) -> None:
    document["own_seconds"] += seconds
    if document["saved_seconds"] is not None:
        document["saved_seconds"] -= seconds


def document_of(loop: Loop) -> dict[str, Any]:
    """Outcome, steps, seconds, what it saved, or, below 0, cost the run in all, and, where a plan acted, its
    ratio and how it was watched.
    """
    course = loop.conductor.course if loop.conductor is not None else None
    cost = loop.spending.own_seconds + loop.spending.lost
    found: dict[str, Any] = {
        "outcome": "nothing_seen" if not loop.num_steps else "left_alone",
        "reason": loop.left_alone
        or ("" if loop.num_steps else _first_write() or _why_nothing_was_seen(loop)),
        "steps": loop.num_steps,
        "seconds": loop.spending.elapsed,
        "step_seconds": loop.median_seconds or None,
        "own_seconds": loop.spending.own_seconds,
        "lost_seconds": loop.spending.lost,
        "saved_seconds": -cost,
        "only_the_rest": loop.rest,
        "problems": loop.problems,
        "process": os.getpid(),
        "processes": loop.ranks.world_size if loop.ranks is not None else 1,
        "plan": {},
        "tried": [],
    }
    if course is None:
        if loop.num_steps and not found["reason"]:
            found["reason"] = _first_write() or _too_short(loop)
        return found
    found |= {"tried": course.tried, "inexact_steps": course.inexact_steps, "inexact": list(course.inexact)}
    found["passed_over"] = course.machine.idle_gpu if course.device.type == "cpu" else ""
    found["reason"] = course.reason or found["reason"]
    acted = course.comparison is not None and (course.plan_steps or course.plan.techniques)
    if acted:
        found |= _acted(course, cost)
    if found["tried"]:
        found["page"] = str(Path(loop.errand.shown) / PAGE)
    if course.plan.techniques:
        found |= {"outcome": "faster", "plan": course.plan.to_dict(), "reason": ""}
        plan = shlex.quote(str(Path(loop.errand.shown) / PLAN))
        launcher = _by_torchrun(loop.errand) + "-m " * bool(_by_torchrun(loop.errand))
        found["next"] = f"{launcher}vivace run --plan {plan} -- {loop.errand.command}"
        found["in_your_code"] = f"vivace export --plan {plan}"
    elif acted:
        found["outcome"] = "taken_back"
    elif course.tried:
        found["outcome"] = "not_faster"
    if not found["plan"] and not found["reason"]:
        found["reason"] = _first_write() or "it ended before anything was decided"
    return found


def end_at_once() -> None:
    """End this process, a script that was run for its plan alone: what it has printed is kept, and the
    processes that are to end with it do.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed by the script
                stream.flush()
        with contextlib.suppress(ValueError):  # in another thread than the main one
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # that of torch's loaders raises
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
    finally:
        os._exit(0)


def _by_torchrun(errand: Errand) -> str:
    """How torchrun has started this process, up to its script; empty where it has not."""
    if not (errand.is_for_this_process and scripts.has_torchrun_started()):
        return ""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    several = f"--nnodes {nodes} " if nodes != "1" else ""
    return f"torchrun {several}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} "


def _acted(course: Course, cost: float) -> dict[str, Any]:
    """What a plan brought that acted, less `cost` seconds, and how it was watched."""
    from vivace.live.proof import LIMIT

    comparison = course.comparison
    assert comparison is not None
    ratio, wall = comparison.ratio, comparison.wall
    saved = course.plan_seconds * (wall.low - 1.0) if wall.low > 1.0 else None  # at least
    if course.saved_before:
        saved = course.saved_before + (saved or 0.0)
    return {
        "ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high},
        "clock": comparison.clock,
        "saved_seconds": None if saved is None else saved - cost,
        "plan_steps": course.plan_steps,
        "watched": len(course.verdicts),
        "limit": LIMIT,
        "worst": max((v.score for v in course.verdicts), default=0.0),
    }


def _first_write() -> str:
    """What a script that may not write anywhere was stopped by."""
    from vivace.live import cover

    error = vars(sys).get("last_value")
    if os.environ.get(cover.HOW) != cover.READ_ONLY or not isinstance(error, OSError):
        return ""
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return (
        f"it was stopped at its first write, to '{error.filename}', before anything was decided: this system "
        "has no overlay that could take what it writes"
    )


def _too_short(loop: Loop) -> str:
    """Why a script ended before anything was tried."""
    if not loop.step_seconds:
        return f"it ended after {words.count(loop.num_steps, 'step')}, before a step was timed"
    seconds, timed = loop.timed
    took, least = loop.num_steps * seconds / max(1, timed), least_seconds(loop.copy_seconds)
    if took >= least:
        return "it ended before anything was tried"
    return (
        f"its steps took {words.duration(took)} in all, and a search begins where at least "
        f"{words.duration(least)} are to come"
    )


def _why_nothing_was_seen(loop: Loop) -> str:
    if loop.of_threads:
        return "its optimizer steps in a thread beside the main one"
    if "keras" in sys.modules:
        return (
            "it trains through Keras, whose steps are not torch's: give the compiled model to "
            "vivace.Job.from_keras(model, x, y, batch_size=..., epochs=...), then tune and train"
        )
    if (last := vars(sys).get("last_value")) is not None:
        ended = "was interrupted" if isinstance(last, KeyboardInterrupt) else "failed"
        return f"it {ended} before its first training step had ended"
    return "no training step of torch was seen"


def said(document: dict[str, Any], command: str, records: list[dict[str, Any]] | None = None) -> list[str]:
    """The lines for the person; with the ledger's records also all that the page holds, before the answer."""
    width = max(shutil.get_terminal_size((80, 24)).columns - len(PREFIX), NARROWEST)
    found: list[str] = []
    for title, rows in details(document, records) if records is not None else ():
        column = max(len(name) for name, _ in rows)
        told = [in_letters(printable(f"  {name:<{column}}  {text}")) for name, text in rows]
        found += [f"{title}:", *told, ""]
    found += lines(answer_of(document, command), width, details=records is not None)
    return [f"{PREFIX}{line}".rstrip() for line in found]
