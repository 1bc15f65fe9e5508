from __future__ import annotations

import dataclasses

import _fitting
import numpy as np
import pytest
import torch

from vivace.advising import demand as tables
from vivace.advising.catalogue import find_gpu
from vivace.advising.demand import Bin, Demand, load_models, save_models
from vivace.advising.formula import (
    ARCHITECTURES,
    PARAMETERS,
    Setting,
    load_coefficients,
    matrix_rate,
    predict_parts,
)
from vivace.advising.interval import CIRCUMSTANCES, FEW_ROWS, circumstances, factor
from vivace.advising.predict import Predictor
from vivace.errors import InputError

A100, H100, TURING = (find_gpu(name) for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "Quadro RTX 8000"))


def seconds(demand: Demand, gpu=A100, **setting) -> float:
    theta, _ = load_coefficients()
    return float(predict_parts(theta, [(demand, gpu, Setting(**setting))])["seconds"][0])


def test_coefficients_are_complete_positive_and_dated():
    theta, rest = load_coefficients()
    assert set(theta) == set(PARAMETERS)
    assert all((value > 0).all() for value in theta.values())
    assert set(rest["interval"]["widening"]) == set(CIRCUMSTANCES)
    assert sum(rest["evidence"]["cards"].values()) > 5000


def test_an_unknown_architecture_is_the_mean_of_the_fitted_ones():
    theta, rest = load_coefficients()
    rows = rest["evidence"]["architectures"]
    known = [rows.get(name, 0) >= FEW_ROWS and name != "other" for name in ARCHITECTURES]
    memory = theta["architecture_memory"]
    mean = np.exp(np.log(memory[known]).mean())
    assert memory[ARCHITECTURES.index("other")] == pytest.approx(mean, rel=1e-3)
    for line in theta["architecture_matrix"]:
        assert line.min() < line[ARCHITECTURES.index("other")] < line.max()


def test_the_fit_gives_an_architecture_without_rows_the_mean_of_the_others():
    """Of those with few rows each has its own, and no say in the mean."""
    logs = {"architecture_memory": torch.tensor([0.2, -0.4, 9.0, 9.0], requires_grad=True)}
    found = _fitting._averaged(logs, {"architecture_memory": torch.tensor([10.0, 500.0, 3.0, 0.0])})
    assert found["architecture_memory"].tolist() == pytest.approx([0.2, -0.4, 9.0, -0.1])
    found["architecture_memory"].sum().backward()
    assert logs["architecture_memory"].grad.tolist() == [1, 1, 1, 0]


def test_more_work_takes_longer_and_a_faster_card_less(resnet):
    assert seconds(resnet.demand, batch_size=64) < seconds(resnet.demand, batch_size=128)
    assert seconds(resnet.demand, H100, batch_size=256) < seconds(resnet.demand, A100, batch_size=256)
    assert seconds(resnet.demand, batch_size=64, precision="amp_fp16") < seconds(resnet.demand, batch_size=64)


def test_small_batches_are_bound_by_launches(resnet):
    one, two = (seconds(resnet.demand, batch_size=n) for n in (1, 2))
    assert two < 1.3 * one


def test_several_cards_cost_communication(resnet):
    theta, _ = load_coefficients()
    setting = Setting("amp_bf16", 64, 8)
    parts = predict_parts(
        theta, [(resnet.demand, A100, setting), (resnet.demand, find_gpu("RTX 4090"), setting)]
    )
    assert (parts["communication"] > 0).all()
    assert parts["communication"][1] > parts["communication"][0]


def test_a_card_without_matrix_units_for_a_type_falls_to_fp32():
    assert matrix_rate(TURING, Setting("tf32")) == matrix_rate(TURING, Setting("fp32"))
    assert matrix_rate(A100, Setting("tf32"))[1] == "tf32"


def test_resnet50_on_an_a100_is_near_what_was_published(resnet):
    """A100 PyTorch, channels first, AMP: 2,470 img/s of a channels-last run bounds it from above."""
    speed = 256 / seconds(resnet.demand, precision="amp_fp16", batch_size=256, harness="ngc")
    assert 900 < speed < 2600


def test_demands_survive_the_table(tmp_path):
    demand = Demand((Bin("conv", 3, 1.5e9, 2.25e6, 1e6), Bin("copy", 1, 0.0, 12.0)), 123, 4, 5e6)
    save_models({"a@1": demand, "b@1": demand}, tmp_path / "models.csv", ["made by a test"])
    found = load_models(tmp_path / "models.csv")
    assert found["a@1"] == demand
    assert found["b@1"] is found["a@1"]


def test_the_shipped_table_is_small_and_right():
    models = load_models()
    assert tables.MODELS_FILE.stat().st_size < 400_000
    assert models["torchvision:resnet50@224"].flops == pytest.approx(24.3e9, rel=0.01)
    assert models["torchvision:resnet50@224"].num_parameters == 25_557_032


def test_a_batch_that_does_not_fit_is_computed_again_or_cut(resnet):
    card = find_gpu("RTX 3080")
    fits = Predictor(dataclasses.replace(resnet, batch_size=16, activation_bytes=16 * 180e6), "fp32").one(
        card
    )
    tight = Predictor(dataclasses.replace(resnet, batch_size=64, activation_bytes=64 * 180e6), "fp32").one(
        card
    )
    large = Predictor(dataclasses.replace(resnet, batch_size=512, activation_bytes=512 * 180e6), "fp32").one(
        card
    )
    assert (fits.how, fits.slowdown) == ("", 1.0)
    assert tight.how == "recompute"
    assert 1.0 < tight.slowdown < 1.34
    assert "micro-batches" in large.how
    assert large.fits
    hopeless = Predictor(dataclasses.replace(resnet, optimizer_bytes=1e12), "fp32").one(card)
    assert (hopeless.fits, hopeless.limit) == (False, "memory")


def test_a_slow_input_pipeline_limits_fast_cards(resnet):
    slow = Predictor(dataclasses.replace(resnet, host_seconds_per_sample=0.01), "amp").one(H100)
    assert slow.limit == "host"
    assert slow.seconds == pytest.approx(0.64)


def test_what_was_measured_on_one_card_scales_the_others(resnet):
    plain = Predictor(resnet, "auto").one(H100).seconds
    measured = dataclasses.replace(resnet, step_seconds=2 * Predictor(resnet, "auto").one(A100).seconds)
    predictor = Predictor(measured, "auto")
    assert predictor.learn(A100) == pytest.approx(2.0)
    assert predictor.one(H100).seconds == pytest.approx(2 * plain)


def test_less_evidence_widens_the_interval(resnet):
    _, rest = load_coefficients()
    setting = Setting("amp_bf16", 64)
    known = circumstances(resnet.demand, A100, setting, 0.1, rest["evidence"])
    unknown = circumstances(resnet.demand, find_gpu("MI300X"), setting, 0.1, rest["evidence"], new_model=True)
    assert {"new_card", "new_architecture", "new_model"} <= unknown - known
    assert factor(unknown, rest["interval"]) > factor(known, rest["interval"]) > 1


def test_a_precision_that_there_is_not_is_named(resnet):
    with pytest.raises(InputError, match="no precision 'bf61'"):
        Predictor(resnet, "bf61")
