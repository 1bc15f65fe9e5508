from __future__ import annotations

import dataclasses

import _fitting
import numpy as np
import pytest

from vivace.advising import demand as tables
from vivace.advising.catalogue import find_gpu
from vivace.advising.demand import Bin, Demand, load_models, save_models
from vivace.advising.formula import (
    ARCHITECTURES,
    LAUNCH_SECONDS,
    PARAMETERS,
    Setting,
    link,
    load_coefficients,
    matrix_rate,
    predict_parts,
)
from vivace.advising.interval import CASES, CIRCUMSTANCES, FEW_ROWS, case_of, circumstances, factor, size_of
from vivace.advising.predict import Predictor
from vivace.advising.source import counted_model
from vivace.errors import InputError
from vivace.machine import CONTEXT_BYTES

A100, H100, TURING = (find_gpu(name) for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "Quadro RTX 8000"))


def seconds(demand: Demand, gpu=A100, **setting) -> float:
    theta, _ = load_coefficients()
    return float(predict_parts(theta, [(demand, gpu, Setting(**setting))])["seconds"][0])


def test_coefficients_are_complete_positive_and_dated():
    theta, rest = load_coefficients()
    assert set(theta) == set(PARAMETERS)
    assert all((value > 0).all() for value in theta.values())
    assert set(rest["interval"]["widening"]) == set(CIRCUMSTANCES)
    assert set(rest["interval"]["size"]) == set(rest["errors"]) == set(CASES)
    assert sum(rest["evidence"]["cards"].values()) > 5000


def test_an_unknown_architecture_is_the_mean_of_the_fitted_ones():
    theta, rest = load_coefficients()
    rows = rest["evidence"]["architectures"]
    known = [rows.get(name, 0) >= FEW_ROWS and name != "other" for name in ARCHITECTURES]
    memory = theta["architecture_memory"]
    mean = np.exp(np.log(memory[known]).mean())
    assert memory[ARCHITECTURES.index("other")] == pytest.approx(mean, rel=1e-3)
    matrix = theta["architecture_matrix"]
    assert matrix.min() < matrix[ARCHITECTURES.index("other")] < matrix.max()


def test_the_fit_gives_an_architecture_of_few_rows_the_mean_of_the_others():
    logs = np.concatenate([_fitting._start(name).ravel() for name in PARAMETERS])
    place = sum(
        _fitting._start(name).size
        for name in list(PARAMETERS)[: list(PARAMETERS).index("architecture_memory")]
    )
    logs[place : place + len(ARCHITECTURES)] = np.linspace(-0.4, 0.6, len(ARCHITECTURES))
    rows = np.full(len(ARCHITECTURES), 100)
    rows[0] = FEW_ROWS - 1
    found = np.log(_fitting._theta(logs, rows)["architecture_memory"])
    fitted = logs[place + 1 : place + len(ARCHITECTURES) - 1]
    assert found[1:-1] == pytest.approx(fitted)
    assert found[[0, -1]] == pytest.approx(fitted.mean())


def test_more_work_takes_longer_and_a_faster_card_less(resnet):
    assert seconds(resnet.demand, batch_size=64) < seconds(resnet.demand, batch_size=128)
    assert seconds(resnet.demand, H100, batch_size=256) < seconds(resnet.demand, A100, batch_size=256)
    assert seconds(resnet.demand, batch_size=64, precision="amp_fp16") < seconds(resnet.demand, batch_size=64)


def test_small_batches_are_bound_by_launches(resnet):
    one, two = (seconds(resnet.demand, batch_size=n) for n in (1, 2))
    assert two < 1.3 * one


def parts_of(demand, gpu, **setting):
    theta, _ = load_coefficients()
    return {
        name: float(v[0]) for name, v in predict_parts(theta, [(demand, gpu, Setting(**setting))]).items()
    }


def test_several_cards_cost_communication(resnet):
    fabric, bus = (
        parts_of(resnet.demand, gpu, precision="amp_bf16", batch_size=4, num_gpus=8)["communication"]
        for gpu in (A100, find_gpu("RTX 4090"))
    )
    assert bus > fabric > 0


