"""Numbers as words: one value is told in one way, everywhere; units follow the value, and digits keep it."""

# ruff: noqa: RUF001 - the figures stand here as a reader sees them

import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from vivace import words
from vivace.inspection import table as inspected
from vivace.ledger import Ratio
from vivace.machine import Device, Machine
from vivace.memory import fits
from vivace.reporting import phrases

SIZES = {"B": 1.0, **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", 1)}}
PREFIXES = {"": 1.0, **{prefix: 1000.0**power for power, prefix in enumerate("kMGTPE", 1)}}
CLOCK = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
FINER = {"min": 1.0, "h": 60.0, "d": 3600.0}  # what a time in this unit is rounded to

numbers = st.floats(-1e15, 1e15)
seconds = st.floats(1e-6, 1e9)


def digits(text):
    """A printed number, and half of its last digit."""
    text = text.replace(",", "").replace("\N{MINUS SIGN}", "-")
    mantissa, _, power = text.partition("e")
    _, _, decimals = mantissa.partition(".")
    return float(text), 0.5 * 10.0 ** (int(power or 0) - len(decimals))


def read(text, units):
    """The value of ``<number> <unit>``, and what it may be wrong by."""
    shown, _, unit = text.partition(" ")
    value, error = digits(shown)
    return value * units[unit], error * units[unit]


def clock(text):
    """The value of a time in one or two units, and what it may be wrong by."""
    parts = re.findall(r"([\d.,]+) (\S+)", text)
    value = sum(digits(shown)[0] * CLOCK[unit] for shown, unit in parts)
    first, unit = parts[0]
    return value, FINER[unit] / 2 if unit in FINER else digits(first)[1] * CLOCK[unit]


def near(found, value):
    return abs(found[0] - value) <= found[1] + 1e-9 * abs(value)


@given(numbers)
@example(99.96)
@example(9.996)
@example(0.9996)
@settings(deadline=None)
def test_a_number_is_read_back_within_its_last_digit(value):
    shown, error = digits(words.number(value))
    # A number below 1 ends with its last digit that is not nought.
    assert abs(shown - value) <= max(error, 0.005 * abs(value)) * (1 + 1e-9)
    if 0.001 <= abs(value) < 999.4:
        assert len(words.number(value).strip("\N{MINUS SIGN}").replace(".", "").lstrip("0")) <= 3


@given(st.integers(0, 2**60))
@example(999)
@example(1000)
@example(2**20 - 1)
@settings(deadline=None)
def test_bytes_are_read_back_within_their_last_digit(value):
    shown = words.size(value)
    assert near(read(shown, SIZES), value) or abs(read(shown, SIZES)[0] - value) <= 0.005 * value
    assert len(shown.partition(" ")[0].replace(".", "").lstrip("0")) <= 3 or shown.endswith("PiB")


@given(st.floats(1e-3, 1e20))
@settings(deadline=None)
def test_rates_are_read_back_within_their_last_digit(value):
    shown, found = words.quantity(value, "op/s").removesuffix("op/s").split(" ")
    assert abs(digits(shown)[0] * PREFIXES[found] - value) <= 0.0051 * value


@given(seconds)
@example(0.9996)
@example(9.96)
@example(59.7)
@example(3599.7)
@example(71.6 * 3600)
@settings(deadline=None)
def test_times_are_read_back_within_their_last_digit(value):
    assert near(clock(words.duration(value)), value)


@pytest.mark.parametrize(
    ("told", "understood"),
    [
        (words.size, lambda text: read(text, SIZES)[0]),
        (words.duration, lambda text: clock(text)[0]),
        (words.quantity, lambda text: read(text, PREFIXES)[0]),
        (words.number, lambda text: digits(text)[0]),
        (words.percent, lambda text: digits(text.removesuffix(" %").replace("<0.1", "0.05"))[0]),
        (words.times, lambda text: digits(text.removesuffix("×"))[0]),
    ],
)
@given(first=st.floats(1e-6, 1e13), second=st.floats(1e-6, 1e13))
@settings(deadline=None)
def test_more_is_never_told_as_less(told, understood, first, second):
    low, high = sorted((first, second))
    assert understood(told(low)) <= understood(told(high)) * (1 + 1e-9)


@given(st.sampled_from([words.size, words.duration, words.quantity, words.number, words.percent]), seconds)
@settings(deadline=None)
def test_a_sign_is_a_minus_before_the_same_words(told, value):
    assert told(-value) in (f"\N{MINUS SIGN}{told(value)}", told(value))  # nought has none


@given(seconds, st.floats(0.1, 1.0), st.floats(1.0, 10.0))
@settings(deadline=None)
def test_an_interval_of_times_has_the_unit_of_its_estimate(value, less, more):
    shown, unit, low, high = re.fullmatch(
        r"(\S+) (\S+) \((\S+)–(\S+)\)", words.durations(value, value * less, value * more)
    ).groups()
    assert clock(words.duration(value))[0] == pytest.approx(value, rel=0.2)
    for text, expected in ((shown, value), (low, value * less), (high, value * more)):
        assert digits(text)[0] * CLOCK[unit] == pytest.approx(expected, rel=0.006)


@pytest.mark.parametrize("told", [words.size, words.duration, words.quantity, words.number, words.percent])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "much", True])
def test_what_is_not_known_is_a_dash(told, value):
    assert told(value) == words.UNKNOWN == "–"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.duration(0), "0 s"),
        (words.duration(1.7e-6), "1.70 µs"),
        (words.duration(0.0384), "38.4 ms"),
        (words.duration(0.9997), "1.0 s"),
        (words.duration(2.5), "2.5 s"),
        (words.duration(59.97), "1 min"),
        (words.duration(370), "6 min 10 s"),
        (words.duration(7500), "2 h 05 min"),
        (words.duration(86400 * 3.1), "3 d 02 h"),
        (words.durations(15120, 12600, 18360), "4.20 h (3.50–5.10)"),
        (words.size(0), "0 B"),
        (words.size(1500), "1.46 KiB"),
        (words.size(2**29), "512 MiB"),
        (words.size(1000 * 2**10), "0.977 MiB"),
        (words.size(-3 * 2**30), "−3.00 GiB"),
        (words.quantity(7.68e14, "FLOP/s"), "768 TFLOP/s"),
        (words.quantity(999.7e6, "B/s"), "1.00 GB/s"),
        (words.quantity(1925185536), "1.93 G"),
        (words.quantity(12), "12"),
        (words.number(1234567), "1,234,567"),
        (words.number(-0.5), "−0.5"),
        (words.number(3.2e22), "3.2e+22"),
        (words.number(10**16), "10,000,000,000,000,000"),
        (words.times(41.2), "41.2×"),
        (words.times(9.996), "10.0×"),
        (words.times(0.0013), "0.0013×"),
        (words.percent(0.0999), "10 %"),
        (words.percent(0.031), "3.1 %"),
        (words.percent(0.0001), "<0.1 %"),
        (words.percent(0), "0 %"),
        (words.change(2.0, 1.5), "−25 %"),
        (words.count(1, "epoch"), "1 epoch"),
        (words.count(1200, "step"), "1,200 steps"),
        (words.count(0, "step"), "0 steps"),
        (words.ratio(Ratio(2.31, 2.24, 2.38)), "2.31× (2.24–2.38)"),
        (words.ratio(Ratio(2.0, 1.4, 3.24)), "at least 1.40× (1.40–3.24)"),
        (words.ratio(None), "–"),
        (words.money(0.5), "$0.50"),
        (words.money(12.3, 9.8, 15.1), "$12.3 (9.80–15.1)"),
        (words.money(0.0358), "$0.04"),
        (words.money(3.6e-05), "under $0.01"),
        (words.money(None), "no price"),
        (words.energy(12.34), "12.3 kWh"),
    ],
)
def test_figures_in_human_units(said, expected):
    assert said == expected


