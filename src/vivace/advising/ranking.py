"""`vivace advise`: time, money, energy and fit of a job on cards that are not here. Imports no torch."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vivace import words
from vivace.advising import choose
from vivace.advising.advice import Advice
from vivace.advising.catalogue import Gpu, elsewhere, find_gpu, load_catalogue, unserved
from vivace.advising.choose import Offer
from vivace.advising.interval import unseen_kinds
from vivace.advising.measured import this_machine
from vivace.advising.predict import SEEN_SHARE, Predictor
from vivace.advising.prices import Prices, load_prices
from vivace.advising.question import Question, amount, dollars, seconds_of
from vivace.advising.source import Subject, open_subject
from vivace.advising.way import way
from vivace.errors import InputError

OLD_RELEASE = 5  # years after which a card is offered only where a person names it


# Cards that people ask about: always in the table, with the reason where one is no choice.
ASKED = (
    "RTX 3090", "RTX 4090", "RTX 5090", "L40S", "A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB",
    "B200-SXM-180GB",
)  # fmt: skip
MOST_READINGS = 2  # sentences of a first screen on how a figure is to be read
SHORT_HOURS = 0.25  # a training below it is short: no other card is recommended


def advise(
    subject: str | Subject,
    *,
    epochs: float | None = None,
    steps: float | None = None,
    target: str | None = None,
    budget_usd: float | None = None,
    deadline: str | None = None,
    probability: float = choose.PROBABILITY,
    gpus: Sequence[str] | None = None,
    most: int = 8,
    precision: str = "auto",
    channels_last: bool | None = None,
    plan: str | os.PathLike[str] | None = None,
    launch_us: float | None = None,
    electricity: float = choose.DOLLARS_A_KWH,
    prices: str | os.PathLike[str] | None = None,
    catalogue: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Advice:
    """Predict a job on the catalogue's cards and rank them.

    Args:
        subject: a profile of ``vivace profile --json``, a JOB, a counted model's name, or a Subject.
        epochs, steps, target: length of the training; `target` is a number of samples, ``90M``.
        budget_usd, deadline: what an offer must keep; ``12h``, ``3d``.
        probability: with which it must keep them, between 0 and 1.
        gpus: names of cards; all recent ones without.
        most: largest number of cards that an offer holds; scaling is told up to 64.
        precision: ``auto`` is mixed precision, ``profiled`` the subject's own; ``amp`` is bf16 where a card
            has it, else fp16.
        channels_last: images in that memory order; without, where convolutions do most of the work.
        plan: a plan's file, which says precision and memory order in place of the two.
        launch_us: microseconds that handing over one tiny operator takes the host, as ``vivace inspect
        --measure``
            tells; without, a recent server's.
        electricity: US dollars a kWh.
        prices, catalogue: a person's own files, over the shipped ones.
        out: folder for ``advise.html`` and ``advise.json``.

    Raises InputError for unknown cards, nonsense amounts and files of another format, FolderError where `out`
    cannot be written or holds a person's own files of these names.
    """
    limits = dollars(budget_usd), seconds_of(deadline)
    _check(most, probability, launch_us, electricity)
    known = load_catalogue(catalogue if catalogue is None else Path(catalogue))
    cards, left = _cards(known, gpus)
    costs = load_prices(prices if prices is None else Path(prices), known)
    opened = subject if isinstance(subject, Subject) else open_subject(subject)
    length = amount(opened, epochs, steps, target)
    precision, nhwc, how = way(opened, precision, channels_last, plan)
    predictor = Predictor(opened, precision, nhwc, None if launch_us is None else launch_us / 1e6)
    asked = [card.name for card in cards] if gpus is not None else [name for name in ASKED if name in known]
    question = Question(length, limits, probability, most, electricity, how, tuple(asked), tuple(left))
    advice = _compared(predictor, question, known, cards, costs)
    if out is None:
        return advice
    from vivace.advising.page import write  # imports jinja2

    return write(advice, Path(out))


def _check(most: int, probability: float, launch_us: float | None, electricity: float) -> None:
    """Refuse numbers that mean nothing."""
    if most < 1:
        raise InputError(f"the largest number of GPUs must be at least 1, not {most}")
    if not 0 < probability < 1:
        raise InputError(f"--probability must lie between 0 and 1, such as 0.8, not {probability:g}")
    for name, value in (("--launch-us", launch_us), ("--electricity", electricity)):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise InputError(f"{name} must be a number of at least 0, not {value:g}")


def _compared(
    predictor: Predictor, question: Question, known: Mapping[str, Gpu], cards: list[Gpu], costs: Prices
) -> Advice:
    """Every card's offers, what they lead to, and what is doubtful about them."""
    profiled = _profiled_on(predictor.subject, known)
    here, launch_seconds, notes = (profiled, None, []) if profiled else _this_machine(known)
    if here is not None and here.form == "host":
        notes.append(
            f"nothing published of processors is behind the time on {here.name}: it is a rough guess"
        )
    readings = [*_doubts(predictor, cards), *_learnt(predictor, profiled)]
    notes += [*readings, *_unpublished(predictor, cards)]
    budget, deadline = question.limits
    offers = choose.make_offers(predictor, cards, question.length, costs, question.most)
    refusals = {
        offer.name: choose.against(offer, costs, question.limits, question.probability) for offer in offers
    }
    allowed = [offer for offer in offers if refusals[offer.name] is None]
    found = choose.picks(allowed)
    chosen = list(dict.fromkeys(offer.prediction.gpu.name for offer in found.values()))
    asked = _asked(offers, refusals, question.asked)
    single = {o.prediction.gpu.name: o for o in offers if o.prediction.num_gpus == 1 and o.prediction.fits}
    bought = [*chosen, *(o.prediction.gpu.name for o in asked)]
    own = None if here is None else _own(predictor, here, launch_seconds, question, costs)
    here_offer = None if profiled is not None and not _is_here(profiled, known) else own
    hints = [*_small(found, here_offer), *readings[:MOST_READINGS], *costs.warnings(chosen)]
    return Advice(
        predictor.subject,
        question.length,
        budget,
        deadline,
        tuple(offers),
        tuple(allowed),
        refusals,
        tuple(asked),
        question.probability,
        question.how,
        found,
        tuple(choose.pareto(allowed)),
        tuple(
            choose.scaling(predictor, known[name])
            for name in chosen
            if name in single and choose.most_together(known[name]) > 1
        ),
        tuple(
            choose.buy_or_rent(known[name], single[name], costs, question.electricity)
            for name in dict.fromkeys(bought)
            if name in single
        ),
        here_offer,
        None if here_offer else own,
        (*question.hints, *hints, *_unfed(predictor.subject, found)),
        (*unserved([known[name] for name in dict.fromkeys((*question.asked, *chosen))]), *notes),
        tuple(costs.warnings(card.name for card in cards)),
        predictor.rest.get("errors", {}),
    )