@pytest.mark.parametrize(
    ("card", "num_gpus", "kind", "gbs"),
    [
        ("H100 NVL", 2, "fabric", 300.0),
        ("H100 NVL", 4, "bus", 48.0),
        ("H200 NVL", 4, "fabric", 450.0),
        ("H200 NVL", 8, "bus", 48.0),
        ("MI300A", 4, "fabric", 384.0),
        ("RTX 4060 Ti", 4, "consumer_bus", 12.0),  # eight lanes of PCIe 4
        ("RTX 4090", 4, "consumer_bus", 24.0),
    ],
)
def test_gradients_travel_by_what_connects_so_many_cards(card, num_gpus, kind, gbs):
    found, rate = link(find_gpu(card), num_gpus)
    assert found == kind
    assert rate / 1e9 == pytest.approx(gbs, rel=0.1)


def test_wide_networks_that_todays_timm_takes_for_a_narrow_one_are_counted_as_published():
    models = load_models()
    sizes = [models[f"timm:ig_resnext101_32x{width}d@224"].num_parameters for width in (8, 16, 32)]
    assert sizes == [88_791_336, 194_026_792, 468_530_472]
    assert models["torchvision:resnext101_32x8d@224"].num_parameters == sizes[0]


def test_an_all_reduce_hides_no_longer_than_the_backward_pass_lasts():
    """1e9 parameters and hardly any work: the ring's own time at the nominal link is what shows, and more."""
    heavy = Demand((Bin("matmul", 10, 1e9, 1e6),), 10**9, 10, 1e6)
    card = find_gpu("RTX 3090")
    parts = parts_of(heavy, card, precision="amp_fp16", batch_size=1, num_gpus=8)
    ring = 2 * 7 / 8 * 4e9 / link(card, 8)[1]
    assert parts["communication"] >= ring - parts["single"]
    theta, _ = load_coefficients()
    assert (np.minimum(theta["link_efficiency"], 1) * link(card, 8)[1] <= link(card, 8)[1]).all()


@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "H100 NVL", "B200-SXM-180GB", "MI300X"])
@pytest.mark.parametrize("key", ["own:bert_base_128", "torchvision:resnet50@224"])
def test_more_machines_are_never_slower_together(key, name):
    """Each card of a machine has an adapter: what one machine's network moves does not grow less."""
    model, card = counted_model(key, 64), find_gpu(name)
    speeds = [
        n / parts_of(model.demand, card, precision="amp_bf16", batch_size=64, num_gpus=n)["seconds"]
        for n in (8, 12, 16, 24, 32, 64)
    ]
    assert speeds == sorted(speeds)
    sizes = {"precision": "amp_bf16", "batch_size": 1, "num_gpus": 64}
    heavy = Demand((Bin("matmul", 10, 1e9, 1e6),), 10**9, 10, 1e6)
    moved = 2 * 63 / 64 * 4e9 / parts_of(heavy, find_gpu("B200-SXM-180GB"), **sizes)["communication"]
    assert 100e9 < moved < 200e9  # NVIDIA measured 192 GB/s over 8 x 200 Gb/s (NVIDIA/nccl issue 812)


@pytest.mark.parametrize("batch_size", [1, 8, 64, 512])
@pytest.mark.parametrize("name", ["RTX 3090", "A100-SXM4-80GB", "H100-SXM5-80GB", "MI300X"])
def test_no_number_of_cards_is_more_than_so_many_times_as_fast(resnet, name, batch_size):
    steps = [
        parts_of(resnet.demand, find_gpu(name), precision="amp_fp16", batch_size=batch_size, num_gpus=n)[
            "seconds"
        ]
        for n in (1, 2, 4, 8, 16, 64)
    ]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]  # latency alone takes its time


