"""What devices cost, to rent and to buy: `prices.toml`, a dated snapshot. Needs no torch and no network."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vivace.advising.catalogue import Gpu, find_gpu, read_document
from vivace.errors import InputError

PRICES_FILE = Path(__file__).resolve().with_name("prices.toml")
STALE_DAYS = 90
KINDS = {"rent": "usd_per_hour", "buy": "usd", "used": "usd"}
MOST_IN_A_MACHINE = 8
SIZES = (1, 2, 4, MOST_IN_A_MACHINE)  # of most machines


@dataclasses.dataclass(frozen=True)
class Price:
    """One offer for one device: US dollars an hour to rent, or US dollars to buy, seen on `date`.

    `sizes` are the numbers of devices in the machines that it rents; empty where it rents any number
    up to eight.
    """

    gpu: str
    provider: str
    usd: float
    date: datetime.date
    source: str
    sizes: tuple[int, ...] = ()

    def rents(self, number: int) -> bool:
        """Can so many devices be had: one of the sizes, or several whole machines of eight or more? Smaller
        machines beside each other have no link between them that predictions know."""
        largest = max(self.sizes, default=MOST_IN_A_MACHINE)
        inside = number in self.sizes if self.sizes else number <= largest
        return inside or (number > largest >= MOST_IN_A_MACHINE and number % largest == 0)


@dataclasses.dataclass(frozen=True)
class PriceRange:
    """Lowest, middle (median) and highest of several offers, in US dollars, with the offers.

    Offers more than `STALE_DAYS` days older than the newest are left out.
    """

    low: float
    typical: float
    high: float
    offers: tuple[Price, ...]

    @property
    def oldest(self) -> datetime.date:
        """The day on which the oldest of the offers was seen."""
        return min(offer.date for offer in self.offers)


@dataclasses.dataclass(frozen=True)
class Prices:
    """All offers that are known, for one device each: by the hour, new, and used."""

    rent: tuple[Price, ...]
    buy: tuple[Price, ...]
    used: tuple[Price, ...] = ()

    def hourly(self, gpu: str, number: int | None = None) -> PriceRange | None:
        """US dollars an hour for one device of that name on demand, rented in that number where one is
        given; `None` where no such offer is known.

        Who rents one device is not who rents eight. So that a number is not cheap for the sake of its
        providers, its price is the least of two middles: of all its offers, and of those that rent another
        number, too.
        """
        found = _range(tuple(o for o in self.rent if number is None or o.rents(number)), gpu)
        if found is None or number is None:
            return found
        both = ([o.usd for o in found.offers if o.rents(other)] for other in SIZES)
        middles = [statistics.median(asked) for asked in both if asked]
        return dataclasses.replace(found, typical=min([found.typical, *middles]))

    def sizes(self, gpu: str) -> tuple[int, ...]:
        """The numbers that offers of devices of that name give; empty where any number is rented."""
        return tuple(sorted({size for offer in self.rent if offer.gpu == gpu for size in offer.sizes}))

    def second_hand(self, gpu: str) -> PriceRange | None:
        """US dollars for one used device, or `None` where no source is known."""
        return _range(self.used, gpu)

    def purchase(self, gpu: str) -> PriceRange | None:
        """US dollars for one device of that name, or `None` where no offer is known."""
        return _range(self.buy, gpu)

    def warnings(self, gpus: Iterable[str], today: datetime.date | None = None) -> list[str]:
        """One sentence about all devices whose rental prices include one older than `STALE_DAYS` days, the
        oldest first, with its date."""
        today = today or datetime.date.today()
        dates = {name: found.oldest for name in gpus if (found := self.hourly(name)) is not None}
        old = {name: date for name, date in dates.items() if (today - date).days > STALE_DAYS}
        if not old:
            return []
        told = [f"{name} of {old[name]}" for name in sorted(old, key=lambda name: old[name])]
        shown = ", ".join(told[:5]) + (f" and {len(told) - 5} more" if len(told) > 5 else "")
        return [f"prices older than {STALE_DAYS} days: {shown}; give your own with --prices"]


def load_prices(path: str | Path | None = None, catalogue: Mapping[str, Gpu] | None = None) -> Prices:
    """The shipped prices, or those with a person's own over them.

    Args:
        path: a file in the format of `prices.toml`. For every device that it names, its offers replace the
            shipped ones of the same kind.
        catalogue: the devices that may be named, where they are not the shipped ones.

    Raises `InputError` naming file, provider and value where the file cannot be used.
    """
    shipped = _load(PRICES_FILE, catalogue)
    if path is None:
        return shipped
    own = _load(Path(path), catalogue)
    return Prices(*(_replaced(getattr(shipped, kind), getattr(own, kind)) for kind in KINDS))


def _replaced(shipped: tuple[Price, ...], own: tuple[Price, ...]) -> tuple[Price, ...]:
    named = {offer.gpu for offer in own}
    return (*own, *(offer for offer in shipped if offer.gpu not in named))


def _range(offers: tuple[Price, ...], gpu: str) -> PriceRange | None:
    known = [offer for offer in offers if offer.gpu == gpu]
    if not known:
        return None
    newest = max(offer.date for offer in known)
    fresh = [offer for offer in known if (newest - offer.date).days <= STALE_DAYS]
    found = tuple(sorted(fresh, key=lambda offer: offer.usd))
    return PriceRange(found[0].usd, statistics.median(offer.usd for offer in found), found[-1].usd, found)


def _load(path: Path, catalogue: Mapping[str, Gpu] | None) -> Prices:
    document = read_document(path)
    unknown = set(document) - {"format", *KINDS}
    if unknown:
        raise InputError(f"{path} has an unknown table {min(unknown)!r}; known are {', '.join(KINDS)}")
    return Prices(
        *(tuple(_offers(document.get(kind, []), field, path, catalogue)) for kind, field in KINDS.items())
    )


def _offers(
    tables: list[dict[str, Any]], field: str, path: Path, catalogue: Mapping[str, Gpu] | None
) -> Iterable[Price]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: offers are a list of tables: write [[...]] with two brackets")
    for table in tables:
        wrong = {"provider", "date", "source", field} ^ (set(table) - {"sizes"})
        if wrong:
            what = "lack" if min(wrong) not in table else "have an unknown field"
            raise InputError(
                f"{path}: the offers of {table.get('provider', 'a provider')} {what} {min(wrong)!r}; "
                f"they have provider, date, source, sizes and {field}, in US dollars"
            )
        provider, date = table["provider"], table["date"]
        if type(date) is not datetime.date:
            raise InputError(f"{path}: {provider} has the date {date!r}; write date = 2026-11-09")
        if path != PRICES_FILE and date > datetime.date.today():
            raise InputError(f"{path}: {provider} has the date {date}, which has not come yet")
        sizes = table.get("sizes", [])
        if not isinstance(sizes, list) or not all(type(n) is int and n > 0 for n in sizes):
            raise InputError(f"{path}: {provider} has sizes = {sizes!r}; write sizes = [1, 2, 4, 8]")
        if not isinstance(table[field], dict):
            raise InputError(
                f"{path}: {provider} has {field} = {table[field]!r}; write {{ 'RTX 4090' = 0.35 }}"
            )
        for name, usd in table[field].items():
            if type(usd) not in (int, float) or not 0 < usd < 1e7:
                raise InputError(
                    f"{path}: {provider} asks {usd!r} for {name}; a price is a number of dollars above 0"
                )
            try:
                card = find_gpu(name, catalogue)
            except InputError as error:
                raise InputError(f"{path}: {provider}: {error}") from None
            yield Price(card.name, provider, float(usd), date, table["source"], tuple(sizes))
