"""What the formula misses: learnt from alike work, silent about unlike work."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vivace.advising.catalogue import find_gpu
from vivace.advising.demand import load_models
from vivace.advising.formula import Setting, load_coefficients, predict_parts
from vivace.advising.likeness import Likeness, coordinates, load_likeness, mode_of, predict, scaled

RESNET, BERT = (load_models()[key] for key in ("torchvision:resnet50@224", "own:bert_large_squad"))
LENGTHS = {"flops": 0.3, "bytes": 1.0, "intensity": 1.0, "size": 3.0, "kernels": 2.0, "parameters": 2.0}
VARIANCES = {"alike": 0.5, "alike_mode": 0.25, "alike_harness": 0.125, "card": 0.25, "card_mode": 0.125}
CARD = find_gpu("RTX 3090")


def made(**changes):
    point = scaled(coordinates(RESNET)[None], LENGTHS)
    base = Likeness(
        LENGTHS, VARIANCES, point, np.array(["half"]), np.array(["timm"]), np.array([0.4]),
        {("RTX 3090", "half"): 0.8},
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("setting", "of_model"),
    [
        (Setting("amp_fp16", 64), 0.875),
        (Setting("amp_fp16", 64, harness="loop"), 0.75),
        (Setting("fp32", 64), 0.5),
        (Setting("amp_fp16", 64, channels_last=True), 0.5),
    ],
)
def test_the_same_model_counts_by_what_else_is_the_same(setting, of_model):
    of_card = 0.25 + (0.125 if mode_of((RESNET, CARD, setting)) == "half" else 0.0)
    assert made().expected((RESNET, CARD, setting)) == pytest.approx(0.4 * of_model + 0.8 * of_card)


def test_unlike_work_on_an_unknown_card_is_left_as_it_is():
    assert abs(made().expected((BERT, find_gpu("T4"), Setting("amp_fp16", 8)))) < 0.01


def test_the_factor_acts_on_every_part_of_a_step():
    theta, rest = load_coefficients()
    cases = [(RESNET, CARD, Setting("amp_fp16", 64)), (BERT, CARD, Setting("fp32", 8, 4))]
    plain, better = predict_parts(theta, cases), predict(theta, made(), cases)
    factor = np.exp([-made().expected(case) for case in cases])
    for name, values in plain.items():
        assert better[name] == pytest.approx(values * factor)
    assert predict(theta, None, cases)["seconds"] == pytest.approx(plain["seconds"])
    shipped = load_likeness(rest["likeness"])
    assert len(shipped.weights) > 500
    assert all(abs(shipped.expected(case)) < 1 for case in cases)


def test_fitting_finds_what_was_planted():
    """Residuals that belong to one kind of model come back for its like, and not for others."""
    pytest.importorskip("torch")
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import _likeness
    from _published import Row

    models = {key: demand for key, demand in load_models().items() if "resnet" in key or "vit_" in key}
    rows = [
        Row(key, key, demand, CARD, Setting("amp_fp16", 64), 1.0, False)
        for key, demand in models.items() if key.startswith("timm:")
    ]  # fmt: skip
    residual = np.array([0.3 if "vit_" in row.key else -0.2 for row in rows])
    left = [
        n
        for n, row in enumerate(rows)
        if row.key in ("timm:vit_base_patch16_224@224", "timm:gluon_resnet101_v1c@224")
    ]
    kept = [n for n in range(len(rows)) if n not in left]
    found, lines = _likeness.fit([rows[n] for n in kept], residual[kept])
    assert len(lines) == len(kept) + 1
    for place in left:
        assert found.expected(rows[place].case) == pytest.approx(residual[place], abs=0.12)
