"""The answer of a script's run: what its page opens with, and what is said at its end."""

from __future__ import annotations

import datetime
from typing import Any

from vivace import words
from vivace.ledger import Ratio
from vivace.pages.answer import Answer

TRIED = "What was tried (speed of a step beside the run, or what is named)"
LEAST_SECONDS = 0.5  # saved or lost, to be worth telling
TOO_LATE = "Found too late to save time in this run"
FOUND_TOO_LATE = "the plan was found too late to make up for that"
GIVEN_TOO_SHORT = "Too short a run for the plan to save time"
GIVEN_TOO_LATE = "the plan's start took longer than it saved"
BY_PROCESSOR = "by the processor's own clock, as others use the processor: no seconds are claimed"
REACHES_BELOW = "which reaches below 1: no seconds are claimed"
OTHER_CLOCK = "by the processor's clock"


def answer_of(document: dict[str, Any], command: str) -> Answer:
    """What `run.json` says of the run of a command."""
    shown: dict[str, Any] = {
        "command": "run",
        "subject": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "facts": (
            ("steps looked at", words.number(document["steps"])),
            ("whole run", words.duration(document["seconds"])),
            ("waited for Vivace", words.duration(document["own_seconds"])),
            *_together(document),
        ),
        "notes": tuple(_notes(document)),
        "page": document.get("page", ""),
    }
    return _faster(document, shown) if document["outcome"] == "faster" else _as_it_was(document, shown)