@given(st.integers(1, 2**60))
@example(2**29)
@example(1500)
@settings(deadline=None, max_examples=30)
def test_every_room_tells_bytes_in_the_same_words(value):
    told = words.size(value)
    machine = Machine((Device("cuda", "card", value),), 2, {}, {"shared_memory_bytes": value})
    shown = io.StringIO()
    inspected.draw(machine, Console(file=shown, width=120))
    fits.draw([fits.Fit("card", value, value)], Console(file=shown, width=120))
    assert shown.getvalue().count(told) == 4  # the card, the limit, what is needed and what is usable
    assert phrases.fact("memory_bytes", value) == told
    assert inspected.ceiling_in_words("copy_device", value) == words.quantity(value, "B/s")
    assert phrases.fact("copy_device", value, "ceilings") == words.quantity(value, "B/s")


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("5m", words.SECONDS, 300.0),
        (" 1.5 H ", words.SECONDS, 5400.0),
        (".5min", words.SECONDS, 30.0),
        ("20GiB", {"gib": 2**30}, 20 * 2**30),
        ("1e6", {"": 1.0}, 1e6),
        ("1h30m", words.SECONDS, 5400.0),
        ("6 min 10 s", words.SECONDS, 370.0),
        ("11h50m", {"": 1.0, **words.SECONDS}, 42600.0),
        ("30m1h", words.SECONDS, None),
        ("1h1h", words.SECONDS, None),
        ("1h 30", {"": 1.0, **words.SECONDS}, None),
        ("1h and 5m", words.SECONDS, None),
        ("5", words.SECONDS, None),
        ("5 years", words.SECONDS, None),
        ("0s", words.SECONDS, None),
        ("-5s", words.SECONDS, None),
        ("1e999s", words.SECONDS, None),
        ("", {"": 1.0}, None),
    ],
)
def test_amounts_as_people_write_them(text, units, value):
    assert words.amount(text, units) == value
