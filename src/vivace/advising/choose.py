"""Offers: cards and their numbers with time, money and energy for the whole training; and the choice among
them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from vivace.advising.catalogue import Gpu
from vivace.advising.predict import LIMITS, Prediction, Predictor
from vivace.advising.prices import Prices
from vivace.advising.question import Amount

COUNTS = (1, 2, 4, 8, 16, 32, 64)
MOST_BY_FORM = {"consumer": 4, "laptop": 1, "soc": 1, "host": 1, "workstation": 8, "pcie": 8}
PAYS = 1.6  # the least speed-up of twice the cards that is worth its money
DOLLARS_A_KWH = 0.25
UNKNOWN = "no evidence"
RISKS = ((1.25, "low"), (1.5, "medium"))


@dataclasses.dataclass(frozen=True)
class Offer:
    """A number of cards for the whole training. Money is None where no price is known."""

    prediction: Prediction
    hours: float
    low_hours: float
    high_hours: float
    usd: float | None
    low_usd: float | None
    high_usd: float | None
    risk: str

    @property
    def name(self) -> str:
        """``RTX 4090`` or ``8 x H100-SXM5-80GB``."""
        number = self.prediction.num_gpus
        return self.prediction.gpu.name if number == 1 else f"{number} x {self.prediction.gpu.name}"

    def energy(self, hours: float) -> float | None:
        """Kilowatt hours at the boards' power limit; None where that is not known."""
        watts = self.prediction.gpu.power_watts
        return None if watts is None else watts * self.prediction.num_gpus * hours / 1e3

    @property
    def kwh(self) -> float | None:
        """Energy of the whole training, in kWh."""
        return self.energy(self.hours)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        p = self.prediction
        return {
            "name": self.name,
            "gpu": p.gpu.name,
            "num_gpus": p.num_gpus,
            "precision": p.precision,
            "batch_per_gpu": p.batch_size,
            "step_seconds": {"estimate": p.seconds, "low": p.low, "high": p.high},
            "samples_per_second": p.samples_per_second,
            "hours": {"estimate": self.hours, "low": self.low_hours, "high": self.high_hours},
            "usd": None
            if self.usd is None
            else {"estimate": self.usd, "low": self.low_usd, "high": self.high_usd},
            "kwh": self.kwh,
            "kwh_low": self.energy(self.low_hours),
            "kwh_high": self.energy(self.high_hours),
            "fits": p.fits,
            "how": p.how or None,
            "slowdown": p.slowdown,
            "needed_bytes": p.needed_bytes,
            "headroom_bytes": p.headroom_bytes,
            "limit": p.limit,
            "limit_in_words": LIMITS[p.limit],
            "shares": p.shares,
            "risk": self.risk,
            "doubts": list(p.doubts),
        }


def make_offers(
    predictor: Predictor, gpus: Iterable[Gpu], amount: Amount, prices: Prices, most: int = 8
) -> list[Offer]:
    """Offers for every card alone and in numbers, the cheapest first; without a price by time."""
    places = [(gpu, n) for gpu in gpus for n in COUNTS if n <= min(most, MOST_BY_FORM.get(gpu.form, 64))]
    offers = [_offer(prediction, amount, prices) for prediction in predictor.many(places)]
    return sorted(offers, key=_order)


def _order(offer: Offer) -> tuple[bool, bool, float, float]:
    return not offer.prediction.fits, offer.usd is None, offer.usd or offer.hours, offer.hours


def _offer(p: Prediction, amount: Amount, prices: Prices) -> Offer:
    steps = amount.samples / (p.batch_size * p.num_gpus)
    hours, low, high = (steps * seconds / 3600 for seconds in (p.seconds, p.low, p.high))
    price = prices.hourly(p.gpu.name)
    usd = None if price is None else price.typical * p.num_gpus * hours
    low_usd = None if price is None else price.low * p.num_gpus * low
    high_usd = None if price is None else price.high * p.num_gpus * high
    return Offer(p, hours, low, high, usd, low_usd, high_usd, risk_of(p))


