import pytest
import torch

from vivace.tensors import denormals
from vivace.tensors.denormals import LOOKS, Denormals, SlowNumbers

CPU = torch.device("cpu")
MEASURED = denormals.times_slower


@pytest.fixture(autouse=True)
def _processor(monkeypatch):
    """As Intel's are: a hundred times slower with them."""
    monkeypatch.setattr(denormals, "times_slower", lambda: 100.0)


def told(speeds, share, device=CPU, before=0.0):
    """What is said at each look, where a step is looked at then, and something is said."""
    slow, found = SlowNumbers(device), []
    for num, seconds in enumerate(speeds):
        slow.note(seconds)
        if slow.wants_a_share and (text := slow.sentence(before if num < LOOKS else share)):
            found.append((num, text))
    return found


def test_a_run_that_has_become_slower_says_so_once_where_such_numbers_may_be_why():
    ((num, text),) = told([1.0] * LOOKS + [1.1] * LOOKS + [1.7] * 5 * LOOKS, 0.03)
    assert num == 2 * LOOKS + LOOKS // 2
    assert text.startswith("a step takes 1.70 times as long as in the beginning, and 3.0 % of the numbers")
    assert "this processor is up to 100 times slower: that may be why" in text
    assert "[techniques.flush_denormals] in a plan" in text


@pytest.mark.parametrize(
    ("later", "share", "device"),
    [(1.1, 0.5, CPU), (0.5, 0.5, CPU), (1.7, 0.0, CPU), (1.7, 1e-4, CPU), (1.7, 0.5, torch.device("cuda"))],
)
def test_other_runs_say_nothing(later, share, device):
    assert told([1.0] * LOOKS + [later] * 5 * LOOKS, share, device) == []


def test_what_was_there_in_the_beginning_is_not_why():
    slower = [1.0] * LOOKS + [1.7] * 5 * LOOKS
    assert told(slower, 0.03, before=0.03) == told(slower, 0.03, before=0.0299) == []
    assert told(slower, 0.03, before=0.01)


def test_one_of_them_slows_down_all_that_are_computed_with_it():
    slower = [1.0] * LOOKS + [1.7] * 5 * LOOKS
    assert told(slower, 1e-3)  # of which up to 1.6 % of the vectors hold one
    assert told([1.0] * LOOKS + [90.0] * 5 * LOOKS, 0.07)
    assert not told([1.0] * LOOKS + [110.0] * 5 * LOOKS, 0.5)


def test_where_no_more_of_them_came_the_processor_is_not_asked(monkeypatch):
    """As where they are taken for zero: then no product would be slow."""
    monkeypatch.setattr(denormals, "times_slower", None)
    assert told([1.0] * LOOKS + [1.7] * 5 * LOOKS, 0.0) == []


def test_a_processor_that_is_hardly_slower_with_them_is_not_blamed(monkeypatch):
    monkeypatch.setattr(denormals, "times_slower", lambda: 1.5)
    assert told([1.0] * LOOKS + [1.7] * 5 * LOOKS, 0.3) == []


def test_this_processor_is_asked():
    with denormals.outside_modes():
        denormals.flush(True)
        try:
            flushed = MEASURED.__wrapped__()
        finally:
            denormals.flush(False)
    assert 0.2 < flushed < 1.5 * MEASURED.__wrapped__()  # a root of zero is slow on some, too


def test_a_few_slow_looks_are_no_slower_run():
    assert told([1.0] * LOOKS + [1.0, 1.0, 9.0] * 3 * LOOKS, 0.5) == []


def test_what_operators_give_is_counted_and_stays():
    tiny, ones = torch.full((100,), 1e-30), torch.ones(300)
    with Denormals() as seen:
        products = [tiny * 1e-10, ones * 1.0, tiny.double() * 1e-10, tiny * 0.0]
    assert seen.denormal == 100
    assert seen.share == pytest.approx(100 / 700)
    assert torch.equal(products[0], torch.full((100,), 1e-30) * 1e-10)