def _own(
    predictor: Predictor, card: Gpu, launch_seconds: float | None, question: Question, costs: Prices
) -> Offer:
    """A card that somebody has: what others rent it for says nothing of it."""
    predictor = copy.copy(predictor)
    if launch_seconds is not None:
        predictor.launch_seconds = launch_seconds
    (offer,) = choose.make_offers(predictor, [card], question.length, costs, 1)
    return dataclasses.replace(offer, usd=None, low_usd=None, high_usd=None)


def _asked(
    offers: Sequence[Offer], refusals: Mapping[str, choose.Against | None], names: Sequence[str]
) -> list[Offer]:
    """One offer of each card that is asked about: the least number against which nothing speaks, else one
    card."""
    found = []
    for name in names:
        own = sorted(
            (o for o in offers if o.prediction.gpu.name == name), key=lambda o: o.prediction.num_gpus
        )
        if own:
            found.append(next((offer for offer in own if refusals[offer.name] is None), own[0]))
    return found


def _small(found: Mapping[str, Offer], here: Offer | None) -> list[str]:
    """Where a faster card brings little: launches limit it, it ends before one has rented it, or this machine
    is nearly as fast."""
    best = found.get("best value")
    if best is None or best.prediction.num_gpus > 1:
        return []
    near = here is not None and here.prediction.fits and here.hours < max(SHORT_HOURS, 2 * best.hours)
    enough = "one card is enough, or this machine" if near else "one card is enough"
    if best.prediction.limit == "launch":
        return [
            f"launches of small kernels limit this job: {enough}; a larger batch, compilation or CUDA graphs "
            "bring more than another card"
        ]
    if best.hours < SHORT_HOURS:
        return [f"this training is short: {enough}"]
    return ["this machine takes less than twice as long as the best value"] if near else []


def _unfed(subject: Subject, found: Mapping[str, Offer]) -> list[str]:
    """How the job was counted, and how fast samples must come, where nobody has measured how fast they do."""
    if (
        subject.counted not in ("fake", "real")
        or not found
        or found["best value"].prediction.limit == "launch"
    ):
        return [*subject.notes]
    speed = words.number(found["best value"].prediction.samples_per_second)
    return [
        *subject.notes,
        f"loading was not measured, and must give {speed} samples a second: vivace profile measures it",
    ]


