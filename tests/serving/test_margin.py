"""What a form loses of the metric: intervals that hold, and an honest third answer."""

import random

import numpy
import pytest

from vivace.errors import InputError
from vivace.serving.margin import by_groups, by_sample, parse_margin, student, tango


def test_the_bounds_are_where_the_score_test_begins_to_reject():
    """By the definition: the likelihood under a given difference, at its largest on a grid."""
    gained, lost, count = 9, 3, 80
    shares = numpy.linspace(1e-6, 0.5, 400_001)
    for bound, level in zip(tango(gained, lost, count), (1.96, -1.96), strict=True):
        possible = shares[(shares + bound > 0) & (2 * shares + bound < 1)]
        same = count - gained - lost
        chances = gained * numpy.log(possible + bound) + lost * numpy.log(possible)
        chances += same * numpy.log(1 - 2 * possible - bound)
        share = possible[numpy.argmax(chances)]
        spread = numpy.sqrt(count * (2 * share + bound - bound**2))
        assert (gained - lost - count * bound) / spread == pytest.approx(level, abs=0.01)


def test_where_no_sample_differs_it_is_not_certain():
    low, high = tango(0, 0, 100)
    assert low == pytest.approx(-3.8416 / 103.8416, rel=1e-3)
    assert high == -low


def test_the_interval_is_symmetric():
    low, high = tango(7, 3, 200)
    assert tango(3, 7, 200) == pytest.approx((-high, -low))
    assert low < 4 / 200 < high


@pytest.mark.parametrize(("gained", "lost"), [(0.01, 0.03), (0.0, 0.01), (0.1, 0.1)])
def test_the_interval_holds_the_truth_as_often_as_it_says(gained, lost):
    stream = random.Random(0)
    held = 0
    for _ in range(300):
        draws = [stream.random() for _ in range(200)]
        b, c = sum(d < gained for d in draws), sum(gained <= d < gained + lost for d in draws)
        low, high = tango(b, c, 200)
        held += low <= gained - lost <= high
    assert held >= 0.92 * 300


def scores(right, count):
    return [1.0] * right + [0.0] * (count - right)


def test_equal_answers_on_few_samples_decide_nothing_and_say_how_many_would():
    ours = scores(90, 100)
    found = by_sample(ours, ours, 0.005, 0.9, 0.9)
    assert found.kept is None
    assert found.needed == pytest.approx(765, rel=0.07)
    enough = scores(700, found.needed)
    assert by_sample(enough, enough, 0.005, 0.9, 0.9).kept is True


def test_a_large_loss_is_seen():
    found = by_sample(scores(60, 100), scores(95, 100), 0.01, 0.95, 0.6)
    assert found.kept is False
    assert found.needed is None
    assert found.difference == pytest.approx(-0.35)


def test_a_loss_at_the_margin_needs_no_more_samples_as_none_would_help():
    found = by_sample(scores(89, 100), scores(90, 100), 0.01, 0.9, 0.89)
    assert found.kept is None
    assert found.needed is None


def test_scores_of_many_values():
    stream = random.Random(1)
    theirs = [stream.gauss(0, 1) for _ in range(400)]
    ours = [value + stream.gauss(0, 0.01) for value in theirs]
    assert by_sample(ours, theirs, 0.01, 0.0, 0.0).kept is True
    worse = [value - 0.1 for value in theirs]
    assert by_sample(worse, theirs, 0.01, 0.0, -0.1).kept is False


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (29, 2.045), (1000, 1.962)]
)
def test_quantiles_of_students_t(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, rel=0.01)


def test_few_samples_have_a_wider_interval():
    """Of twelve the normal distribution's would be a ninth narrower."""
    theirs = [float(number) for number in range(12)]
    ours = [value + (0.1 if number % 2 else -0.1) for number, value in enumerate(theirs)]
    found = by_sample(ours, theirs, 0.01, 5.5, 5.5)
    assert found.high == pytest.approx(2.201 * 0.1 * (12 / 11) ** 0.5 / 12**0.5, rel=0.01)


def test_a_single_sample_that_is_far_off_does_not_pass_for_certain():
    theirs = [float(number % 7) for number in range(60)]
    found = by_sample([*theirs[:-1], theirs[-1] - 0.001], theirs, 0.01, 3.0, 3.0)
    assert found.kept is None


def test_groups():
    theirs = [0.8 + 0.001 * (number % 3) for number in range(20)]
    near = [value + 0.00001 * (number % 2) for number, value in enumerate(theirs)]
    assert by_groups(near, theirs, 0.01, 0.8, 0.8, 1000).kept is True
    far = [value - 0.2 for value in theirs]
    assert by_groups(far, theirs, 0.01, 0.8, 0.6, 1000).kept is False
    assert by_groups(theirs, theirs, 0.01, 0.8, 0.8, 20).kept is None


def test_a_single_group_that_differs_does_not_pass_for_certain():
    """Without it nothing differs: it says as little of the others as if it were the same."""
    theirs, ours = [0.8] * 20, [0.7995] * 20
    ours[3] = 0.8
    assert by_groups(ours, theirs, 0.004, 0.8, 0.7995, 400).kept is None
    assert by_groups(ours, theirs, 0.004, 0.8, 0.7995, 4000).kept is True


def test_margins():
    assert parse_margin("0.5%", 0.8) == pytest.approx(0.004)
    assert parse_margin(" 0.005 ", 0.8) == 0.005
    assert parse_margin("10%", -2.0) == pytest.approx(0.2)


def test_a_share_of_nothing():
    assert parse_margin("0.005", 0.0) == 0.005
    with pytest.raises(InputError, match=r"the metric is 0, of which 0\.5% is nothing"):
        parse_margin("0.5%", 0.0)


@pytest.mark.parametrize("margin", ["half", "-1%", "0", "nan", "", "100%", "200%"])
def test_bad_margins(margin):
    with pytest.raises(InputError, match="margin"):
        parse_margin(margin, 0.9)
