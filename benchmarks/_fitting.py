"""Fits the predictor's parameters to published rows, and measures its errors on rows that the fit has not
seen."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from _published import Row

from vivace.advising.formula import (
    ARCHITECTURES,
    PARAMETERS,
    architecture,
    make_columns,
    predict_parts,
    step_parts,
)
from vivace.advising.interval import CASES, CIRCUMSTANCES, FEW_ROWS, circumstances, kinds_of, size_of

FIRST_ITERATIONS, ITERATIONS, PRIOR, ROUNDING = 40, 3, 3e-4, 0.03
# Where a kind of kernel is known to be far from the others, the fit starts there.
STARTS = {
    "matrix_efficiency": {"grouped": 0.2, "irregular": 0.2, "depthwise": 0.2},
    "channels_last": {"irregular": 0.2},
}
UNSEEN_WIDENING = 1.5  # a guess: no measurement holds such a kind of kernel
MOST_OF_A_KIND = 80  # rows of one card, harness and layout in the fit of a fold
CROWDED = 0.3  # power of the number of similar rows by which each of them counts less
FAMILY_FOLDS, CARD_FOLDS, CARDS_ALONE, ROW_FOLDS = 6, 4, 12, 4


def fit(
    rows: Sequence[Row], iterations: int = ITERATIONS, begin: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Parameters that fit the rows: least absolute log errors, held near their physical start where rows are
    few. An architecture that nearly no row holds is the mean of the others. `begin` is where the search
    begins, which saves iterations."""
    from scipy.optimize import least_squares

    columns = make_columns([row.case for row in rows])
    target = _measured(rows)
    sizes = Counter((row.gpu.name, row.setting.harness, row.setting.num_gpus > 1) for row in rows)
    weight = np.array(
        [sizes[row.gpu.name, row.setting.harness, row.setting.num_gpus > 1] ** -CROWDED for row in rows]
    )
    weight *= len(rows) / weight.sum()
    start = np.concatenate([_start(name).ravel() for name in PARAMETERS])
    strength = np.concatenate([np.full(_start(name).size, PARAMETERS[name][2]) for name in PARAMETERS])
    hold = np.sqrt(2 * ROUNDING * len(rows) * PRIOR * strength)
    held_by = np.bincount(columns["architecture"], minlength=len(ARCHITECTURES))

    def wrong(logs: np.ndarray) -> np.ndarray:
        error = np.log(step_parts(_theta(logs, held_by), columns)["seconds"]) - target
        return np.concatenate([weight * error, hold * (logs - start)])

    def loss(squares: np.ndarray) -> np.ndarray:
        """Nearly absolute for rows, square for what holds a parameter."""
        found = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
        root = np.sqrt(1 + squares[: len(rows)])
        found[:, : len(rows)] = 2 * (root - 1), 1 / root, -0.5 / root**3
        return found

    first = start if begin is None else np.concatenate([np.log(begin[name]).ravel() for name in PARAMETERS])
    solved = least_squares(wrong, first, loss=loss, f_scale=ROUNDING, max_nfev=iterations)
    return _theta(solved.x, held_by)


def _theta(logs: np.ndarray, held_by: np.ndarray) -> dict[str, np.ndarray]:
    """Parameters by name; an architecture with fewer than `FEW_ROWS` rows has the mean of the others."""
    found, place = {}, 0
    known = held_by >= FEW_ROWS
    known[ARCHITECTURES.index("other")] = False
    for name in PARAMETERS:
        shape = _start(name).shape
        values = logs[place : place + math.prod(shape)].reshape(shape)
        place += math.prod(shape)
        if name.startswith("architecture"):
            values = np.where(known, values, values[known].mean())
        found[name] = np.exp(values)
    return found


def _start(name: str) -> np.ndarray:
    labels, value, _ = PARAMETERS[name]
    start = np.full([len(names) for names in labels], math.log(value))
    for kind, other in STARTS.get(name, {}).items():
        start[..., labels[-1].index(kind)] = math.log(other)
    return start


def errors(theta: dict[str, np.ndarray], rows: Sequence[Row]) -> np.ndarray:
    """Logarithm of predicted over measured seconds."""
    return np.log(predict_parts(theta, [row.case for row in rows])["seconds"]) - _measured(rows)


