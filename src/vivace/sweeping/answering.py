"""The answer of a sweep: what its page opens with, and what the command ends with."""

from __future__ import annotations

import shlex
from pathlib import Path

from vivace import words
from vivace.pages.answer import Answer
from vivace.sweeping.record import Finalist
from vivace.sweeping.result import Swept
from vivace.sweeping.space import told

MOST_OF_FRONT = 4  # trials that are named


def answer(found: Swept) -> Answer:
    """The best parameters, their metric over seeds, and what to do with them."""
    return Answer(
        command="sweep",
        subject=found.function,
        figure=words.number(found.metric) if found.metric is not None else "",
        sentence=_sentence(found),
        tone="open" if not found.complete else "good" if found.winner else "plain",
        title_of_parts="The best configurations",
        parts=tuple((told(one.parameters), _metric(one)) for one in found.finalists),
        notes=tuple(_notes(found)),
        facts=tuple(_facts(found)),
        next=_next(found),
        date=found.date,
        page=found.page_path,
    )


def _sentence(found: Swept) -> str:
    if not found.finalists:
        return "No trial came to its end"
    first = found.finalists[0]
    over = f" over {words.count(len(first.spread.values), 'seed')}" if first.spread else " in the search"
    return f"{found.metric_title}{over} with {told(first.parameters)}; {verdict(found)}"


def verdict(found: Swept) -> str:
    """Is the best one the winner?"""
    if found.winner:
        return "the winner beyond the spread of seeds"
    if found.winner is None:
        return "not compared over seeds"
    return "the spread of seeds does not tell it from the next"


def _metric(one: Finalist) -> str:
    if one.spread is None:
        return f"{words.number(one.metric)} in the search"
    if one.spread.low is None or one.spread.high is None:
        return words.number(one.spread.mean)
    text = f"{words.number(one.spread.mean)} ({_between(one.spread.low, one.spread.high)})"
    if one.behind is None or one.behind.low is None or one.behind.high is None:
        return text
    gap = one.behind
    return f"{text}, behind by {words.number(gap.mean)} ({_between(gap.low, gap.high)})"


def _between(low: float | None, high: float | None) -> str:
    return f"{words.number(low)} to {words.number(high)}"


def _notes(found: Swept) -> list[str]:
    notes = [f"interrupted: {words.count(len(found.complete), 'trial')} ended; go on with --resume"]
    notes = notes if found.interrupted else []
    if found.failed:
        last = found.failed[-1]
        notes.append(
            f"{words.count(len(found.failed), 'trial')} failed; trial {last.number} "
            f"({told(last.parameters)}): {last.reason}"
        )
    if any(one.spread is not None and one.spread.cut for one in found.finalists):
        notes.append(f"intervals end at 0 and 1, as {found.metric_name} does: so few seeds tell no more")
    return [*notes, *_front(found), *found.notices]


def _front(found: Swept) -> list[str]:
    """The trials that no other beats in both, the best metric first."""
    cost = found.objectives[-1]
    seen = sorted((t for t in found.trials if t.number in found.front), key=lambda t: -(t.metric or 0.0))
    if not seen:
        return []
    each = [
        f"trial {t.number} ({words.number(t.metric)}, {cost_told(cost, t.costs.get(cost))})" for t in seen
    ]
    more = f" and {len(each) - MOST_OF_FRONT} more" if len(each) > MOST_OF_FRONT else ""
    once = ", as each was timed once" if cost == "seconds" else ""
    return [f"no other trial beats these in both{once}: {', '.join(each[:MOST_OF_FRONT])}{more}"]


def cost_told(name: str, cost: float | None) -> str:
    """What a trial costs: ``1.20 ms a step``, ``4.8 thousand parameters``."""
    if name == "seconds":
        return f"{words.duration(cost)} a step"
    return f"{words.quantity(cost)} parameters"


def _facts(found: Swept) -> list[tuple[str, str]]:
    at_once = f"{words.number(found.workers)} on {words.count(found.threads, 'thread')} each"
    return [
        ("trials ended", words.number(len(found.complete))),
        ("pruned", words.number(len(found.pruned))),
        ("failed", words.number(len(found.failed))),
        ("in this session", words.duration(found.seconds)),
        ("saved by pruning, run one after another", words.duration(found.pruned_seconds_saved)),
        *([("trials at a time", at_once)] if found.workers else []),
    ]


def _next(found: Swept) -> tuple[str, ...]:
    if not found.job:
        return ()
    file, _, name = found.job.rpartition(":")
    path, here = Path(file), Path.cwd()
    near = path.relative_to(here) if path.is_relative_to(here) else path
    job = shlex.quote(f"{near}:{name}")
    seed = f" --seed {found.seed}" if found.seed else ""  # under which its metric is reached again
    return f"vivace tune {job}", f"vivace train {job}{seed}"
