import pytest
import torch

from vivace.tensors.denormals import LOOKS, Denormals, SlowNumbers

CPU = torch.device("cpu")


def told(speeds, share, device=CPU):
    """What is said at each look, where a step is looked at then, and something is said."""
    slow, found = SlowNumbers(device), []
    for num, seconds in enumerate(speeds):
        slow.note(seconds)
        if slow.slower and (text := slow.sentence(share)):
            found.append((num, text))
    return found


def test_a_run_that_has_become_slower_says_so_once_where_such_numbers_may_be_why():
    ((num, text),) = told([1.0] * LOOKS + [1.1] * LOOKS + [1.7] * 5 * LOOKS, 0.03)
    assert num == 2 * LOOKS + LOOKS // 2
    assert text.startswith("a step takes 1.70 times as long as in the beginning, and 3.0 % of the numbers")
    assert "[techniques.flush_denormals] in a plan" in text


@pytest.mark.parametrize(
    ("later", "share", "device"),
    [(1.1, 0.5, CPU), (0.5, 0.5, CPU), (1.7, 0.0, CPU), (1.7, 1e-6, CPU), (1.7, 0.5, torch.device("cuda"))],
)
def test_other_runs_say_nothing(later, share, device):
    assert told([1.0] * LOOKS + [later] * 5 * LOOKS, share, device) == []


def test_a_few_slow_looks_are_no_slower_run():
    assert told([1.0] * LOOKS + [1.0, 1.0, 9.0] * 3 * LOOKS, 0.5) == []


def test_what_operators_give_is_counted_and_stays():
    tiny, ones = torch.full((100,), 1e-30), torch.ones(300)
    with Denormals() as seen:
        products = [tiny * 1e-10, ones * 1.0, tiny.double() * 1e-10, tiny * 0.0]
    assert seen.denormal == 100
    assert seen.share == pytest.approx(100 / 700)
    assert torch.equal(products[0], torch.full((100,), 1e-30) * 1e-10)
