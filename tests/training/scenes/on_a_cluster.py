"""The tiny job on a cluster. Beside a copy of this file, `dies` lets rank 1 kill itself, `holds` all wait."""

import os
import runpy
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent
tiny = runpy.run_path(str(HERE / "tiny.py"))
steps = iter(range(1, 10**6))


def loss(model, batch):
    step, rank = next(steps), os.environ["RANK"]
    if step == 6 and rank == "1" and (HERE / "dies").exists():
        (HERE / "dies").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 4 and (HERE / "holds").exists():
        wait_for_sigterm(HERE / f"waits_{rank}")
    return tiny["loss"](model, batch)


job = tiny["make"](loss=loss)


def wait_for_sigterm(told):
    heard, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(before(number, frame)))
    told.touch()
    deadline = time.monotonic() + 120
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, before)