def _cards(known: Mapping[str, Gpu], names: Sequence[str] | None) -> tuple[list[Gpu], list[str]]:
    """The cards to compare, and a note on each name of which nothing can be predicted."""
    if names is not None:
        listed = names.split(",") if isinstance(names, str) else names
        said = [name.strip() for name in listed if name.strip()]
        if not said:
            raise InputError("--gpus names no card: give names such as 'RTX 4090,H100'")
        cards, notes = {}, []
        for name in said:
            card = None if elsewhere(name) else find_gpu(name, known)
            reason = card.elsewhere if card else elsewhere(name)
            if card and not reason:
                cards[card.name] = card
            else:
                notes.append(f"nothing is predicted for {name}: {reason}")
        if not cards:
            raise InputError("; ".join(notes))
        return list(cards.values()), notes
    newest = max(int(card.release[:4]) for card in known.values())
    newest = min(newest, datetime.date.today().year)  # a date of an own entry may lie far ahead
    recent = [
        card
        for card in known.values()
        if (int(card.release[:4]) >= newest - OLD_RELEASE - 1 or card.name in ASKED)
        and card.form != "laptop"
        and not card.elsewhere
    ]
    return recent, []


def _profiled_on(subject: Subject, known: Mapping[str, Gpu]) -> Gpu | None:
    """The card that the profile names, where the catalogue knows it."""
    try:
        return find_gpu(subject.device, known) if subject.device else None
    except InputError:
        return None


def _is_here(card: Gpu, known: Mapping[str, Gpu]) -> bool:
    """Is a card on which somebody profiled this machine's own?"""
    from vivace.inspection.gather import inspect

    try:
        return find_gpu(inspect().device.name, known).name == card.name
    except InputError:
        return False


def _this_machine(known: Mapping[str, Gpu]) -> tuple[Gpu | None, float | None, list[str]]:
    """The device of this machine and what a launch was measured to take it; None with a note where nothing
    is known."""
    from vivace.inspection.gather import inspect

    machine = inspect()
    try:
        return this_machine(machine, known), machine.ceilings.get("launch_seconds"), []
    except InputError as error:
        return None, None, [f"nothing is said about the machine at hand: {error}"]


def _learnt(predictor: Predictor, profiled: Gpu | None) -> list[str]:
    """Scale by the profile's measured step, which only a card that the predictor knows can explain; said."""
    subject = predictor.subject
    if not subject.step_seconds:
        return []
    if profiled is None:
        where = (
            f"on {subject.device!r}, which is no GPU of the catalogue"
            if subject.device
            else "on no named GPU"
        )
        return [f"nothing is scaled by the profile's measured step: it was measured {where}"]
    factor = predictor.learn(profiled)
    waited = 1.0 - (subject.worked_seconds or 0.0) / subject.step_seconds
    told = f"{words.percent(min(waited, 1.0))} of the measured step waited for data or other ranks"
    if waited >= 1.0 - SEEN_SHARE:
        return [f"nothing is scaled by the profile's measured step: {told}"]
    measured = f"scaled by {factor:.2f}: what the profile measured on {profiled.name} over its prediction"
    beside = f"{told}, which no faster card shortens"
    return [*([measured] if factor != 1.0 else []), *([beside] if waited >= SEEN_SHARE else [])]


def _doubts(predictor: Predictor, cards: Sequence[Gpu]) -> list[str]:
    """What of the job no published figure speaks for, which may shift a time or widens its interval."""
    unseen = sorted(unseen_kinds(predictor.subject.demand, predictor.rest["evidence"]))
    notes = (
        [f"nearly no published figure of work made of {' and '.join(unseen)} kernels is behind the predictor"]
        if unseen
        else []
    )
    if predictor.precision == "fp32" and any("tf32" in card.rates for card in cards):
        told = "no published training in strict fp32 of a card that has TF32 is behind the predictor"
        notes.append(f"{told}: an H200 took 1.5 times the time that is predicted, and intervals are wider")
    return notes


def _unpublished(predictor: Predictor, cards: Sequence[Gpu]) -> list[str]:
    """One sentence about all cards of which no figure was published."""
    bare = [card.name for card in cards if not predictor.evidence(card)]
    if not bare:
        return []
    shown = ", ".join(bare[:6]) + (f" and {len(bare) - 6} more" if len(bare) > 6 else "")
    return [f"no published training of {shown} is behind the predictor: their intervals are wider"]