def absolute(error: np.ndarray) -> np.ndarray:
    """Relative error of the predicted throughput."""
    return np.abs(np.exp(-error) - 1)


def _measured(rows: Sequence[Row]) -> np.ndarray:
    return np.log([row.seconds for row in rows])


def simple_errors(train: Sequence[Row], test: Sequence[Row]) -> dict[str, np.ndarray]:
    """Errors of the predictors that people use: roofline, bandwidth only, TFLOPS only, each scaled to the
    rows seen."""
    found = {}
    for name in ("roofline", "bandwidth only", "TFLOPS only"):
        seen, asked = (_simple(name, rows) for rows in (train, test))
        found[name] = asked - _measured(test) + np.median(_measured(train) - seen)
    return found


def _simple(name: str, rows: Sequence[Row]) -> np.ndarray:
    columns = make_columns([row.case for row in rows])
    of, number = columns["case"], len(rows)
    flops = np.bincount(of, columns["flops_step"], number) / columns["rate"]
    moved = np.bincount(of, columns["bytes_step"], number) / columns["bandwidth"]
    return np.log(
        {"roofline": np.maximum(flops, moved), "bandwidth only": moved, "TFLOPS only": flops}[name] + 1e-9
    )


def folds(names: Iterable[str], number: int) -> dict[str, int]:
    """Names to folds of about equal numbers of rows, the largest first."""
    filled, found = [0] * number, {}
    for name, size in sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])):
        found[name] = filled.index(min(filled))
        filled[found[name]] += size
    return found


def thin(rows: Sequence[Row]) -> list[Row]:
    """At most `MOST_OF_A_KIND` rows of a card, harness and layout, evenly taken."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.gpu.name, row.setting.harness, row.setting.channels_last), []).append(row)
    kept: list[Row] = []
    for group in kinds.values():
        every = max(len(group) / MOST_OF_A_KIND, 1.0)
        kept += [group[int(place * every)] for place in range(int(len(group) / every))]
    return kept


Left = Callable[[Row], bool]


def held_out(
    rows: Sequence[Row], whole: dict[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """By case, errors on rows whose kind was left out of the fit, and those of the simple predictors. NaN
    where a row was not predicted. `whole` are the parameters of all rows, from which each fit begins."""
    families = folds([row.family for row in rows], FAMILY_FOLDS)
    kin = sorted({(architecture(row.gpu), row.gpu.name) for row in rows})  # neighbours in different folds
    cards = {name: number % CARDS_ALONE for number, (_, name) in enumerate(kin)}
    card_groups = folds([row.gpu.name for row in rows], CARD_FOLDS)
    splits: dict[str, list[tuple[Left, Left]]] = {
        "known card and model": [(_pair(f), _pair(f)) for f in range(ROW_FOLDS)],
        "new model": [
            (left, left) for f in range(FAMILY_FOLDS) for left in [lambda r, f=f: families[r.family] == f]
        ],
        "new card": [
            (left, left) for c in range(CARDS_ALONE) for left in [lambda r, c=c: cards[r.gpu.name] == c]
        ],
        "new card and model": [
            (
                lambda r, f=f, c=c: families[r.family] % 3 == f or card_groups[r.gpu.name] == c,
                lambda r, f=f, c=c: families[r.family] % 3 == f and card_groups[r.gpu.name] == c,
            )
            for f in range(3)
            for c in range(CARD_FOLDS)
        ],
        "new architecture": [
            (left, left)
            for a in sorted({name for name, _ in kin})
            for left in [lambda r, a=a: architecture(r.gpu) == a]
        ],
    }
    found = {}
    for name in CASES:
        begin = time.perf_counter()
        error, simple = np.full(len(rows), np.nan), {}
        for absent, asked in splits[name]:
            train = thin([row for row in rows if not absent(row)])
            # Of a harness that only these cards were measured in nothing is known: that is another question.
            harnesses = {row.setting.harness for row in train}
            chosen = np.array([asked(row) and row.setting.harness in harnesses for row in rows])
            test = [row for row, wanted in zip(rows, chosen, strict=True) if wanted]
            if not test:
                continue
            error[chosen] = errors(fit(train, begin=whole), test)
            for other, values in simple_errors(train, test).items():
                simple.setdefault(other, np.full(len(rows), np.nan))[chosen] = values
        found[name] = error, simple
        print(f"{name}: {len(splits[name])} fits, {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def _pair(fold: int) -> Left:
    """Is a row's pair of card and model of a fold? Both stay known by their other pairs."""
    return lambda row: zlib.crc32(f"{row.gpu.name} {row.key}".encode()) % ROW_FOLDS == fold


