"""A clock that goes on by what a test says: how fast a step is does not hang on the machine."""

from typing import ClassVar

import pytest

from vivace.live.spending import Clock


class Turned:
    """Both clocks of a loop; each look takes a little. `current` is the one of the test that runs."""

    LOOK: ClassVar[float] = 1e-7
    current: ClassVar["Turned"]

    def __init__(self):
        self.now = 0.0
        Turned.current = self

    def wall(self):
        self.now += self.LOOK
        return self.now

    @property
    def clock(self):
        return Clock(self.wall, self.wall)


@pytest.fixture
def turned():
    """The test's clock, made anew by each call."""
    Turned()
    return Turned