def test_what_a_launch_takes_the_host_is_an_input(resnet):
    def step(batch_size, microseconds):
        return seconds(
            resnet.demand,
            H100,
            precision="amp_bf16",
            batch_size=batch_size,
            launch_seconds=microseconds / 1e6,
        )

    assert step(1, 10) > 1.7 * step(1, 5)
    assert step(512, 10) == pytest.approx(step(512, 5), rel=0.05)
    assert step(1, 0) < 0.95 * step(1, 1)  # the device alone
    assert step(1, LAUNCH_SECONDS * 1e6) > seconds(resnet.demand, H100, precision="amp_bf16", batch_size=1)


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


def test_waiting_for_data_is_no_speed_of_the_card(resnet):
    """A step of three parts, of which two worked: a faster card shortens those, and the third stays."""
    work, faster = (Predictor(resnet, "profiled").one(card).seconds for card in (A100, H100))
    waited = dataclasses.replace(resnet, step_seconds=3 * work, waiting_seconds_per_sample=work / 64)
    predictor = Predictor(waited, "profiled")
    assert predictor.learn(A100) == pytest.approx(2.0)
    assert predictor.one(A100).seconds == pytest.approx(3 * work)
    there = predictor.one(H100)
    assert there.seconds == pytest.approx(2 * faster + work)
    assert there.low > work
    assert there.shares["host"] == pytest.approx(work / (2 * faster + work))
    most = dataclasses.replace(waited, waiting_seconds_per_sample=2.9 * work / 64)
    assert Predictor(most, "profiled").learn(A100) == 1.0  # what little worked says nothing of the card
    exchanged = dataclasses.replace(resnet, step_seconds=3 * work, communication_seconds=work)
    assert Predictor(exchanged, "profiled").learn(A100) == pytest.approx(2.0)


def test_workers_that_are_waited_for_are_the_least_step_of_all_cards_of_a_host(resnet):
    work = Predictor(resnet, "profiled").one(A100).seconds
    loaded = dataclasses.replace(
        resnet,
        step_seconds=work,
        waiting_seconds_per_sample=0.4 * work / 64,
        host_seconds_per_sample=work / 64,
        waits_for_workers=True,
    )
    predictor = Predictor(loaded, "profiled")
    predictor.learn(A100)
    alone, eight, sixteen = predictor.many([(H100, 1), (H100, 8), (H100, 16)])
    assert (alone.seconds, alone.limit) == (pytest.approx(work), "host")
    assert (
        eight.seconds == sixteen.seconds == pytest.approx(8 * work)
    )  # of sixteen, two hosts feed eight each
    assert predictor.one(find_gpu("T4")).seconds > 1.5 * work


def test_workers_that_fed_four_cards_at_once_feed_four_as_fast(resnet):
    work = Predictor(resnet, "profiled").one(A100).seconds
    loaded = dataclasses.replace(
        resnet,
        step_seconds=work,
        waiting_seconds_per_sample=0.6 * work / 64,
        host_seconds_per_sample=work / 64,
        waits_for_workers=True,
        batches_at_once=4.0,
    )
    predictor = Predictor(loaded, "profiled")
    predictor.learn(A100)
    one, four, eight = predictor.many([(H100, 1), (H100, 4), (H100, 8)])
    assert one.seconds == four.seconds == pytest.approx(work)
    assert eight.seconds == pytest.approx(2 * work)


def test_without_workers_each_card_loads_for_itself(resnet):
    loading = dataclasses.replace(resnet, host_seconds_per_sample=1e-3, waiting_seconds_per_sample=1e-3)
    bare, loaded = (Predictor(subject, "amp").one(H100, 8).seconds for subject in (resnet, loading))
    assert loaded == pytest.approx(bare + 64e-3)


def test_a_batch_in_pieces_is_updated_once(resnet):
    card = find_gpu("RTX 3080")
    found = Predictor(
        dataclasses.replace(resnet, batch_size=512, activation_bytes=512 * 180e6), "fp32", launch_seconds=0.0
    ).one(card)
    pieces = int(found.how.partition(" ")[0])
    piece, last = (
        parts_of(resnet.demand, card, batch_size=512 / pieces, updates=updates, launch_seconds=0.0)["single"]
        for updates in (False, True)
    )
    assert pieces > 1
    assert last > piece
    assert found.seconds == pytest.approx(pieces * piece + (last - piece))


