"""What is said at a script's end, on standard error, and the document beside the ledger."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from vivace.files import replace_text
from vivace.live.errand import DOCUMENT, PAGE, PLAN
from vivace.live.loop import Loop


def tell(loop: Loop) -> None:
    """Write the document and say it in a few lines."""
    document = document_of(loop)
    if loop.errand.search_seconds is None and not loop.errand.quiet:  # else the one who asked says it
        for line in lines(document):
            print(f"vivace: {line}", file=sys.stderr)
        sys.stderr.flush()
    replace_text(Path(loop.errand.folder) / DOCUMENT, json.dumps(document))
    if loop.conductor is not None and document["tried"]:
        from vivace.live.page import page

        records = loop.conductor.ledger.read()
        replace_text(Path(loop.errand.folder) / PAGE, page(document, records, loop.errand.command))


def document_of(loop: Loop) -> dict[str, Any]:
    """Outcome, steps, seconds and, where a plan acted, its ratio, what it saved and how it was watched."""
    conductor = loop.conductor
    found: dict[str, Any] = {
        "outcome": "nothing_seen" if not loop.num_steps else "left_alone",
        "reason": loop.left_alone
        or loop.rest
        or ("" if loop.num_steps else _first_write() or _why_nothing_was_seen()),
        "steps": loop.num_steps,
        "seconds": loop.spending.elapsed,
        "own_seconds": loop.spending.waited,
        "lost_seconds": loop.spending.lost,
        "only_the_rest": loop.rest,
        "problems": loop.problems,
        "plan": {},
        "tried": [],
    }
    if conductor is None:
        if loop.num_steps and not found["reason"]:
            found["reason"] = _first_write() or "it ended before anything was tried"
        return found
    found["tried"] = conductor.tried
    found["reason"] = conductor.reason or found["reason"]
    from vivace.live.proof import LIMIT

    comparison = conductor.comparison
    acted = comparison is not None and (conductor.plan_steps or conductor.plan.techniques)
    if acted:
        assert comparison is not None
        ratio, wall = comparison.ratio, comparison.wall
        saved = conductor.plan_seconds * (wall.low - 1.0) if wall.low > 1.0 else None  # at least
        if conductor.saved_before:
            saved = conductor.saved_before + (saved or 0.0)
        found |= {
            "ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high},
            "clock": "wall" if ratio is wall else "processor",
            "saved_seconds": None if saved is None else saved - loop.spending.waited - loop.spending.lost,
            "plan_steps": conductor.plan_steps,
            "watched": len(conductor.verdicts),
            "limit": LIMIT,
            "worst": max((v.score for v in conductor.verdicts), default=0.0),
        }
    if found["tried"]:
        found["page"] = str(Path(loop.errand.shown) / PAGE)
    if conductor.plan.techniques:
        found |= {"outcome": "faster", "plan": conductor.plan.to_dict(), "reason": ""}
        plan = Path(loop.errand.shown) / PLAN
        found["next"] = f"vivace run --plan {plan} -- {loop.errand.command}"
        found["in_your_code"] = f"vivace export --plan {plan}"
    elif acted:
        found["outcome"] = "taken_back"
    elif conductor.tried:
        found["outcome"] = "not_faster"
    if not found["plan"] and not found["reason"]:
        found["reason"] = _first_write() or "it ended before anything was decided"
    return found


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


def _why_nothing_was_seen() -> str:
    if "keras" in sys.modules:
        return (
            "it trains through Keras, whose steps are not torch's: give the compiled model to "
            "vivace.Job.from_keras(model, x, y, batch_size=..., epochs=...), then tune and train"
        )
    return "no training step of torch was seen"


def lines(document: dict[str, Any]) -> list[str]:
    """The sentences for the person."""
    problems = [text.strip().splitlines()[-1] for text in document["problems"]]
    notes = [f"a part switched itself off: {text}" for text in problems[:1]]
    if document["only_the_rest"] and document["plan"]:
        notes.append(f"its model's calls are as they were: {document['only_the_rest']}")
    if document["outcome"] == "faster":
        ratio, watched = document["ratio"], document["watched"]
        times = "once" if watched == 1 else f"{watched} times"
        saved = document["saved_seconds"]
        if saved is None:  # others use the processor: how long the run would have taken is not known
            begun = "its steps take less of the processor's time"
        elif saved >= 0.5:
            begun = f"saved at least {saved:.0f} s of this run"
        else:
            begun = "found a faster plan, too late for this run"
        shown = f"{ratio['estimate']:.2f}x, {ratio['low']:.2f}-{ratio['high']:.2f}"
        return [
            f"{begun} ({shown}, by {' + '.join(document['plan'])}), "
            f"same model: watched {times}, worst {document['worst']:.1f} of {document['limit']:.0f}",
            f"next time: {document['next']}",
            f"in your own code: {document['in_your_code']}; what was tried: {document['page']}",
            *notes,
        ]
    if document["outcome"] == "taken_back":
        return [
            f"a plan acted for {document['plan_steps']} steps and was taken back: {document['reason']}",
            *notes,
        ]
    tried = _briefly(document)
    more = f" ({'; '.join(tried)})" if tried else ""
    page = [f"what was tried: {document['page']}"] if "page" in document else []
    return [f"this run was left as it is: {document['reason']}{more}", *page, *notes]


def _briefly(document: dict[str, Any]) -> list[str]:
    """What came of each plan that was tried; a reason that several share, or that is told already, once."""
    ratios: list[str] = []
    told = document["reason"], document["only_the_rest"]  # the first holds the other
    reasons: dict[str, list[str]] = {reason: [] for reason in told}
    for entry in document["tried"]:
        name = " + ".join(entry["plan"]) or "nothing"
        if "wall" in entry:
            ratio = entry["wall"]
            ratios.append(f"{name} {ratio['estimate']:.2f}x, {ratio['low']:.2f}-{ratio['high']:.2f}")
            continue
        verdict = entry.get("verdict")
        broken = verdict and not verdict["kept"]
        reasons.setdefault(verdict["reason"] if broken else entry["answer"], []).append(name)
    for reason in told:
        reasons.pop(reason, None)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()] + ratios
