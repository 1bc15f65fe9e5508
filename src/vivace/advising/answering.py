"""The answer of an advice: what its page opens with, and what the command ends with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vivace import words
from vivace.advising import tables
from vivace.advising.advice import Advice
from vivace.advising.catalogue import Gpu, lack_of, unserved
from vivace.advising.choose import UNKNOWN, Offer, unpicked
from vivace.advising.reverse import Trainable
from vivace.advising.way import in_words
from vivace.pages.answer import Answer

FASTER = 1.1  # from which another card is worth a word


def answer(advice: Advice) -> Answer:
    """The card to take, what the training takes on it, and the choices beside it."""
    best = advice.picks.get("best value")
    return Answer(
        command="advise",
        subject=advice.subject.name,
        figure=_counted(best) if best else "",
        sentence=_sentence(advice, best),
        tone="good" if best else "open",
        title_of_parts="The choices",
        parts=tuple(
            (tables.marked(offer, marks), _told(advice, offer)) for offer, marks in tables.choices(advice)
        ),
        notes=tuple(_notes(advice, best)),
        facts=tuple(_facts(advice)),
        next=_next(advice),
        page=advice.page_path or "",
    )


def answer_of_card(
    gpu: Gpu, found: Sequence[Trainable], largest: float, precision: str, *, details: bool = False
) -> Answer:
    """What a card can train: of `largest` parameters at most, and which of the well-known models; `details`:
    all of these are listed, too.
    """
    fitting = [entry for entry in found if entry.prediction is not None]
    others = [entry.model for entry in found if entry.prediction is None]
    return Answer(
        command="advise",
        subject=gpu.name,
        figure=f"{len(fitting)} of {len(found)} well-known models",
        sentence=(
            f"train on {gpu.name} ({words.size(gpu.memory_bytes)}) in {in_words(precision)}; weights, "
            f"gradients and AdamW alone fill it at {largest / 1e9:.1f} billion parameters"
        ),
        tone="plain",
        title_of_parts="One pass over their usual data, with the largest batch that fits",
        parts=tuple(
            (entry.model, f"{entry.data}: {_hours(entry)}, batch {entry.batch_size}") for entry in fitting
        ),
        notes=(
            *([f"Not as they are: {', '.join(others)}"] if others else []),
            *unserved([gpu]),
            *(() if details else ("--details lists every model with its speed and what limits it",)),
        ),
        next=(f"vivace advise JOB --epochs 90 --gpus {shlex.quote(gpu.name)}",),
    )


def _hours(entry: Trainable) -> str:
    return words.duration(None if entry.epoch_hours is None else 3600 * entry.epoch_hours)


def _counted(offer: Offer) -> str:
    """A number of cards and their name, such as ``1 x RTX 3090``."""
    return f"{offer.prediction.num_gpus} x {offer.prediction.gpu.name}"


def _sentence(advice: Advice, best: Offer | None) -> str:
    """What the training takes there, and what the next faster choice costs for how much more speed."""
    if best is None:
        return tables.none_is_good(advice)
    cost = f" for {words.money(best.usd)}" if best.usd is not None else ""
    faster = _faster(advice, best)
    beside = ""
    if faster is not None and best.usd and faster.usd:
        beside = (
            f"; {_counted(faster)}: {words.times(faster.usd / best.usd)} the price for "
            f"{words.times(best.hours / faster.hours)} the speed"
        )
    return f"trains {advice.amount.words} in {tables.time_of(best)}{cost}{beside}"


def _faster(advice: Advice, best: Offer) -> Offer | None:
    """The fastest of the cards that people ask about, against which nothing speaks; None where none is
    faster to speak of."""
    free = [
        o
        for o in advice.asked
        if advice.refusals[o.name] is None and o.usd and o.risk != UNKNOWN and o.hours < best.hours / FASTER
    ]
    return min(free, key=lambda offer: offer.hours, default=None)


def _told(advice: Advice, offer: Offer) -> str:
    """What speaks against an offer, makes it fit, or serves it badly, beside its time and cost where it can
    train."""
    fit = "" if offer.prediction.fits else tables.fit_of(offer)
    own = offer is advice.here or offer is advice.profiled_on  # as rented, its name's may be refused
    against = fit if own else advice.told_against(offer)
    if not offer.prediction.fits:
        return against
    cost = "" if offer.usd is None else f", {words.money(offer.usd)}"
    beside = against or (tables.fit_of(offer) if offer.prediction.how else "")
    lack = "" if own else lack_of(offer.prediction.gpu)
    number = offer.prediction.num_gpus
    several = f"{number}x batch" if number > 1 else ""
    return "; ".join(filter(None, (f"{tables.time_of(offer)}{cost}", several, beside, lack)))


def _left_out(advice: Advice) -> list[str]:
    """Which of the shown cards are cheaper or faster than all that was picked, and why they were not."""
    names: dict[str, list[str]] = {}
    for offer in advice.asked if advice.picks else ():
        best, fastest = advice.picks["best value"], advice.picks["fastest"]
        cheaper = offer.usd is not None and best.usd is not None and offer.usd < best.usd
        if advice.refusals[offer.name] is None and (cheaper or offer.hours < fastest.hours):
            names.setdefault(unpicked(offer), []).append(offer.prediction.gpu.name)
    return [f"{reason} of {', '.join(of)} is known: not picked" for reason, of in names.items() if reason]


def _notes(advice: Advice, best: Offer | None) -> list[str]:
    notes = _left_out(advice)
    if best is not None and best.prediction.num_gpus > 1:
        number = best.prediction.num_gpus
        notes.append(
            f"{number} cards train with {number} times the batch: another training, for the metric to judge"
        )
    return [*notes, *advice.hints]


def _facts(advice: Advice) -> list[tuple[str, str]]:
    demand = advice.subject.demand
    facts = [
        ("parameters", words.quantity(demand.num_parameters)),
        ("operations a sample", words.quantity(demand.flops, "FLOP")),
        ("batch of one GPU", words.number(advice.subject.batch_size)),
        ("predicted", advice.how.partition(";")[0].removeprefix("predicted ").removesuffix(", as is usual")),
    ]
    kept = tables.surely(advice)
    if advice.budget_usd:
        facts.append(("budget", f"{words.money(advice.budget_usd)} {tables.AT_MIDDLE}, {kept}"))
    facts += (
        [("deadline", f"{words.duration(advice.deadline_seconds)}, {kept}")]
        if advice.deadline_seconds
        else []
    )
    return facts


def _next(advice: Advice) -> tuple[str, ...]:
    """To measure what was predicted, on the card."""
    if advice.subject.counted in ("fake", "real"):
        return (f"vivace tune {shlex.quote(advice.subject.name)}",)
    return ("vivace tune JOB",)