def cut_on_four_slow_links(resnet, **changes):
    """A batch in micro-batches on cards whose gradients take their time."""
    subject = dataclasses.replace(resnet, batch_size=512, activation_bytes=512 * 180e6, **changes)
    predictor = Predictor(subject, "fp32", launch_seconds=0.0)
    predictor.learn(A100)
    return predictor.one(find_gpu("RTX 3080"), 4)


def test_what_gradients_take_is_a_share_of_all_pieces(resnet):
    found = cut_on_four_slow_links(resnet)
    pieces = int(found.how.partition(" ")[0])
    cut = {"batch_size": 512 / pieces, "num_gpus": 4, "launch_seconds": 0.0}
    talk = parts_of(resnet.demand, find_gpu("RTX 3080"), **cut)["communication"]
    assert pieces > 1
    assert talk < found.shares["communication"] * found.seconds < pieces * talk


@pytest.mark.parametrize("num_gpus", [1, 2, 8, 64])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_what_makes_a_job_fit_never_makes_it_faster(num_gpus, batch_size):
    """Each piece of a batch waits for the slowest of the cards, as the whole batch does."""
    model = counted_model("own:gpt3_xl", batch_size)
    found = [Predictor(model, "amp").one(card, num_gpus) for card in (A100, H100, find_gpu("MI300X"))]
    cut = [prediction.slowdown for prediction in found if prediction.how]
    assert cut or batch_size == 4
    assert min(cut, default=1.0) >= 1.0


def test_what_fitting_costs_is_told_on_the_scale_of_the_step(resnet):
    """A card on which the job ran at a third of its predicted speed: gradients travel as fast as before."""
    subject = dataclasses.replace(resnet, batch_size=512)
    slow = 3 * Predictor(subject, "profiled", launch_seconds=0.0).one(A100).seconds
    found = cut_on_four_slow_links(resnet, step_seconds=slow)
    whole = {"batch_size": 512, "num_gpus": 4, "launch_seconds": 0.0}
    parts = parts_of(resnet.demand, find_gpu("RTX 3080"), **whole)
    assert found.scaled == pytest.approx(3)
    assert found.slowdown == pytest.approx(found.seconds / (3 * parts["single"] + parts["communication"]))
    assert found.slowdown > 1


def test_what_was_measured_on_one_card_scales_the_others(resnet):
    """In the profile's own precision, whatever is predicted."""
    plain = Predictor(resnet, "auto").one(H100).seconds
    measured = dataclasses.replace(resnet, step_seconds=2 * Predictor(resnet, "profiled").one(A100).seconds)
    predictor = Predictor(measured, "auto")
    assert predictor.learn(A100) == pytest.approx(2.0)
    assert predictor.one(H100).seconds == pytest.approx(2 * plain)


def test_less_evidence_widens_the_interval(resnet):
    _, rest = load_coefficients()
    found = circumstances(resnet.demand, Setting("amp_bf16", 64), 0.1, rest["evidence"])
    cases = [
        case_of(find_gpu(name), rest["evidence"], new_model=new)
        for name, new in (("A100", False), ("A100", True), ("A30", False), ("A30", True), ("MI300X", False))
    ]
    assert cases == list(CASES)
    widths = [factor(case, found, rest["interval"]) for case in cases]
    known, new_model, new_card, both, new_architecture = widths
    assert 1 < known < new_model < both
    assert new_card < new_architecture  # by the figures a new card is as near as a known one
    assert factor("new card", found | {"unseen_kind"}, rest["interval"]) > widths[2]


