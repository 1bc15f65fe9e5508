"""The answer of `vivace compress`: what its page opens with, and what the command ends with."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from vivace import words
from vivace.compressing.result import Compressed, Tried
from vivace.events import metric_title
from vivace.pages.answer import Answer
from vivace.serving.forms import EXTRA
from vivace.serving.use import unjudged

MOST_NAMED = 4  # of operators


def answer(found: Compressed) -> Answer:
    """What to deploy, how fast it is, what it loses, and what was tried."""
    winner, reference = found.winner, found.reference
    nothing = winner is reference
    open_ended = found.outcome in ("could_not_measure", "nothing_tried", "interrupted")
    first = int(found.interrupted)
    return Answer(
        command="compress",
        subject=found.job,
        figure="" if nothing else _figure(found),
        sentence=_sentence(found),
        tone="open" if open_ended else "plain" if nothing else "good",
        same="" if nothing else same(found, winner),
        same_kept=None if nothing else True,
        title_of_parts="What was tried",
        parts=tuple((one.name, told(one)) for one in in_order(found) if one.status != "untried"),
        notes=(
            *found.notes[:first],
            *_unmeasured(found),
            *_undecided(found),
            *_faster_beside(found),
            *_unjudged(found),
            *_untried(found),
            *_missing(found),
            *found.notes[first:],
        ),
        facts=tuple(_facts(found)),
        next=_next(found),
        date=found.date,
        page=found.page_path,
    )


def _figure(found: Compressed) -> str:
    winner, reference = found.winner, found.reference
    if found.objective == "size" and winner.bytes and reference.bytes:
        return f"{words.number(100 * winner.bytes / reference.bytes)} % of the size"
    return words.fast(winner.ratio) if winner.ratio else ""


def _sentence(found: Compressed) -> str:
    winner, reference = found.winner, found.reference
    if found.outcome == "could_not_measure":
        busiest = max(one.foreign_share for one in found.tried)
        used = f" (others used up to {words.percent(busiest)} of the processor)" if busiest else ""
        return f"Could not be measured{used}: no form is known to be better than your model as it is"
    if found.outcome == "nothing_tried":
        return "Nothing was tried: the budget ended first"
    if winner is reference:
        wanted = "smaller" if found.objective == "size" else "better"
        tried = " that was tried" if found.go_on else ""
        return f"No form{tried} is {wanted} than your model as it is, at a batch of {found.batch}"
    return (
        f"with {winner.name} ({winner.does}): {words.duration(winner.p50)} a call at a batch of {found.batch}"
    )


def same(found: Compressed, one: Tried) -> str:
    """What a form does to the model: rounding alone, or what of the metric."""
    name = metric_title(found.subject)
    change = one.change
    if change is None or (one.numbers == "fp32" and not one.job):
        scores = [check["envelopes"] or 0.0 for check in one.checks]
        limit = one.checks[0]["limit"] if one.checks else math.nan
        worst = words.number(max(scores, default=0.0))
        return f"Same model: yes, to rounding. Worst output: {worst} of {words.number(limit)} allowed"
    return (
        f"Same {name}: yes, within {words.number(found.margin)}. {words.number(change['value'])} instead of "
        f"{words.number(change['reference'])} on {change['samples']:,} samples; it loses at most "
        f"{words.number(max(0.0, -change['low']))} (95 %)"
    )


def in_order(found: Compressed) -> list[Tried]:
    """Forms with a speed, the fastest first; then the others."""
    timed = [one for one in found.tried[1:] if one.ratio is not None]
    timed.sort(key=lambda one: -one.ratio.estimate if one.ratio else 0.0)
    return timed + [one for one in found.tried[1:] if one.ratio is None and one.status != "missing"]


def told(one: Tried) -> str:
    """A form in a line."""
    if one.ratio is None:
        return one.reason
    if one.status == "kept":
        return f"{words.ratio(one.ratio)}, {words.size(one.bytes)}"
    if one.status == "undecided" and one.change and one.change["needed"]:
        return f"{words.ratio(one.ratio)}, undecided: about {one.change['needed']:,} samples would tell"
    shown = words.ratio(one.ratio)
    return one.reason if words.unless_said(shown, one.reason) == "" else f"{shown}: {one.reason}"


def stayed(one: Tried) -> list[str]:
    """Which operators did not run in a form's numbers, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in one.stayed:
        groups.setdefault((each["numbers"], each["why"]), []).append(each["name"])
    said = []
    for (numbers, why), names in groups.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        said.append(f"{len(names)} ran in {numbers} ({', '.join(names[:MOST_NAMED])}{more}): {why}")
    return said


def _faster_beside(found: Compressed) -> list[str]:
    """What was only timed beside the answer, and is faster at the batch that it was sought for."""
    rows = {one.name: one for one in found.beside if one.batch == found.batch}
    own = rows[found.chosen].ratio if found.chosen in rows else None
    if own is None or found.objective == "size":
        return []
    return [
        f"{one.name} ({one.does}) is {words.fast(one.ratio)}, and was not judged"
        for one in rows.values()
        if one.ratio and one.ratio.low > own.high
    ]


def _unjudged(found: Compressed) -> list[str]:
    """Outputs of the form to deploy that the metric does not see, where the metric decides."""
    winner = found.winner
    unused = found.subject.get("unused", ())
    if winner.numbers == "fp32" and not winner.job:
        return []
    return list(filter(None, [unjudged(winner.checks, unused)]))


def _undecided(found: Compressed) -> list[str]:
    """What would be faster than the answer, if more samples said that it loses little; the fastest first."""
    best = found.winner.ratio.estimate if found.winner.ratio else math.inf
    rated = [(one, one.ratio) for one in found.tried if one.status == "undecided" and one.ratio]
    return [
        f"{one.name} would be {words.fast(ratio)}, and {one.reason}"
        for one, ratio in sorted(rated, key=lambda pair: -pair[1].estimate)
        if ratio.estimate > best
    ]


def _unmeasured(found: Compressed) -> list[str]:
    names = [one.name for one in found.tried if one.status == "unmeasured"]
    if not names or found.outcome == "could_not_measure":
        return []
    return [f"could not be measured beside other work on this machine: {', '.join(names)}"]


def _untried(found: Compressed) -> list[str]:
    names = [one.name for one in found.tried if one.status == "untried"]
    if not names or found.outcome == "nothing_tried":
        return []
    return [f"not tried, as little was expected of them or the time was over: {', '.join(names)}"]


def _missing(found: Compressed) -> list[str]:
    lacking = [one for one in found.tried if one.status == "missing"]
    if not lacking:
        return []
    names = ", ".join(one.name for one in lacking)
    return [f"not tried, as packages are missing ({EXTRA}): {names}"]


def _facts(found: Compressed) -> list[tuple[str, str]]:
    subject = found.subject
    return [
        ("model", f"{subject['model']}, {words.quantity(subject['num_parameters'])} parameters"),
        (metric_title(subject), words.number(subject["metric"])),
        ("samples", f"{subject['samples']:,}"),
        ("margin", words.number(found.margin)),
        ("threads", str(subject["threads"])),
        ("took", words.duration(found.seconds)),
        ("budget", words.duration(found.budget_seconds)),
    ]


def _next(found: Compressed) -> tuple[str, ...]:
    more = (found.go_on,) if found.go_on else ()
    if found.winner is found.reference:
        return more
    folder = shlex.quote(str(Path(found.page_path).parent))
    target = "torch" if found.winner.runtime == "inductor" else found.winner.runtime
    return (f"vivace export {folder} --to {target}", *more)
