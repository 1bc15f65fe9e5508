"""The answer of a profile: what its page opens with, and what the command ends with."""

from __future__ import annotations

from typing import Any

from vivace import words
from vivace.pages.answer import Answer, capital
from vivace.profiling import together

HEALTHY = "healthy"


def answer(document: dict[str, Any]) -> Answer:
    """What holds the step back most and what that costs; that nothing does, where it is so. Of several ranks,
    what these bring.
    """
    if "law" in document:
        return together.answer(document)
    faults = [verdict for verdict in document["verdicts"] if verdict["cause"] != HEALTHY]
    bounds = document["bounds"]
    figure, sentence = _gain(document, faults, bounds)
    rows = [(_name(row), capital(row["evidence"])) for row in (*faults, *bounds)]
    return Answer(
        command="profile",
        subject=document["target"],
        figure=figure,
        sentence=sentence,
        tone="good" if faults else "plain",
        title_of_parts="What holds it back" if faults else "No fault; what bounds the step",
        parts=tuple(rows),
        notes=tuple(_notes(document, faults)),
        facts=tuple(_facts(document)),
        next=_next(document, faults, bounds),
        page=str(document.get("page_path") or ""),
    )


def _gain(
    document: dict[str, Any], faults: list[dict[str, Any]], bounds: list[dict[str, Any]]
) -> tuple[str, str]:
    """The large figure and what it is of: minutes where the training's length is known, else the ratio."""
    first = next(iter([*faults, *bounds]), None)
    ended = first is not None and first.get("cause") == "ended"
    if first is None or ended or first["gain"]["high"] <= 1.0:
        return "", _without_gain(document, first)
    low, high = first["gain"]["low"], first["gain"]["high"]
    fast, cause = words.fast_between(low, high), _name(first)
    what = (
        f"without this fault: {cause}"
        if faults
        else f"at best, without what bounds it ({cause}); nothing is wrong"
    )
    seconds = _training_seconds(document)
    if seconds is None:
        return fast, what
    after = f"{words.duration(seconds / high)} to {words.duration(seconds / low)}"
    figure = f"{words.duration(seconds)} \N{RIGHTWARDS ARROW} {after}"
    return figure, f"for the steps of one training, {fast} {what}"


def _without_gain(document: dict[str, Any], first: dict[str, Any] | None) -> str:
    if first is not None:
        return capital(first["evidence"])
    healthy = document["verdicts"][0] if document["verdicts"] else None
    return capital(healthy["evidence"]) if healthy else "Nothing is wrong"


def _training_seconds(document: dict[str, Any]) -> float | None:
    """What the steps of the whole training take as they are; None where their number is not known."""
    work = document.get("work") or {}
    epochs, steps = words.real(work.get("epochs")), words.real(work.get("steps_per_epoch"))
    return epochs * steps * document["step_seconds"] if epochs and steps else None


def _name(row: dict[str, Any]) -> str:
    return str(row.get("cause") or row.get("name")).replace("_", " ")


def _notes(document: dict[str, Any], faults: list[dict[str, Any]]) -> list[str]:
    """The shares of the step, and how far it is from the limit."""
    shares = [
        f"{name} {words.percent(share)}" for name, share in document["shares"].items() if share >= 0.005
    ]
    limit, at = document.get("share_of_limit"), ""
    if limit is not None and faults:  # else the evidence says it
        at = f", at {words.percent(limit)} of this machine's limit"
    notes = [f"A step takes {words.duration(document['step_seconds'])}{at}: {', '.join(shares)}"]
    if document.get("disturbed"):
        used = words.percent(document["foreign_share"])
        notes.append(f"Other processes used {used} of the processor meanwhile, so all times are disturbed")
    if document.get("unsteady_limit") and limit is not None:
        notes.append(f"The limit may lie higher: {document['unsteady_limit']}")
    if document.get("idle_gpu"):
        notes.append(capital(document["idle_gpu"]))
    if document.get("replaced"):
        notes.append(f"It took the place of an earlier profile, of {document['replaced']}")
    return notes


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    machine, peak = document.get("machine") or {}, document["memory"].get("peak_bytes")
    cores = words.real(machine.get("cores"))
    beside = ", disturbed" if document.get("disturbed") else ""
    facts = [
        (f"a step{beside}", words.duration(document["step_seconds"])),
        (f"samples a second{beside}", words.number(document["samples_per_second"])),
    ]
    share = document.get("share_of_limit")
    if share is not None:  # else it is not known, or the step beats what was measured
        limit = words.duration(document["bound_seconds"])
        facts += [(f"the limit, bound by {document['bound_by']}", limit)]
        facts += [("of this machine's limit", words.percent(share))]
    facts += [("peak memory", words.size(peak))] if peak else []
    if cores:
        facts.append((words.count(int(cores), "core"), str(machine.get("device"))))
    return facts


def _next(
    document: dict[str, Any], faults: list[dict[str, Any]], bounds: list[dict[str, Any]]
) -> tuple[str, ...]:
    """What to do about the first fault or bound, or the search for what is faster."""
    first = next(iter([*faults, *bounds]), None)
    return (str(first["next"] if first else document["tune"]),)