def _together(document: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """How many processes train one model under one decision, where that is so."""
    num = document.get("processes", 1)
    return (("processes", f"{num}, under one decision"),) if num > 1 else ()


def _faster(document: dict[str, Any], shown: dict[str, Any]) -> Answer:
    ratio = Ratio(**document["ratio"])
    told = f"{words.fast(ratio)} ({words.interval(ratio.low, ratio.high)})"
    saved = document["saved_seconds"]
    if saved is not None and saved >= LEAST_SECONDS:
        figure, sentence = f"At least {words.duration(saved)}", f"saved in this run; a step is {told}"
    elif saved is None:
        why = BY_PROCESSOR if document.get("clock") == "processor" else REACHES_BELOW
        figure, sentence = words.fast(ratio), f"in a step ({words.interval(ratio.low, ratio.high)}), {why}"
    else:
        given = any(entry["answer"] == "given" for entry in document["tried"])
        late, short = (GIVEN_TOO_LATE, GIVEN_TOO_SHORT) if given else (FOUND_TOO_LATE, TOO_LATE)
        longer = _longer(document)
        figure, sentence = "", f"{f'{longer}: {late}' if longer else short}; a step is {told}"
    return Answer(
        figure=figure,
        sentence=sentence,
        same=_same(document),
        same_kept=True,
        parts=_does(document),
        next=(document["next"], f"{document['in_your_code']}  # as your own code"),
        **shown,
    )


def _same(document: dict[str, Any]) -> str:
    num, of = document["watched"], f"{document['worst']:.1f} of {document['limit']:.0f} allowed"
    compared = "One compared step" if num == 1 else f"Worst of {num} compared steps"
    return f"Same model: yes. {compared}: {of}"


def _does(document: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    from vivace.plan import Plan  # which a run without one need not import

    return tuple((t.name, t.card.summary) for t in Plan.from_dict(document["plan"]).techniques)


def searched(document: dict[str, Any], command: str) -> Answer:
    """What `tune` found on the steps of a script, whose own run was only for that."""
    known: dict[str, Any] = {
        "command": "tune",
        "subject": command,
        "notes": ("Nothing that the script wrote was kept", *_of_calls(document), *_passed_over(document)),
        "next": (document["next"],),
        "page": document["report_path"] or "",
    }
    if document["outcome"] != "faster":
        title, parts = TRIED, tuple(came_of(document))
        reason = f"No plan: {document['reason']}".rstrip(".")
        return Answer(sentence=reason, tone="plain", title_of_parts=title, parts=parts, **known)
    ratio = Ratio(**document["speedup"])
    return Answer(
        figure=words.fast(ratio),
        sentence=f"in a step of the script ({words.interval(ratio.low, ratio.high)})",
        same=_same(document),
        same_kept=True,
        parts=_does(document),
        **known,
    )


def _as_it_was(document: dict[str, Any], shown: dict[str, Any]) -> Answer:
    reason = document["reason"].rstrip(".")
    rounded = _rounded(document)
    kept = "was not made faster" if rounded else "was left as it is"
    sentence = f"This run {kept}: {reason}"
    longer = _longer(document)
    if document["outcome"] == "taken_back":
        steps = words.count(document["plan_steps"], "step")
        sentence = f"A plan acted for {steps} and was taken back: {reason}"
        sentence = f"{longer}. {sentence}" if longer else sentence
    elif longer:
        sentence = f"{longer}, and {kept}: {reason}"
    return Answer(
        sentence=". ".join(filter(None, (sentence, rounded))),
        tone="plain",
        title_of_parts=TRIED,
        parts=tuple(came_of(document)),
        next=(document["next"],) if "next" in document else (),
        **shown,
    )


def _rounded(document: dict[str, Any]) -> str:
    """That plans which may change numbers have acted on some of its steps, where they have."""
    steps = document.get("inexact_steps", 0)
    ran = f"{words.count(steps, 'step')} ran under {' + '.join(document.get('inexact', ()))}"
    return f"Results may differ by rounding: {ran}" if steps else ""


def _longer(document: dict[str, Any]) -> str:
    """That the run has lost time in all, where it has."""
    lost = -(document.get("saved_seconds") or 0.0)
    shown = words.duration(lost)
    return f"This run took up to {shown} longer for being looked at" if lost >= LEAST_SECONDS else ""


def _notes(document: dict[str, Any]) -> list[str]:
    problems = [text.strip().splitlines()[-1] for text in document["problems"][:1]]
    notes = [f"a part of Vivace switched itself off: {text}" for text in problems]
    notes = [] if document["reason"] else notes  # which tells the fault
    return notes + _of_calls(document) + _passed_over(document)


def _of_calls(document: dict[str, Any]) -> list[str]:
    """Why nothing acts on the model's calls, where that is so and not the run's own reason."""
    untold = {document.get("only_the_rest", "")} - {"", document["reason"]}
    return [f"its model's calls are as they were: {rest}" for rest in untold]


def _passed_over(document: dict[str, Any]) -> list[str]:
    """Why a GPU of this machine is not used, where the script trains on the processor beside one."""
    return [document["passed_over"]] if document.get("passed_over") else []


def came_of(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What came of each plan that was tried: those timed first; a reason that several share, once, and none
    that is the run's own.
    """
    timed = [(timed_name(e), _timed(e)) for e in document["tried"] if "wall" in e]
    reasons: dict[str, list[str]] = {}
    for entry in document["tried"]:
        if "wall" not in entry:
            reasons.setdefault(why_not(entry), []).append(name_of(entry))
    for told in (document["reason"], document.get("only_the_rest", "")):  # the first may hold the other
        reasons.pop(told, None)
    return timed + [(", ".join(names), why) for why, names in reasons.items()]


def name_of(entry: dict[str, Any]) -> str:
    """A plan that was tried, by its techniques."""
    return " + ".join(entry["plan"]) or "the run as it is"


def timed_name(entry: dict[str, Any]) -> str:
    """The same of one with a ratio: what was added to a plan that acted, which it was timed beside."""
    beside = entry.get("beside", ())
    added = " + ".join(name for name in entry["plan"] if name not in beside)
    return f"{added}, beside {' + '.join(beside)}" if beside else name_of(entry)


def ratio_of(entry: dict[str, Any]) -> tuple[Ratio, str]:
    """How many times as fast a plan was that was timed on the script's own steps, by the clock that answers,
    and in words which clock that is, where it is not the wall's.
    """
    by_processor = entry.get("clock") == "processor"
    return Ratio(**entry["cpu" if by_processor else "wall"]), OTHER_CLOCK if by_processor else ""


def _timed(entry: dict[str, Any]) -> str:
    ratio, clock = ratio_of(entry)
    return ", ".join(filter(None, (words.ratio(ratio), clock)))


def why_not(entry: dict[str, Any]) -> str:
    """Why a plan was not timed on the script's own steps."""
    verdict = entry.get("verdict")
    return str(verdict["reason"] if verdict and not verdict["kept"] else entry["answer"])


def event(record: dict[str, Any]) -> tuple[str, str]:
    """A record of a plan that was adopted, taken back or dropped."""
    told = {
        "adopted": f"adopted at step {record.get('step')}",
        "taken_back": "taken back",
        "dropped": "dropped",
    }
    reason = record.get("reason", "")
    return name_of(record), told[record["record"]] + (f": {reason}" if reason else "")


def looked_at(record: dict[str, Any]) -> tuple[str, str]:
    """A record of a step on which the plan was compared with the script again."""
    judged = "same model" if record["kept"] else record["reason"]
    worst, limit = words.number(record["score"]), words.number(record["limit"])
    seconds = words.duration(record["seconds"])
    return f"step {words.number(record['step'])}", f"{judged}: worst {worst} of {limit} allowed, in {seconds}"


def details(
    document: dict[str, Any], records: list[dict[str, Any]]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """All that the page holds below its answer: titles, each with its rows."""
    tried = [
        (timed_name(e), _timed(e)) if "wall" in e else (name_of(e), why_not(e)) for e in document["tried"]
    ]
    told = [event(r) for r in records if r.get("record") in ("adopted", "taken_back", "dropped")]
    told += [looked_at(r) for r in records if r.get("record") == "watched"]
    run = list(answer_of(document, "").facts)
    sections = (
        (TRIED, tried),
        ("What happened", told),
        ("The run", run),
    )
    return [(title, rows) for title, rows in sections if rows]
