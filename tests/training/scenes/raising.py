"""The tiny job in which rank 1 raises in the loss of its fourth step."""

import os
import runpy
from pathlib import Path

tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
steps = iter(range(1, 10**6))


def loss(model, batch):
    if next(steps) == 4 and os.environ["RANK"] == "1":
        raise ValueError("the labels are from another year")
    return tiny["loss"](model, batch)


job = tiny["make"](loss=loss)