def evidence(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows by card, architecture and kind of kernel, and the models' names."""
    return {
        "cards": dict(sorted(Counter(row.gpu.name for row in rows).items())),
        "architectures": dict(sorted(Counter(architecture(row.gpu) for row in rows).items())),
        "kinds": dict(sorted(Counter(kind for row in rows for kind in kinds_of(row.demand)).items())),
        "models": sorted({row.key for row in rows if row.setting.harness != "forward"}),
    }


def situations(theta: dict[str, np.ndarray], rows: Sequence[Row], seen: dict[str, Any]) -> np.ndarray:
    """One row a figure, one column a circumstance."""
    parts = predict_parts(theta, [row.case for row in rows])
    share = parts["host"] / parts["device"]
    found = [
        circumstances(row.demand, row.setting, float(share[n]), seen, guessed_batch=row.guessed_batch)
        for n, row in enumerate(rows)
    ]
    return np.array([[float(name in names) for name in CIRCUMSTANCES] for names in found])


def calibrate(
    situation: np.ndarray, error: dict[str, np.ndarray], rows: Sequence[Row]
) -> dict[str, dict[str, float]]:
    """Interval table: errors by circumstance over all cases (median regression), then in each case the size
    that holds 80 % of them, a card's figures counted by the root of their number."""
    import torch

    crowd = Counter(row.gpu.name for row in rows)
    weight = np.array([crowd[row.gpu.name] ** -0.5 for row in rows])
    known = {case: ~np.isnan(values) for case, values in error.items()}
    size = torch.tensor(np.concatenate([np.log(np.abs(error[case][known[case]]) + 0.01) for case in CASES]))
    features = torch.tensor(np.concatenate([situation[known[case]] for case in CASES]))
    by_row = torch.tensor(np.concatenate([weight[known[case]] for case in CASES]))
    case_of = torch.tensor(np.concatenate([np.full(known[case].sum(), n) for n, case in enumerate(CASES)]))
    slopes = torch.zeros(len(CIRCUMSTANCES), dtype=torch.float64, requires_grad=True)
    base = torch.full([len(CASES)], math.log(0.08), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([slopes, base], lr=0.03)
    for _ in range(200):
        optimizer.zero_grad()
        wrong = (size - base[case_of] - features @ slopes).abs()
        loss = (by_row * wrong).sum() / by_row.sum() + 1e-3 * slopes.square().sum()
        loss.backward()
        optimizer.step()
    widening = np.exp(np.clip(slopes.detach().numpy(), -0.7, 1.5))
    widening[CIRCUMSTANCES.index("unseen_kind")] = UNSEEN_WIDENING
    sizes = {}
    for case in CASES:
        spread = np.exp(situation[known[case]] @ np.log(widening))
        sizes[case] = round(_quantile(np.abs(error[case][known[case]]) / spread, weight[known[case]], 0.8), 4)
    named = zip(CIRCUMSTANCES, widening, strict=True)
    return {"size": sizes, "widening": {name: round(float(value), 3) for name, value in named}}


def _quantile(values: np.ndarray, weight: np.ndarray, share: float) -> float:
    """The value below which a share of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][np.searchsorted(total, share)])


def covered(
    table: dict[str, dict[str, float]],
    case: str,
    situation: np.ndarray,
    error: np.ndarray,
    *,
    new_model: bool = False,
) -> np.ndarray:
    """Which errors an interval of the table would have held; no interval is wider than
    `interval.factor`'s."""
    widening = np.log([table["widening"][name] for name in CIRCUMSTANCES])
    size = size_of(case, table["size"], new_model=new_model)
    return np.abs(error) <= np.minimum(size * np.exp(situation @ widening), 2.0)