def test_a_job_of_ones_own_is_no_surer_on_an_architecture_that_nobody_published(resnet):
    own = dataclasses.replace(resnet, name="job.py:job", batch_size=512)
    widths = [
        found.high / found.seconds
        for found in Predictor(own, "amp").many([(find_gpu(name), 1) for name in ("A100", "H200", "B200")])
    ]
    assert widths == sorted(widths)
    table = load_coefficients()[1]["interval"]
    sizes = table["size"]
    for case in CASES:
        assert size_of(case, sizes, new_model=False) == sizes[case]
    level = {**sizes, "new architecture": sizes["new card"]}
    both = size_of("new architecture", level, new_model=True)
    assert both == pytest.approx(sizes["new card and model"])
    assert size_of("new architecture", sizes, new_model=True) > both
    usual, off = np.zeros((1, len(CIRCUMSTANCES))), np.array([sizes["new architecture"] + 0.01])
    assert [
        bool(_fitting.covered(table, "new architecture", usual, off, new_model=new)[0])
        for new in (False, True)
    ] == [False, True]


def test_recurrent_layers_are_in_nearly_no_figure():
    _, rest = load_coefficients()
    lstm = Demand((Bin("recurrent", 4, 1e9, 1e6), Bin("elementwise", 9, 0.0, 1e4)), 10**6, 8, 1e5)
    usual = Demand((Bin("matmul", 4, 1e9, 1e6), Bin("elementwise", 9, 0.0, 1e4)), 10**6, 8, 1e5)
    found = [
        "unseen_kind" in circumstances(demand, Setting(), 0.1, rest["evidence"]) for demand in (lstm, usual)
    ]
    assert found == [True, False]


def test_a_precision_that_there_is_not_is_named(resnet):
    with pytest.raises(InputError, match="no precision 'bf61'"):
        Predictor(resnet, "bf61")


@pytest.mark.parametrize("model", ["torchvision:vgg16@224", "own:bert_large_squad"])
def test_strict_fp32_of_a_card_with_tf32_is_no_faster_than_its_rate(model):
    subject = counted_model(model, batch_size=256)
    found = Predictor(subject, "fp32").one(A100)
    assert found.samples_per_second * subject.demand.flops < A100.rates["fp32"]


def test_strict_fp32_of_a_card_with_tf32_is_as_doubtful_as_the_one_measurement(resnet):
    h200 = find_gpu("H200")
    strict, tf32 = (
        Predictor(dataclasses.replace(resnet, batch_size=256), precision).one(h200)
        for precision in ("fp32", "tf32")
    )
    measured = 909  # images a second, records/gpu
    assert 256 / strict.high < measured < 256 / strict.low
    assert "fp32_beside_tf32" in strict.doubts
    assert strict.high / strict.seconds > tf32.high / tf32.seconds


def test_a_batch_fits_in_the_faster_way_and_with_batch_norm_in_the_exact_one(resnet):
    subject = counted_model("timm:vit_base_patch16_224@224", batch_size=256)
    card = find_gpu("RTX 3080")
    found = Predictor(subject, "amp").one(card)
    assert found.how.endswith("micro-batches")
    assert found.slowdown < 1.1
    with_norm = Predictor(dataclasses.replace(resnet, batch_size=512, activation_bytes=3e10), "amp").one(card)
    assert with_norm.how == "recompute"


@pytest.mark.parametrize(
    ("asked", "precision", "each"), [("auto", "bf16", 8), ("amp", "amp_bf16", 18), ("fp32", "fp32", 16)]
)
def test_weights_in_bf16_take_two_bytes_and_so_do_gradients(asked, precision, each):
    """7 billion parameters with AdamW, whose state is in bf16 as well."""
    number = 7 * 10**9
    model = counted_model("own:gpt3_xl", 1)
    subject = dataclasses.replace(
        model, precision="bf16", optimizer_bytes=4.0 * number, activation_bytes=1.0,
        demand=dataclasses.replace(model.demand, num_parameters=number),
    )  # fmt: skip
    found = Predictor(subject, asked).one(H100)
    assert found.precision == precision
    assert found.needed_bytes - CONTEXT_BYTES == pytest.approx(each * number, rel=0.01)
    assert found.fits is (precision == "bf16")
