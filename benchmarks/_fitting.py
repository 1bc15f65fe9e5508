"""Fits the predictor's parameters to published rows, and measures its errors on rows that the fit has not
seen."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING


import numpy as np
from _published import Row

from vivace.advising.formula import (
    ARCHITECTURES,
    MODES,
    PARAMETERS,
    STARTS,
    architecture,
    make_columns,
    predict_parts,
    step_parts,
)
from vivace.advising.interval import CIRCUMSTANCES, FEW_ROWS, UNSEEN_WIDENING, circumstances, kinds_of


if TYPE_CHECKING:
    import torch

STEPS, LEARNING_RATE, PRIOR, ROUNDING = 300, 0.08, 3e-4, 0.03
MOST_OF_A_KIND = 300  # rows of one card, harness and layout in the fit of a fold
CROWDED = 0.3  # power of the number of similar rows by which each of them counts less
FAMILY_FOLDS, CARD_FOLDS, CARDS_ALONE = 8, 4, 12
NEVER_NARROWER = ("new_card", "new_architecture", "new_model")
NEW_ARCHITECTURE = "new architecture"


def fit(rows: Sequence[Row], steps: int = STEPS) -> dict[str, np.ndarray]:
    """Parameters that fit the rows: least absolute log errors, held near their physical start where rows are
    few. An architecture that no row holds is the mean of the others."""
    import torch

    columns = {
        name: torch.as_tensor(value) for name, value in make_columns([row.case for row in rows]).items()
    }
    columns = {name: v.float() if v.is_floating_point() else v for name, v in columns.items()}
    target = torch.tensor([math.log(row.seconds) for row in rows])
    sizes = Counter((row.gpu.name, row.setting.harness, row.setting.num_gpus > 1) for row in rows)
    weight = torch.tensor(
        [sizes[row.gpu.name, row.setting.harness, row.setting.num_gpus > 1] ** -CROWDED for row in rows]
    )
    start = {name: _start(name) for name in PARAMETERS}
    held_by = _rows_by_architecture(columns)
    logs = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(list(logs.values()), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.15
    )
    for _ in range(steps):
        theta = {name: value.exp() for name, value in _averaged(logs, held_by).items()}
        parts = step_parts(theta, columns, torch, _sum_by)
        error = parts["seconds"].log() - target
        loss = (weight * (error.square() + ROUNDING**2).sqrt()).sum() / weight.sum()
        held = sum(PARAMETERS[name][2] * (logs[name] - start[name]).square().sum() for name in logs)
        optimizer.zero_grad()
        (loss + PRIOR * held).backward()
        optimizer.step()
        schedule.step()
    return {name: v.detach().exp().double().numpy() for name, v in _averaged(logs, held_by).items()}


def _rows_by_architecture(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For each parameter of an architecture, the number of rows that speak for it."""
    import torch

    rows = torch.zeros(len(MODES), len(ARCHITECTURES))
    rows.index_put_((columns["mode"], columns["architecture"]), torch.ones(()), accumulate=True)
    rows[:, ARCHITECTURES.index("other")] = 0
    return {"architecture_matrix": rows.sum(0), "architecture_memory": rows.sum(0)}


