"""The tiny job in which rank 1 hangs in the loss of its sixth step, of torchrun's first attempt."""

import os
import runpy
import time
from pathlib import Path

tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
steps = iter(range(1, 10**6))


def loss(model, batch):
    if next(steps) == 6 and os.environ["RANK"] == "1":
        time.sleep(1000)
    return tiny["loss"](model, batch)


job = tiny["make"](loss=loss)
