import pytest
import torch

from vivace.tensors.denormals import LOOKS, SlowNumbers

CPU = torch.device("cpu")
NORMAL, SLOW = torch.ones(1000), torch.full((1000,), 1e-40)


def told(speeds, held, device=CPU):
    """What is said at each look, where something is."""
    slow_numbers = SlowNumbers(device)
    return [(num, text) for num, each in enumerate(speeds) if (text := slow_numbers.sentence(each, held))]


def test_a_run_that_has_become_slower_says_so_once_where_such_numbers_may_be_why():
    speeds = [1.0] * LOOKS + [1.1] * LOOKS + [1.7] * 5 * LOOKS
    ((num, text),) = told(speeds, lambda: [NORMAL, SLOW])
    assert num == 2 * LOOKS + LOOKS // 2
    assert text.startswith(
        "a step takes 1.70 times as long as in the beginning, and 50 % of what the optimizer"
    )
    assert "[techniques.flush_denormals] in a plan" in text


@pytest.mark.parametrize(
    ("later", "held", "device"),
    [
        (1.1, [SLOW], CPU),
        (0.5, [SLOW], CPU),
        (1.7, [NORMAL], CPU),
        (1.7, [NORMAL.clone().fill_(0.0)], CPU),
        (1.7, [torch.full((1000,), 1e-40, dtype=torch.float64)], CPU),
        (1.7, [], CPU),
        (1.7, [SLOW], torch.device("cuda")),
    ],
)
def test_other_runs_say_nothing(later, held, device):
    assert told([1.0] * LOOKS + [later] * 5 * LOOKS, lambda: held, device) == []


def test_a_single_slow_look_is_no_slower_run():
    speeds = [1.0] * LOOKS + [1.0, 1.0, 9.0] * 3 * LOOKS
    assert told(speeds, lambda: [SLOW]) == []