def _averaged(logs: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`logs`, where an architecture without a row has the mean of those with at least `FEW_ROWS`."""
    found = dict(logs)
    for name, number in rows.items():
        fitted = (number >= FEW_ROWS).float()
        mean = (logs[name].detach() * fitted).sum(-1, keepdim=True) / fitted.sum(-1, keepdim=True).clamp(
            min=1
        )
        found[name] = logs[name].where(number > 0, mean)
    return found


def _start(name: str) -> torch.Tensor:
    import torch

    labels, value, _ = PARAMETERS[name]
    start = torch.full([len(names) for names in labels], math.log(value))
    for kind, other in STARTS.get(name, {}).items():
        start[..., labels[-1].index(kind)] = math.log(other)
    return start


def _sum_by(values: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    import torch

    return torch.zeros(count).index_add(0, numbers, values.float())


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
    flops = np.bincount(of, columns["flops"], number) * columns["batch"] / columns["rate"]
    moved = (
        np.bincount(of, columns["bytes"], number) * columns["batch"] * columns["width"] / columns["bandwidth"]
    )
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


def held_out(rows: Sequence[Row]) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Errors on rows whose model family, whose card, both, or whose architecture were left out; and those of
    the simple predictors. NaN where a row was not predicted."""
    families = folds([row.family for row in rows], FAMILY_FOLDS)
    kin = sorted({(architecture(row.gpu), row.gpu.name) for row in rows})  # neighbours in different folds
    cards = {name: number % CARDS_ALONE for number, (_, name) in enumerate(kin)}
    card_groups = folds([row.gpu.name for row in rows], CARD_FOLDS)
    splits: dict[str, list[tuple[Left | None, Left | None]]] = {
        "known card, new model": [
            (lambda r, f=f: families[r.family] == f, None) for f in range(FAMILY_FOLDS)
        ],
        "new card, known model": [(None, lambda r, c=c: cards[r.gpu.name] == c) for c in range(CARDS_ALONE)],
        "both new": [
            (lambda r, f=f: families[r.family] % 3 == f, lambda r, c=c: card_groups[r.gpu.name] == c)
            for f in range(3)
            for c in range(CARD_FOLDS)
        ],
        NEW_ARCHITECTURE: [
            (None, lambda r, a=a: architecture(r.gpu) == a) for a in sorted({name for name, _ in kin})
        ],
    }
    found = {}
    for name, parts in splits.items():
        begin = time.perf_counter()
        error, simple = np.full(len(rows), np.nan), {}
        for by_model, by_card in parts:
            train = [r for r in rows if not (by_model and by_model(r)) and not (by_card and by_card(r))]
            train = thin(train) if by_card else train
            # Of a harness that only these cards were measured in nothing is known: that is another question.
            harnesses = {row.setting.harness for row in train} if name == NEW_ARCHITECTURE else None
            chosen = [
                (by_model is None or by_model(row))
                and (by_card is None or by_card(row))
                and (harnesses is None or row.setting.harness in harnesses)
                for row in rows
            ]
            test = [row for row, wanted in zip(rows, chosen, strict=True) if wanted]
            if not test:
                continue
            theta = fit(train)
            likeness, _ = _likeness.fit(train, errors(theta, train))
            error[chosen] = errors(theta, test, likeness)
            for other, values in simple_errors(train, test).items():
                simple.setdefault(other, np.full(len(rows), np.nan))[chosen] = values
        found[name] = error, simple
        print(f"{name}: {len(parts)} fits, {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def evidence(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Rows by card, architecture and model family."""
    return {
        "cards": dict(sorted(Counter(row.gpu.name for row in rows).items())),
        "architectures": dict(sorted(Counter(architecture(row.gpu) for row in rows).items())),
        "kinds": dict(sorted(Counter(kind for row in rows for kind in kinds_of(row.demand)).items())),
        "families": dict(sorted(Counter(row.family for row in rows).items())),
    }


def situations(
    theta: dict[str, np.ndarray], rows: Sequence[Row], seen: dict[str, dict[str, int]], **known: bool
) -> np.ndarray:
    """One row a case, one column a circumstance."""
    parts = predict_parts(theta, [row.case for row in rows])
    share = parts["host"] / parts["device"]
    found = [
        circumstances(
            row.demand, row.gpu, row.setting, float(share[n]), seen, guessed_batch=row.guessed_batch, **known
        )
        for n, row in enumerate(rows)
    ]  # fmt: skip
    return np.array([[float(name in names) for name in CIRCUMSTANCES] for names in found])


def renewed(situation: np.ndarray, new: Sequence[str]) -> np.ndarray:
    """The circumstances of rows that were left out: `new` holds, and nothing else of the kind; an
    architecture of few figures stays new."""
    found = situation.copy()
    for name in ("new_card", "new_model"):
        found[:, CIRCUMSTANCES.index(name)] = name in new
    if "new_architecture" in new:
        found[:, CIRCUMSTANCES.index("new_architecture")] = 1
    return found


def calibrate(situation: np.ndarray, error: np.ndarray) -> dict[str, object]:
    """Interval table: the size of errors by circumstance (median regression), scaled to hold 80 % of them."""
    import torch

    size = torch.tensor(np.log(np.abs(error) + 0.01))
    features = torch.tensor(situation)
    slopes = torch.zeros(len(CIRCUMSTANCES), dtype=torch.float64, requires_grad=True)
    base = torch.tensor(math.log(0.08), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([slopes, base], lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (size - base - features @ slopes).abs().mean() + 1e-3 * slopes.square().sum()
        loss.backward()
        optimizer.step()
    widening = np.exp(np.clip(slopes.detach().numpy(), -0.7, 1.5))
    for name in NEVER_NARROWER:
        widening[CIRCUMSTANCES.index(name)] = max(widening[CIRCUMSTANCES.index(name)], 1.0)
    widening[CIRCUMSTANCES.index("unseen_kind")] = UNSEEN_WIDENING
    spread = math.exp(base.item()) * np.exp(situation @ np.log(widening))
    return {
        "quantile": round(float(np.quantile(np.abs(error) / spread, 0.8)), 3),
        "base": round(math.exp(base.item()), 4),
        "widening": {
            name: round(float(value), 3) for name, value in zip(CIRCUMSTANCES, widening, strict=True)
        },
    }


def covered(table: dict[str, object], situation: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Which errors an interval of the table would have held."""
    widening = np.log([table["widening"][name] for name in CIRCUMSTANCES])  # type: ignore[index]
    return np.abs(error) <= table["quantile"] * table["base"] * np.exp(situation @ widening)  # type: ignore[operator]
