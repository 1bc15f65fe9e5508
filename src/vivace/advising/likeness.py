"""What the formula misses, learnt from alike work: a Gaussian process over residuals of published figures.

Two models whose kernels are alike are mispredicted alike, and so is one card in one precision from model to
model. A residual is the logarithm of predicted over measured seconds. The expected one is a weighted sum over
the published groups of figures: how alike is the model, and are precision, layout and harness the same?
`benchmarks/_likeness.py` fits the weights, lengths and variances. Imports no torch.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vivace.advising.demand import Demand, load_models
from vivace.advising.formula import Case, matrix_rate, predict_parts
from vivace.operators import KINDS, MATRIX_KINDS

LIKENESS_FILE = Path(__file__).resolve().with_name("likeness.csv")
# Coordinates of a model, and how many of them each length of the process divides.
WIDTHS = {
    "flops": len(MATRIX_KINDS), "bytes": len(KINDS), "intensity": 1, "size": 1, "kernels": 1, "parameters": 1
}  # fmt: skip
TERMS = ("alike", "alike_mode", "alike_harness", "card", "card_mode")
COLUMNS = ("of", "name", "mode", "harness", "weight")


@dataclasses.dataclass(frozen=True)
class Likeness:
    """The fitted process, summed over figures of one model, mode and harness, and of one card and mode.

    Args:
        lengths: of the coordinates, by the names of `WIDTHS`.
        variances: of the `TERMS`.
        points: coordinates of the models, divided by the lengths, one row a group.
        modes, harnesses, weights: of the groups, in the same order.
        cards: weight by card and mode.
    """

    lengths: Mapping[str, float]
    variances: Mapping[str, float]
    points: np.ndarray
    modes: np.ndarray
    harnesses: np.ndarray
    weights: np.ndarray
    cards: Mapping[tuple[str, str], float]

    def expected(self, case: Case) -> float:
        """The expected logarithm of predicted over measured seconds of a case."""
        demand, gpu, setting = case
        point, mode, vary = scaled(coordinates(demand)[None], self.lengths)[0], mode_of(case), self.variances
        alike = np.exp(-0.5 * np.square(self.points - point).sum(1)) * self.weights
        same = self.modes == mode
        found = vary["alike"] * alike.sum() + vary["alike_mode"] * alike[same].sum()
        found += vary["alike_harness"] * alike[same & (self.harnesses == setting.harness)].sum()
        of_card = {place: weight for (name, place), weight in self.cards.items() if name == gpu.name}
        return float(
            found + vary["card"] * sum(of_card.values()) + vary["card_mode"] * of_card.get(mode, 0.0)
        )


def coordinates(demand: Demand) -> np.ndarray:
    """A model as a point: the shares of its kinds of kernels in operations and bytes, and its size."""
    flops, moved = np.zeros(len(MATRIX_KINDS)), np.zeros(len(KINDS))
    for b in demand.bins:
        place = KINDS.index(b.kind)
        moved[place] += b.bytes + b.constant_bytes / 64
        if place < len(MATRIX_KINDS):
            flops[place] += b.flops
    operations, traffic = flops.sum() + 1, moved.sum() + 1
    sizes = (operations / traffic, traffic, max(demand.count, 1), demand.num_parameters + 1)
    return np.concatenate(
        [np.sqrt(flops / operations), np.sqrt(moved / traffic), [math.log(size) for size in sizes]]
    )


def scaled(points: np.ndarray, lengths: Mapping[str, float]) -> np.ndarray:
    """Coordinates divided by their lengths."""
    repeated = [lengths[name] for name, width in WIDTHS.items() for _ in range(width)]
    quotients: np.ndarray = points / np.array(repeated)
    return quotients


def mode_of(case: Case) -> str:
    """Precision of the matrix kernels, and whether images are ordered channels last."""
    _, gpu, setting = case
    return matrix_rate(gpu, setting)[1] + (" nhwc" if setting.channels_last else "")


def predict(theta: Mapping[str, Any], likeness: Likeness | None, cases: Sequence[Case]) -> dict[str, Any]:
    """`formula.predict_parts`, less what is expected to be missed."""
    parts = predict_parts(theta, cases)
    if likeness is None or not cases:
        return parts
    factor = np.exp([-likeness.expected(case) for case in cases])
    return {name: values * factor for name, values in parts.items()}


@functools.cache
def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def load_likeness(table: Mapping[str, Any], path: Path = LIKENESS_FILE) -> Likeness:
    """The shipped process; `table` is ``likeness`` of ``coefficients.toml``, with lengths and variances."""
    models, rows = load_models(), _rows(path)
    groups = [row for row in rows if row["of"] == "model"]
    points = np.array([coordinates(models[row["name"]]) for row in groups])
    return Likeness(
        table["lengths"],
        table["variances"],
        scaled(points, table["lengths"]),
        np.array([row["mode"] for row in groups]),
        np.array([row["harness"] for row in groups]),
        np.array([float(row["weight"]) for row in groups]),
        {(row["name"], row["mode"]): float(row["weight"]) for row in rows if row["of"] == "card"},
    )