def risk_of(p: Prediction) -> str:
    """``low``, ``medium`` or ``high``: how wide the interval is; ``no evidence`` for an unseen
    architecture."""
    if "new_architecture" in p.doubts:
        return UNKNOWN
    return next((word for limit, word in RISKS if p.high / p.seconds <= limit), "high")


def affordable(offers: Sequence[Offer], budget: float | None, deadline: float | None) -> list[Offer]:
    """Offers that fit into memory, the budget in dollars and the deadline in seconds."""
    return [
        offer
        for offer in offers
        if offer.prediction.fits
        and (budget is None or (offer.usd is not None and offer.usd <= budget))
        and (deadline is None or offer.hours * 3600 <= deadline)
    ]


def picks(offers: Sequence[Offer]) -> dict[str, Offer]:
    """Cheapest, fastest and best value (the least dollars x hours) among offers.

    The best value is what a page opens with: cards without evidence are it only where there are no others.
    """
    priced = [offer for offer in offers if offer.usd is not None]
    found = {}
    if priced:
        found["cheapest"] = min(priced, key=lambda offer: offer.usd or 0.0)
        known = [offer for offer in priced if offer.risk != UNKNOWN] or priced
        found["best value"] = min(known, key=lambda offer: (offer.usd or 0.0) * offer.hours)
    if offers:
        found["fastest"] = min(offers, key=lambda offer: offer.hours)
    return found


def pareto(offers: Sequence[Offer]) -> list[Offer]:
    """Offers that no other beats in both time and money, the cheapest first."""
    best, found = float("inf"), []
    for offer in sorted((o for o in offers if o.usd is not None), key=lambda o: (o.usd or 0.0, o.hours)):
        if offer.hours < best:
            found.append(offer)
            best = offer.hours
    return found


def scaling(predictor: Predictor, gpu: Gpu, most: int = 64) -> dict[str, Any]:
    """Speed-up of 1 to 64 cards, and the number from which doubling stops paying; no number on which the job
    does not fit.

    ``low`` and ``high`` are the 80 % interval of that many cards' speed, in units of one card's estimate.
    """
    predictions = [p for p in predictor.many([(gpu, n) for n in COUNTS if n <= most]) if p.fits]
    alone = predictions[0].samples_per_second
    points = [
        {
            "num_gpus": p.num_gpus,
            "speedup": p.samples_per_second / alone,
            "low": p.samples_per_second / alone * p.seconds / p.high,
            "high": p.samples_per_second / alone * p.seconds / p.low,
            "efficiency": p.samples_per_second / alone / p.num_gpus,
        }
        for p in predictions
    ]
    pays = 1
    for before, after in itertools.pairwise(points):
        if after["speedup"] / before["speedup"] < PAYS:
            break
        pays = int(after["num_gpus"])
    return {"gpu": gpu.name, "points": points, "pays_up_to": pays, "batch_per_gpu": predictions[0].batch_size}


def buy_or_rent(gpu: Gpu, offer: Offer, prices: Prices) -> dict[str, Any] | None:
    """Hours of use after which buying is cheaper than renting, electricity counted; None without
    both prices."""
    rent, buy = prices.hourly(gpu.name), prices.purchase(gpu.name)
    if rent is None or buy is None:
        return None
    electricity = (gpu.power_watts or 0.0) / 1e3 * DOLLARS_A_KWH

    def hours_until(paid: float, an_hour: float) -> float | None:
        return paid / (an_hour - electricity) if an_hour > electricity else None

    hours = hours_until(buy.typical, rent.typical)
    return {
        "gpu": gpu.name,
        "buy_usd": buy.typical,
        "rent_usd_per_hour": rent.typical,
        "electricity_usd_per_hour": electricity,
        "break_even_hours": hours,
        "break_even_low": hours_until(buy.low, rent.high),
        "break_even_high": hours_until(buy.high, rent.low),
        "trainings": hours / offer.hours if hours else None,
    }
