"""`vivace advise`: time, money, energy and fit of a job on cards that are not here. Imports no torch."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vivace.advising import choose
from vivace.advising.advice import Advice
from vivace.advising.catalogue import Gpu, find_gpu, load_catalogue
from vivace.advising.interval import unseen_kinds
from vivace.advising.measured import this_machine
from vivace.advising.predict import Predictor
from vivace.advising.prices import STALE_DAYS, Prices, load_prices
from vivace.advising.question import Amount, amount, dollars, seconds_of
from vivace.advising.source import Subject, open_subject
from vivace.errors import InputError

OLD_RELEASE = 5  # years after which a card is offered only where a person names it


def advise(
    subject: str | Subject,
    *,
    epochs: float | None = None,
    steps: float | None = None,
    target: str | None = None,
    budget_usd: float | None = None,
    deadline: str | None = None,
    gpus: Sequence[str] | None = None,
    most: int = 8,
    precision: str = "auto",
    channels_last: bool = False,
    prices: str | os.PathLike[str] | None = None,
    catalogue: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Advice:
    """Predict a job on the catalogue's cards and rank them.

    Args:
        subject: a profile of ``vivace profile --json``, a JOB, a counted model's name, or a Subject.
        epochs, steps, target: length of the training; `target` is a number of samples, ``90M``.
        budget_usd, deadline: what an offer must keep; ``12h``, ``3d``.
        gpus: names of cards; all recent ones without.
        most: largest number of cards that an offer holds; scaling is told up to 64.
        precision: ``auto`` is the subject's own; ``amp`` is bf16 where a card has it, else fp16.
        channels_last: the plan orders images channels last.
        prices, catalogue: a person's own files, over the shipped ones.
        out: folder for ``advise.html`` and ``advise.json``.

    Raises InputError for unknown cards, nonsense amounts and files of another format.
    """
    limits = dollars(budget_usd), seconds_of(deadline)
    if most < 1:
        raise InputError(f"the largest number of GPUs must be at least 1, not {most}")
    known = load_catalogue(catalogue if catalogue is None else Path(catalogue))
    cards = _cards(known, gpus)
    costs = load_prices(prices if prices is None else Path(prices), known)
    opened = subject if isinstance(subject, Subject) else open_subject(subject)
    length = amount(opened, epochs, steps, target)
    predictor = Predictor(opened, precision, channels_last)
    advice = _compared(predictor, length, limits, known, cards, costs, most)
    if out is None:
        return advice
    from vivace.advising.page import write  # imports jinja2

    return write(advice, Path(out))


def _compared(
    predictor: Predictor,
    length: Amount,
    limits: tuple[float | None, float | None],
    known: Mapping[str, Gpu],
    cards: list[Gpu],
    costs: Prices,
    most: int,
) -> Advice:
    """Every card's offers, what they lead to, and what is doubtful about them."""
    profiled = _profiled_on(predictor.subject, known)
    here_gpu, notes = (profiled, []) if profiled else _this_machine(known)
    notes += _learnt(predictor, profiled)
    offers = choose.make_offers(predictor, cards, length, costs, most)
    allowed = choose.affordable(offers, *limits)
    found = choose.picks(allowed)
    chosen = list(dict.fromkeys(offer.prediction.gpu.name for offer in found.values()))
    single = {o.prediction.gpu.name: o for o in offers if o.prediction.num_gpus == 1}
    bought = (
        choose.buy_or_rent(known[name], single[name], costs)
        for name in single
        if single[name].prediction.fits
    )
    return Advice(
        predictor.subject,
        length,
        *limits,
        tuple(offers),
        tuple(allowed),
        found,
        tuple(choose.pareto(allowed)),
        tuple(choose.scaling(predictor, known[name]) for name in chosen),
        tuple(entry for entry in bought if entry),
        choose.make_offers(predictor, [here_gpu], length, costs, 1)[0] if here_gpu else None,
        (*notes, *_doubts(predictor, cards)),
        tuple(_old_prices(costs, cards, datetime.date.today())),
        predictor.rest.get("errors", {}),
    )


def _cards(known: Mapping[str, Gpu], names: Sequence[str] | None) -> list[Gpu]:
    if names is not None:
        if not [name for name in names if name.strip()]:
            raise InputError("--gpus names no card: give names such as 'RTX 4090,H100'")
        return list(
            {(card := find_gpu(name.strip(), known)).name: card for name in names if name.strip()}.values()
        )
    newest = max(int(card.release[:4]) for card in known.values())
    return [
        card
        for card in known.values()
        if int(card.release[:4]) >= newest - OLD_RELEASE - 1 and card.form != "laptop"
    ]


def _old_prices(costs: Prices, cards: Sequence[Gpu], today: datetime.date) -> list[str]:
    """One sentence about all cards whose prices are older than they should be, with the dates."""
    dates = {card.name: found.oldest for card in cards if (found := costs.hourly(card.name)) is not None}
    old = {name: date for name, date in dates.items() if (today - date).days > STALE_DAYS}
    if not old:
        return []
    names = sorted(old, key=lambda name: old[name])
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    when = " to ".join(dict.fromkeys(str(date) for date in (min(old.values()), max(old.values()))))
    return [
        f"prices of {shown} were seen on {when}, more than {STALE_DAYS} days ago; give your own with --prices"
    ]


def _profiled_on(subject: Subject, known: Mapping[str, Gpu]) -> Gpu | None:
    """The card that the profile names, where the catalogue knows it."""
    try:
        return find_gpu(subject.device, known) if subject.device else None
    except InputError:
        return None


def _this_machine(known: Mapping[str, Gpu]) -> tuple[Gpu | None, list[str]]:
    """The device of this machine; None with a note where nothing is known of it."""
    from vivace.inspection.gather import inspect

    try:
        return this_machine(inspect(), known), []
    except InputError as error:
        return None, [f"nothing is said about the machine at hand: {error}"]


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
    measured = f"scaled by {factor:.2f}: what the profile measured on {profiled.name} over its prediction"
    return [measured] if factor != 1.0 else []


def _doubts(predictor: Predictor, cards: Sequence[Gpu]) -> list[str]:
    """What no published figure speaks for."""
    unseen = sorted(unseen_kinds(predictor.subject.demand, predictor.rest["evidence"]))
    notes = (
        [f"no published figure of work made of {' and '.join(unseen)} kernels is behind the predictor"]
        if unseen
        else []
    )
    bare = [card.name for card in cards if not predictor.evidence(card)]
    if not bare:
        return notes
    shown = ", ".join(bare[:6]) + (f" and {len(bare) - 6} more" if len(bare) > 6 else "")
    return [*notes, f"no published training of {shown} is behind the predictor: their intervals are wider"]
