"""The words of a budget."""

import pytest

from vivace.errors import InputError
from vivace.measuring.budget import BUDGETS, parse_budget


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        *BUDGETS.items(),
        ("auto", None),
        ("90", 90.0),
        (30, 30.0),
        (7.5, 7.5),
        ("5m", 300.0),
        ("5min", 300.0),
        ("1.5 h", 5400.0),
        ("45s", 45.0),
        (" 2M ", 120.0),
    ],
)
def test_the_words_of_a_budget(word, seconds):
    assert parse_budget(word) == seconds


@pytest.mark.parametrize("wrong", ["quick", 1, "4s", "-5m", "5 weeks", "1e9h", float("nan"), ""])
def test_what_is_no_budget(wrong):
    with pytest.raises(
        InputError, match="it must be fast, balanced, max, auto, a time such as 5m, or seconds"
    ):
        parse_budget(wrong)
