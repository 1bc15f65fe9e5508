"""The tiny job in which the gradient of rank 1 is infinite in the sixth step of its process."""

import os
import runpy
from pathlib import Path

tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
steps = iter(range(1, 10**6))


def loss(model, batch):
    found = tiny["loss"](model, batch)
    if next(steps) == 6 and os.environ["RANK"] == "1" and "CLEAN" not in os.environ:
        found.register_hook(lambda gradient: gradient * float("inf"))
    return found


job = tiny["make"](loss=loss)
