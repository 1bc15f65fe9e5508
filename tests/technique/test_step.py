"""The composed step: one copy of each seam, and observers that see every call of it."""

import pytest

from vivace.technique.step import Seam, Step


@pytest.fixture
def step():
    """Forward and backward run twice within gradients, as in a step of two pieces."""
    found = Step({Seam.FORWARD: lambda batch: batch + 1, Seam.BACKWARD: lambda loss: None})
    found.gradients = lambda batch: sum(found.forward(batch) for _ in range(2))
    return found


def test_an_observer_sees_every_call_until_it_ends(step):
    seen = []

    def watch(following, batch):
        seen.append(batch)
        return following(batch)

    before = dict(vars(step))
    with step.observed(forward=watch):
        assert step.gradients(1) == 4
    assert step.gradients(5) == 12
    assert seen == [1, 1]
    assert vars(step) == before


def test_observers_nest_and_end_with_an_error(step):
    seen = []

    def named(name):
        def watch(following, *arguments):
            seen.append(name)
            return following(*arguments)

        return watch

    before = dict(vars(step))
    with step.observed(forward=named("inner"), gradients=named("whole")):
        with step.observed(forward=named("outer")), pytest.raises(TypeError):
            step.gradients("text")
        step.gradients(1)
    assert seen == ["whole", "outer", "inner", "whole", "inner", "inner"]
    assert vars(step) == before


def test_a_name_that_is_no_seam_is_refused(step):
    before = dict(vars(step))
    with pytest.raises(ValueError, match="'forwards' is not a valid Seam"), step.observed(forwards=print):
        pass
    assert vars(step) == before
