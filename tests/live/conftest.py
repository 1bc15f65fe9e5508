"""How fast a step is does not hang on the machine: a clock that goes on by what a test says, and timings."""

import json
from typing import ClassVar

import pytest

from vivace.live import candidates, conductor, course, kept, spending
from vivace.live import loop as loop_module
from vivace.live.ending import tell
from vivace.live.errand import Errand
from vivace.live.loop import Loop
from vivace.live.pairs import Timing
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


@pytest.fixture(autouse=True)
def _room(monkeypatch):
    """What other tests of this process have taken is no part of a script."""
    monkeypatch.setattr(kept, "free_memory", lambda: 2**60)


@pytest.fixture(autouse=True)
def _units(monkeypatch):
    """bfloat16 is tried on any processor, with units for it or without."""
    monkeypatch.setattr(candidates, "UNITS", candidates.UNITS | {"avx2", "neon"})


Turned.__module__ = "torch"  # else copies of steps would put the clock back, as what is the script's


@pytest.fixture
def turned():
    """The test's clock, made anew by each call."""
    Turned()
    return Turned


@pytest.fixture
def led(tmp_path, monkeypatch, one_thread):
    """``led(train, *favoured)``: nothing is waited for or must pay, and segments with `favoured` are fast."""
    monkeypatch.setattr(spending, "PATIENCE", 1e-9)
    monkeypatch.setattr(spending, "SHARE", 1e9)
    monkeypatch.setattr(spending, "PAYS", 0.0)
    monkeypatch.setattr(loop_module, "SMALLEST_STEP_SECONDS", 0.0)
    monkeypatch.setattr(course, "HOPELESS", 0.0)
    monkeypatch.setattr(course, "SEGMENT_SECONDS", 0.0)
    monkeypatch.setattr(course, "later", lambda root: None)

    def run(train, *favoured, plan=None, factors=None):
        watching = Loop(Errand(str(tmp_path), "runs/run", "python train.py", plan), tell=tell)

        def timing(wall, cpu):
            acting = watching.conductor._acting if watching.conductor is not None else None
            names = acting.plan.names if acting is not None else ()
            fast = min((factors or dict.fromkeys(favoured, 0.5)).get(name, 1.0) for name in ("", *names))
            return Timing(fast, fast)

        monkeypatch.setattr(conductor, "Timing", timing)
        watching.install()
        try:
            result = train()
        finally:
            watching.finish()
        return watching, result, json.loads((tmp_path / "run.json").read_text())

    return run
