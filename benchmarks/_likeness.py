"""Fits `vivace.advising.likeness`: lengths and amplitudes by marginal likelihood, weights by the posterior.

Beside what is shipped, the process explains what belongs to one model, one harness or one number of cards,
so that these do not pass for likeness. Figures that differ only in their software's age count as one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _published import Row

from vivace.advising.formula import architecture
from vivace.advising.likeness import COLUMNS, TERMS, WIDTHS, Likeness, coordinates, mode_of, scaled

if TYPE_CHECKING:
    import torch

SHARED = {
    "alike": ("alike",), "alike_mode": ("alike", "mode"), "alike_harness": ("alike", "mode", "harness"),
    "card": ("card",), "card_mode": ("card", "mode"),
}  # fmt: skip
APART = {
    "model": ("model",), "model_harness": ("model", "mode", "harness"),
    "model_card": ("model", "harness", "card"),
    "model_number": ("model", "harness", "number"), "card_harness": ("card", "mode", "harness"),
    "card_number": ("card", "mode", "harness", "number"), "architecture": ("architecture", "mode"),
    "harness": ("harness", "mode"), "number": ("harness", "number"),
}  # fmt: skip
LENGTHS = dict(zip(WIDTHS, (0.3, 1.0, 1.0, 3.0, 2.0, 2.0), strict=True))
AMPLITUDE, NOISE = 0.06, 0.1
CLIPPED = 0.6  # a larger residual is a misread figure more often than a lesson
SAMPLE, STEPS, RATE, HELD = 600, 15, 0.2, 1e-3


class Figures:
    """Rows grouped by what the process can tell apart, with the median residual of each group."""

    def __init__(self, rows: Sequence[Row], residual: np.ndarray) -> None:
        groups: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(rows):
            labels = (
                row.key, row.gpu.name, row.setting.harness, mode_of(row.case), str(row.setting.num_gpus)
            )  # fmt: skip
            groups.setdefault(labels, []).append(place)
        names = ("model", "card", "harness", "mode", "number")
        self.labels = {name: np.array([g[n] for g in groups]) for n, name in enumerate(names)}
        first = [rows[places[0]] for places in groups.values()]
        self.labels["architecture"] = np.array([architecture(row.gpu) for row in first])
        self.points = np.array([coordinates(row.demand) for row in first])
        clipped = np.clip(residual, -CLIPPED, CLIPPED)
        self.residual = np.array([np.median(clipped[places]) for places in groups.values()])

    def covariance(self, logs: dict[str, Any], chosen: np.ndarray) -> torch.Tensor:
        """Covariance of the chosen groups, noise on its diagonal."""
        import torch

        lengths = [logs[f"length {name}"].exp().expand(width) for name, width in WIDTHS.items()]
        points = torch.tensor(self.points[chosen]) / torch.cat(lengths)
        squares = points.square().sum(1)
        apart = (squares[:, None] + squares - 2 * points @ points.T).clamp_min(0)
        factors: dict[str, torch.Tensor] = {"alike": (-0.5 * apart).exp()}
        for name, labels in self.labels.items():
            number = np.unique(labels[chosen], return_inverse=True)[1]
            factors[name] = torch.tensor(number[:, None] == number).double()
        total = (2 * logs["noise"]).exp() * torch.eye(len(chosen), dtype=torch.float64)
        for term, names in (SHARED | APART).items():
            total = total + (2 * logs[term]).exp() * math.prod(factors[name] for name in names)
        return total


def fit(rows: Sequence[Row], residual: np.ndarray) -> tuple[Likeness, list[tuple[str, ...]]]:
    """The process that explains residuals of rows, and its lines for the shipped table."""
    import torch

    figures = Figures(rows, residual)
    logs = _maximised(figures)
    with torch.no_grad():
        root = torch.linalg.cholesky(figures.covariance(logs, np.arange(len(figures.residual))))
        weights = torch.cholesky_solve(torch.tensor(figures.residual)[:, None], root)[:, 0].numpy()
    lengths = {name: float(f"{logs[f'length {name}'].exp():.4g}") for name in WIDTHS}
    variances = {name: float(f"{(2 * logs[name]).exp():.4g}") for name in TERMS}
    label = figures.labels
    models: dict[tuple[str, ...], list[int]] = {}
    cards: dict[tuple[str, str], float] = {}
    for place, weight in enumerate(weights):
        model, mode, harness, card = (str(label[n][place]) for n in ("model", "mode", "harness", "card"))
        models.setdefault((model, mode, harness), []).append(place)
        cards[card, mode] = cards.get((card, mode), 0.0) + float(weight)
    summed = {key: float(weights[places].sum()) for key, places in models.items()}
    lines = [("model", *key, f"{weight:.4g}") for key, weight in sorted(summed.items())]
    lines += [("card", *key, "", f"{weight:.4g}") for key, weight in sorted(cards.items())]
    points = figures.points[[places[0] for places in models.values()]]
    modes, harnesses = (np.array([key[n] for key in models]) for n in (1, 2))
    found = Likeness(
        lengths, variances, scaled(points, lengths), modes, harnesses, np.array(list(summed.values())), cards
    )
    return found, lines


def _maximised(figures: Figures) -> dict[str, torch.Tensor]:
    """Logarithms of lengths, amplitudes and noise of the largest marginal likelihood."""
    import torch

    start = {f"length {name}": math.log(value) for name, value in LENGTHS.items()}
    start |= dict.fromkeys(SHARED | APART, math.log(AMPLITUDE)) | {"noise": math.log(NOISE)}
    logs = {name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in start.items()}
    optimizer = torch.optim.Adam(list(logs.values()), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        chosen = random.permutation(len(figures.residual))[:SAMPLE]
        residual = torch.tensor(figures.residual[chosen])
        root = torch.linalg.cholesky(figures.covariance(logs, chosen))
        solved = torch.cholesky_solve(residual[:, None], root)[:, 0]
        loss = (0.5 * residual @ solved + root.diagonal().log().sum()) / len(chosen)
        held = sum((logs[name] - value).square() for name, value in start.items())
        optimizer.zero_grad()
        (loss + HELD * held).backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in logs.items()}


def write(lines: Sequence[tuple[str, ...]], path: Path) -> None:
    """The shipped table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("# Fitted by scripts/bench advise --fit; vivace.advising.likeness says what it is.\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)
