"""Prices: dated offers, ranges, ages and a person's own file."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from vivace.advising.catalogue import load_catalogue
from vivace.advising.prices import STALE_DAYS, load_prices
from vivace.errors import InputError

SNAPSHOT = datetime.date(2026, 11, 21)


def own_file(folder: Path, *offers: str) -> Path:
    path = folder / "prices.toml"
    head = '[[rent]]\nprovider = "me"\nsource = "my bill"\n'
    path.write_text("\n".join(["format = 1", *(head + offer for offer in offers)]))
    return path


def test_every_shipped_offer_is_of_a_known_device_dated_and_sourced() -> None:
    prices = load_prices()
    known = load_catalogue()
    for offer in prices.rent + prices.buy:
        assert offer.gpu in known
        assert offer.date <= SNAPSHOT
        assert offer.source
    assert all(offer.usd < 20 for offer in prices.rent)
    assert all(offer.usd > 100 for offer in prices.buy)


def test_low_typical_and_high_are_those_of_the_offers() -> None:
    found = load_prices().hourly("H100-SXM5-80GB")
    assert found is not None
    asked = [offer.usd for offer in found.offers]
    assert (found.low, found.high) == (min(asked), max(asked))
    assert found.low < found.typical < found.high
    assert len({offer.provider for offer in found.offers}) >= 5


def test_what_nobody_offers_has_no_price() -> None:
    prices = load_prices()
    assert prices.hourly("MI355X") is None
    assert prices.purchase("B200-SXM-180GB") is None


def test_old_prices_are_named_with_their_date() -> None:
    prices = load_prices()
    assert prices.warnings(["H100-SXM5-80GB", "MI355X"], SNAPSHOT) == []
    (warning,) = prices.warnings(["L40S", "H100-SXM5-80GB"], SNAPSHOT)
    assert "L40S of 2025-06-01" in warning
    later = SNAPSHOT + datetime.timedelta(days=STALE_DAYS + 1)
    (both,) = prices.warnings(["H100-SXM5-80GB", "A100-SXM4-80GB"], later)
    assert "H100-SXM5-80GB of 2026" in both
    assert "A100-SXM4-80GB of 2026" in both


def test_an_old_offer_does_not_count_beside_a_new_one() -> None:
    found = load_prices().hourly("RTX 4090")
    assert found is not None
    assert found.oldest.year == 2026


def test_an_own_file_replaces_the_offers_for_its_devices(tmp_path: Path) -> None:
    path = own_file(tmp_path, 'date = 2026-11-01\nusd_per_hour = { "rtx4090" = 0.5, "B200" = 4 }')
    prices = load_prices(path)
    found = prices.hourly("RTX 4090")
    assert found is not None
    assert [offer.provider for offer in found.offers] == ["me"]
    assert prices.hourly("H100-SXM5-80GB") == load_prices().hourly("H100-SXM5-80GB")
    assert prices.hourly("B200-SXM-180GB") != load_prices().hourly("B200-SXM-180GB")
    assert prices.purchase("RTX 4090") == load_prices().purchase("RTX 4090")


def test_machines_of_few_devices_side_by_side_are_no_larger_machine(tmp_path: Path) -> None:
    prices = load_prices(own_file(tmp_path, "date = 2026-11-01\nsizes = [1, 4]\nusd_per_hour = { T4 = 1 }"))
    assert [number for number in (1, 2, 4, 8, 16) if prices.hourly("T4", number)] == [1, 4]
    prices = load_prices(own_file(tmp_path, "date = 2026-11-01\nsizes = [8]\nusd_per_hour = { H100 = 1 }"))
    assert [number for number in (4, 8, 16) if prices.hourly("H100-SXM5-80GB", number)] == [8, 16]


def test_more_devices_are_not_cheaper_each_because_others_rent_them(tmp_path: Path) -> None:
    dear = "date = 2026-11-01\nsizes = [1]\nusd_per_hour = { H100 = 9 }"
    cheap = "date = 2026-11-01\nusd_per_hour = { H100 = 2 }"
    prices = load_prices(own_file(tmp_path, dear, dear, cheap))
    alone, two = (prices.hourly("H100-SXM5-80GB", number) for number in (1, 2))
    assert alone
    assert two
    assert (alone.low, alone.typical, alone.high) == (2, 2, 9)
    assert two.typical == 2


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ("date = 2026-11-01\nusd_per_hour = { T4 = -1 }", "me asks -1 for T4"),
        ('date = 2026-11-01\nusd_per_hour = { T4 = "cheap" }', "me asks 'cheap' for T4"),
        ("date = 2026-11-01\nusd_per_hour = { T5 = 1 }", "me: no device 'T5'"),
        ('date = "today"\nusd_per_hour = { T4 = 1 }', "me has the date 'today'"),
        ("date = 2999-01-01\nusd_per_hour = { T4 = 1 }", "has not come yet"),
        ("usd_per_hour = { T4 = 1 }", "me lack 'date'"),
        ("date = 2026-11-01\nusd_per_hour = { T4 = 1 }\nregion = 'x'", "me have an unknown field 'region'"),
        (
            "date = 2026-11-01\neur_per_hour = { T4 = 1 }",
            "unknown field 'eur_per_hour'; they have provider, ",
        ),
        ("date = 2026-11-01\nusd_per_hour = 3", "me has usd_per_hour = 3"),
        ("date = 2026-11-01\nusd_per_hour = { T4 = 1 }\n[lease]", "unknown table 'lease'"),
        ("date = 2026-11-01\nusd_per_hour = { T4 = 1 }\n[buy]\nprovider = 'me'", "two brackets"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(tmp_path: Path, offer: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load_prices(own_file(tmp_path, offer))
    assert message in str(refused.value)
