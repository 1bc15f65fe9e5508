"""The answer of an advice: what its page opens with, and what the command ends with."""

from __future__ import annotations

import shlex

from vivace import words
from vivace.advising import tables
from vivace.advising.advice import Advice
from vivace.advising.choose import Offer
from vivace.pages.answer import Answer


def answer(advice: Advice) -> Answer:
    """The card to take, what the training takes on it, and the choices beside it."""
    best = advice.picks.get("best value") or advice.picks.get("fastest")
    return Answer(
        command="advise",
        subject=advice.subject.name,
        figure=best.name if best else "",
        sentence=_sentence(advice, best),
        tone="good" if best else "open",
        title_of_parts="The choices",
        parts=tuple((f"{offer.name} ({marks})", _told(offer)) for offer, marks in _choices(advice)),
        notes=tuple(_notes(advice, best)),
        facts=tuple(_facts(advice)),
        next=_next(advice),
        page=advice.page_path or "",
    )


def _sentence(advice: Advice, best: Offer | None) -> str:
    if best is None:
        return "No card meets the budget and the deadline with enough memory"
    cost = f" for {words.money(best.usd, best.low_usd, best.high_usd)}" if best.usd is not None else ""
    return f"trains {advice.amount.words} in {tables.time_of(best)}{cost}, in {best.prediction.precision}"


def _choices(advice: Advice) -> list[tuple[Offer, str]]:
    """Each picked offer with all that it was picked for, then this machine."""
    marks: dict[str, list[str]] = {}
    offers = {offer.name: offer for offer in advice.picks.values()}
    for mark, offer in advice.picks.items():
        marks.setdefault(offer.name, []).append(mark)
    found = [(offers[name], ", ".join(told)) for name, told in marks.items()]
    return found + ([(advice.here, "here")] if advice.here else [])


def _told(offer: Offer) -> str:
    cost = "" if offer.usd is None else f", {words.money(offer.usd)}"
    return f"{tables.time_of(offer)}{cost}; {tables.fit_of(offer)}"


def _notes(advice: Advice, best: Offer | None) -> list[str]:
    notes = []
    if best is not None and best.prediction.num_gpus > 1:
        number = best.prediction.num_gpus
        notes.append(
            f"{number} cards train with {number} times the batch: another training, for the metric to judge"
        )
    return [*notes, *advice.warnings]


def _facts(advice: Advice) -> list[tuple[str, str]]:
    demand = advice.subject.demand
    facts = [
        ("parameters", words.quantity(demand.num_parameters)),
        ("operations a sample", words.quantity(demand.flops, "FLOP")),
        ("batch of one GPU", words.number(advice.subject.batch_size)),
    ]
    facts += [("budget", words.money(advice.budget_usd))] if advice.budget_usd else []
    facts += [("deadline", words.duration(advice.deadline_seconds))] if advice.deadline_seconds else []
    return facts


def _next(advice: Advice) -> tuple[str, ...]:
    """To measure what was predicted, on the card."""
    if advice.subject.counted in ("fake", "real"):
        return (f"vivace tune {shlex.quote(advice.subject.name)}",)
    return ("vivace tune JOB",)
