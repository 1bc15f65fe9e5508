"""What became of a script's run, as a page: one self-contained HTML file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vivace import words
from vivace.pages import charts
from vivace.pages.answer import Answer
from vivace.pages.render import render
from vivace.plan import Plan

_TEMPLATE = Path(__file__).parent / "templates" / "run.html.jinja"


def page(document: dict[str, Any], records: list[dict[str, Any]], command: str) -> str:
    """The page of `run.json` and its ledger."""
    tried = [entry for entry in document["tried"] if "wall" in entry]
    left_out = [(_name(e), _why(e)) for e in document["tried"] if "wall" not in e]
    scale = charts.linear(
        0.0, max([1.0, *(min(e["wall"]["high"], 2 * e["wall"]["estimate"]) for e in tried)]) * 1.02, 6
    )
    return render(
        _TEMPLATE,
        answer_of(document, command),
        document=document,
        tried=charts.rows([_row(entry, scale) for entry in tried], scale) if tried else None,
        left_out=left_out,
        pairs=_pairs(records),
        watched=[record for record in records if record.get("record") == "watched"],
        events=[_event(r) for r in records if r.get("record") in ("adopted", "taken_back", "dropped")],
    )


def answer_of(document: dict[str, Any], command: str) -> Answer:
    """The first screen."""
    shown: dict[str, Any] = {
        "command": "run",
        "subject": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "facts": (
            ("steps", words.number(document["steps"])),
            ("whole run", words.duration(document["seconds"])),
            ("waited for Vivace", words.duration(document["own_seconds"])),
        ),
        "notes": tuple(text.strip().splitlines()[-1] for text in document["problems"][:1]),
    }
    if document["outcome"] != "faster":
        sentence = f"this run was left as it is: {document['reason']}"
        if document["outcome"] == "taken_back":
            sentence = (
                f"a plan acted for {document['plan_steps']} steps and was taken back: {document['reason']}"
            )
        return Answer(sentence=sentence.rstrip("."), tone="plain", **shown)
    ratio, saved = document["ratio"], document["saved_seconds"]
    interval = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
    if saved is not None and saved >= 0.5:
        figure, sentence = (
            words.duration(saved),
            f"saved of this run, at least; its steps are {ratio['estimate']:.2f}x as fast ({interval})",
        )
    else:
        figure, sentence = (
            f"{ratio['estimate']:.2f}x",
            f"as fast in a step ({interval}), found too late to save much of this run",
        )
    watched = document["watched"]
    times = "once" if watched == 1 else f"{watched} times"
    same = (
        f"Same model: yes. Watched {times}, worst {document['worst']:.1f} of {document['limit']:.0f} allowed"
    )
    parts = tuple((t.name, t.card.summary) for t in Plan.from_dict(document["plan"]).techniques)
    following = (document["next"], document["in_your_code"])
    return Answer(
        figure=figure, sentence=sentence, same=same, same_kept=True, parts=parts, next=following, **shown
    )


def _name(entry: dict[str, Any]) -> str:
    return " + ".join(entry["plan"]) or "the run as it is"


def _why(entry: dict[str, Any]) -> str:
    verdict = entry.get("verdict")
    return str(verdict["reason"] if verdict and not verdict["kept"] else entry["answer"])


def _row(entry: dict[str, Any], scale: charts.Scale) -> charts.Row:
    ratio = entry["wall"]
    drawing = charts.step(scale, 1.0, ratio["estimate"], ratio["low"], min(ratio["high"], scale.high))
    small = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
    return charts.Row(
        _name(entry),
        drawing,
        f"{ratio['estimate']:.2f}\N{MULTIPLICATION SIGN}",
        small,
        kept=entry["answer"] == "faster",
    )


def _pairs(records: list[dict[str, Any]]) -> Markup | None:
    """Seconds a step, script and plan in turn, in the order in which they were timed."""
    adopted = [record for record in records if record.get("record") in ("adopted", "timed")]
    pairs = [pair for record in adopted for pair in record["pairs"]]
    series = {"plan": [pair[1] for pair in pairs], "reference": [pair[0] for pair in pairs]}
    return charts.lines(
        "Seconds a step, in turn", list(range(1, len(pairs) + 1)), series, origin=True, unit="pair"
    )


def _event(record: dict[str, Any]) -> tuple[str, str]:
    plan = " + ".join(record["plan"]) or "the run as it is"
    told = {
        "adopted": f"adopted at step {record.get('step')}",
        "taken_back": "taken back",
        "dropped": "dropped",
    }
    reason = record.get("reason", "")
    return plan, told[record["record"]] + (f": {reason}" if reason else "")
