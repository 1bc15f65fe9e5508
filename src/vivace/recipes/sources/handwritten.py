"""The handwritten digits that scikit-learn ships (Alpaydin and Kaynak, 1998)."""

from __future__ import annotations

import functools

import numpy
import torch

from vivace.recipes.sources import of_package


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (number, 1, 8, 8) between 0 and 1, and which digit each is (number,)."""
    path = of_package("scikit-learn", "sklearn/datasets/data/digits.csv.gz", "demo")
    rows = torch.from_numpy(numpy.loadtxt(path, numpy.float32, delimiter=","))
    return rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
