"""Offers: cards and their numbers with time, money and energy for the whole training; and the choice among
them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from vivace import words
from vivace.advising.catalogue import Gpu
from vivace.advising.predict import LIMITS, Prediction, Predictor, lacks
from vivace.advising.prices import PriceRange, Prices
from vivace.advising.question import Amount

COUNTS = (1, 2, 4, 8, 16, 32, 64)
MOST_BY_FORM = {"consumer": 4, "laptop": 1, "soc": 1, "host": 1, "workstation": 8, "pcie": 8}
PAYS = 1.6  # the least speed-up of twice the cards that is worth its money
DOLLARS_A_KWH = 0.25
PROBABILITY = 0.8  # with which a deadline and a budget are kept, unless said
ALIKE, CENT = 1.02, 0.01  # costs that differ by less are one: fewer cards win
UNKNOWN = "no evidence"
RISKS = ((1.25, "low"), (1.5, "medium"))


_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True)
class Offer:
    """A number of cards for the whole training. Money is None where nobody is known to rent that number."""

    prediction: Prediction
    hours: float
    low_hours: float
    high_hours: float
    usd: float | None
    low_usd: float | None
    high_usd: float | None
    risk: str

    def chance(self, hours: float) -> float:
        """The probability that the training ends within so many hours: the interval's, each of its halves
        taken for log-normal."""
        half = self.high_hours / self.hours if hours > self.hours else self.hours / self.low_hours
        if hours <= 0 or hours >= self.high_hours * 1e3 or half <= 1:
            return float(self.hours <= hours)
        return _NORMAL.cdf(_NORMAL.inv_cdf(0.9) * math.log(hours / self.hours) / math.log(half))

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
        """The offer as a document: JSON types, under the names that ``vivace advise --json`` prints."""
        p = self.prediction
        return {
            "name": self.name,
            "gpu": p.gpu.name,
            "num_gpus": p.num_gpus,
            "precision": p.precision,
            "case": p.case,
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


def most_together(gpu: Gpu) -> int:
    """How many cards of a kind are told of: what a machine holds of such a form, or 64 in several."""
    return MOST_BY_FORM.get(gpu.form, COUNTS[-1])


def make_offers(
    predictor: Predictor, gpus: Iterable[Gpu], amount: Amount, prices: Prices, most: int
) -> list[Offer]:
    """Offers for every card alone and in numbers, the cheapest first; without a price by time."""
    places = [
        (gpu, n)
        for gpu in gpus
        for n in sorted({*COUNTS, *prices.sizes(gpu.name)})
        if n <= min(most, most_together(gpu))
    ]
    offers = [_offer(prediction, amount, prices) for prediction in predictor.many(places)]
    return sorted(offers, key=_order)


def _order(offer: Offer) -> tuple[bool, bool, float, float]:
    return not offer.prediction.fits, offer.usd is None, offer.usd or offer.hours, offer.hours


def _offer(p: Prediction, amount: Amount, prices: Prices) -> Offer:
    steps = amount.samples / (p.batch_size * p.num_gpus)
    hours, low, high = (steps * seconds / 3600 for seconds in (p.seconds, p.low, p.high))
    price = prices.hourly(p.gpu.name, p.num_gpus)
    usd = None if price is None else price.typical * p.num_gpus * hours
    low_usd = None if price is None else price.low * p.num_gpus * low
    high_usd = None if price is None else price.high * p.num_gpus * high
    return Offer(p, hours, low, high, usd, low_usd, high_usd, risk_of(p))


def risk_of(p: Prediction) -> str:
    """``low``, ``medium`` or ``high``: how wide the interval is; ``no evidence`` for an unseen
    architecture."""
    if p.case == "new architecture":
        return UNKNOWN
    return next((word for limit, word in RISKS if p.high / p.seconds <= limit), "high")


class Hindrance(enum.Enum):
    """What keeps an offer from being one for this person."""

    PRECISION = "it lacks the precision"
    MEMORY = "the job does not fit"
    SIZE = "nobody rents so many"
    PRICE = "no price is known"
    DEADLINE = "it may miss the deadline"
    BUDGET = "it may cost more than the budget"


LIFTED = (Hindrance.DEADLINE, Hindrance.BUDGET)  # by another deadline or budget


@dataclasses.dataclass(frozen=True)
class Against:
    """What speaks against an offer, and how that is told."""

    hindrance: Hindrance
    told: str

    def __str__(self) -> str:
        return self.told


def against(
    offer: Offer, prices: Prices, limits: tuple[float | None, float | None], probability: float
) -> Against | None:
    """Why an offer is none for this person: precision, memory, rentable sizes, budget in dollars, deadline in
    seconds, the last two with the probability that is asked for. None where nothing speaks against it."""
    budget, deadline = limits
    p = offer.prediction
    lacking = lacks(p.gpu, p.precision)
    if lacking:
        return Against(Hindrance.PRECISION, f"has no {lacking}")
    if not p.fits:
        room = f"{words.size(p.needed_bytes)} of {words.size(p.gpu.usable_bytes)}"
        return Against(Hindrance.MEMORY, f"does not fit: needs {room}")
    sizes = prices.sizes(p.gpu.name)
    if offer.usd is None and sizes:
        return Against(Hindrance.SIZE, f"is rented only by {' or '.join(map(str, sizes))}")
    if budget is not None and offer.usd is None:
        return Against(Hindrance.PRICE, "no price is known")
    if deadline is not None and offer.chance(deadline / 3600) < probability:
        sure = words.percent(offer.chance(deadline / 3600))
        return Against(Hindrance.DEADLINE, f"too slow: {sure} sure of the deadline")
    if budget is not None and offer.usd is not None:
        within = offer.chance(offer.hours * budget / offer.usd)
        if within < probability:
            return Against(Hindrance.BUDGET, f"too dear: {words.percent(within)} sure of the budget")
    return None


def picks(offers: Sequence[Offer]) -> dict[str, Offer]:
    """Best value (the least dollars), and the fastest, among offers that nothing speaks against.

    Cards without evidence or price are picked only where there are no others; of offers that cost alike the
    one of fewer cards is the better.
    """
    priced = [offer for offer in offers if offer.usd is not None] or list(offers)
    known = [offer for offer in priced if offer.risk != UNKNOWN] or priced
    if not known:
        return {}
    least = min(offer.usd or 0.0 for offer in known)
    alike = [offer for offer in known if (offer.usd or 0.0) <= max(least * ALIKE, least + CENT)]
    return {
        "best value": min(alike, key=lambda offer: (offer.prediction.num_gpus, offer.hours)),
        "fastest": min(known, key=lambda offer: offer.hours),
    }


def unpicked(offer: Offer) -> str:
    """Why an offer is not picked while there are others, for all its speed; empty where it may be."""
    if offer.risk == UNKNOWN:
        return "no published figure of the architecture"
    return "no price" if offer.usd is None else ""


def fastest_words(picked: Offer, offers: Iterable[Offer]) -> str:
    """What the pick ``fastest`` is called among offers of which some may be faster and are not picked."""
    return "fastest known" if any(offer.hours < picked.hours for offer in offers) else "fastest"


def pareto(offers: Sequence[Offer]) -> list[Offer]:
    """Offers that no other beats in both time and money, the cheapest first."""
    best, found = float("inf"), []
    for offer in sorted((o for o in offers if o.usd is not None), key=lambda o: (o.usd or 0.0, o.hours)):
        if offer.hours < best:
            found.append(offer)
            best = offer.hours
    return found


def scaling(predictor: Predictor, gpu: Gpu) -> dict[str, Any]:
    """Speed-up of 1 to `most_together` cards, and the number from which doubling stops paying; no number on
    which the job does not fit.

    ``low`` and ``high`` are the 80 % interval of that many cards' speed, in units of one card's estimate.
    """
    counts = [n for n in COUNTS if n <= most_together(gpu)]
    predictions = [p for p in predictor.many([(gpu, n) for n in counts]) if p.fits]
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
        if after["speedup"] / before["speedup"] < PAYS or predictions[0].limit == "launch":
            break
        pays = int(after["num_gpus"])
    return {
        "gpu": gpu.name,
        "points": points,
        "pays_up_to": pays,
        "batch_per_gpu": predictions[0].batch_size,
        "launch_bound": predictions[0].limit == "launch",
    }


def buy_or_rent(gpu: Gpu, offer: Offer, prices: Prices, dollars_a_kwh: float) -> dict[str, Any]:
    """Hours of use after which buying is cheaper than renting, electricity counted; None where a price is
    not known.

    The host around the card, its idle hours and what it sells for later are not counted.
    """
    rent = prices.hourly(gpu.name, 1) or prices.hourly(gpu.name)  # as in the offer, or a share of more
    buy, used = prices.purchase(gpu.name), prices.second_hand(gpu.name)
    electricity = (gpu.power_watts or 0.0) / 1e3 * dollars_a_kwh

    def hours_until(paid: PriceRange | None, an_hour: float | None, which: str) -> float | None:
        if paid is None or an_hour is None or an_hour <= electricity:
            return None
        return float(getattr(paid, which)) / (an_hour - electricity)

    hours = hours_until(buy, rent.typical if rent else None, "typical")
    return {
        "gpu": gpu.name,
        "buy_usd": buy and buy.typical,
        "buy_date": buy and buy.oldest.isoformat(),
        "used_usd": used and used.typical,
        "used_date": used and used.oldest.isoformat(),
        "used_break_even_hours": hours_until(used, rent.typical if rent else None, "typical"),
        "rent_usd_per_hour": rent and rent.typical,
        "electricity_usd_per_hour": electricity,
        "break_even_hours": hours,
        "break_even_low": hours_until(buy, rent.high if rent else None, "low"),
        "break_even_high": hours_until(buy, rent.low if rent else None, "high"),
        "trainings": hours / offer.hours if hours else None,
    }
