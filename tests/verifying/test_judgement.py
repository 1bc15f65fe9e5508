"""Figures that are not finite: never kept, and said so in words that fit."""

import math

import pytest
import torch

from vivace.pages.sameness import plain
from vivace.verifying import displacement
from vivace.verifying.displacement import (
    Outcome,
    State,
    different_states,
    distances,
    output_distance,
    resolution,
)
from vivace.verifying.feeding import _equal
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import check, curve_check, is_near, outright, summary
from vivace.verifying.skipping import same_values

LOSS, SCALE = Measure(Quantity.LOSS), Measure(Quantity.SCALE)


@pytest.mark.parametrize("value", [0.0, 1e-6, math.inf, math.nan])
def test_what_diverges_under_rounding_cannot_be_judged(value):
    fine = check(LOSS, 0, 0.0, 1e-6, 2.0**-8)
    document = summary([fine, check(SCALE, 21, value, math.nan, 2.0**-8)])
    assert document["kept"] is None
    assert document["displacement_envelopes"] != document["displacement_envelopes"]
    assert document["reason"].startswith("scale, from step 21, cannot be judged: a shadow, ")
    assert document["reason"].endswith("is not finite there")


def test_a_curve_whose_shadows_are_not_finite_cannot_be_judged():
    found = curve_check([1.0, 0.9], [1.0, 0.9], [1e-3, math.nan])
    assert found["kept"] is None
    assert curve_check([1.0, math.nan], [1.0, 0.9], [1e-3, 1e-3])["kept"] is False


def test_what_is_broken_beside_what_cannot_be_judged_is_broken():
    document = summary(
        [check(SCALE, 0, 1.0, 1e-6, 0.0), check(Measure(Quantity.RESIDUAL), 0, 0.1, math.nan, 0.0)]
    )
    assert document["kept"] is False
    assert document["reason"].startswith("scale, from step 0, is 1e+06 envelopes off")


def test_no_distance_of_what_is_not_finite_is_small():
    """Neither of a weight that is NaN, nor of a loss that becomes so in a later step."""
    before, streams = State({"w": torch.zeros(2)}, {}), torch.zeros(1)

    def ended(weights, losses):
        gradients = {"w": weights}
        return Outcome(losses, State({"w": weights}, {}), streams, streams, drew=False, gradients=gradients)

    wrong = ended(torch.full((2,), math.nan), [1.0, math.nan])
    found = distances(wrong, ended(torch.ones(2), [1.0, 0.5]), before, {}, steps=2)
    kinds = (Quantity.SCALE, Quantity.RESIDUAL, Quantity.GRADIENT_SCALE, Quantity.GRADIENT_RESIDUAL)
    for measure in (LOSS, *(Measure(kind, layer) for kind in kinds for layer in ("", "w"))):
        assert found[measure] == math.inf, measure


def test_weights_that_shrink_are_called_weight_decay_only_where_there_is_some():
    before, streams = State({"w": torch.ones(2)}, {}), torch.zeros(1)
    mine, theirs = (
        Outcome([1.0], State({"w": torch.full((2,), end)}, {}), streams, streams, drew=False)
        for end in (0.8, 0.9)
    )
    for decay, quantity, said in (
        (0.0, "shrinking", "shrinking or growing of the weights"),
        (0.1, "decay", "weight decay"),
    ):
        found = distances(mine, theirs, before, {"w": decay}, 1)
        figures = [
            check(m, 0, value, 0.0, 0.0)
            for m, value in found.items()
            if m.quantity in (Quantity.DECAY, Quantity.SHRINKING)
        ]
        assert [figure["quantity"] for figure in figures] == [quantity]
        assert not figures[0]["kept"]
        assert plain(figures[0]["name"]) == said


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_figure_that_is_not_finite_is_the_worst(value):
    document = summary([check(LOSS, 0, 1e-5, 1e-6, 0.0), check(SCALE, 10, value, 1e-6, 0.0)])
    assert not document["kept"]
    assert document["displacement_envelopes"] == math.inf
    assert document["reason"].startswith("scale, from step 10, is inf envelopes off")


def test_a_layer_that_does_not_move_has_no_scale_to_judge():
    assert check(Measure(Quantity.SCALE, "0.frozen.weight"), 0, 0.5, math.inf, 0.0)["kept"]


@pytest.mark.parametrize(("shift", "kept"), [(1e-7, True), (1e-2, False)], ids=["rounding", "a defect"])
def test_a_running_mean_that_hardly_moves_is_held_against_the_spread_of_a_batch(shift, kept):
    names = {"norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    before, weights = State({"w": torch.zeros(2)}, names), {"w": torch.ones(2)}

    def moved_to(mean):
        after = State(weights, {**names, "norm.running_mean": torch.full((4,), mean)})
        return Outcome([1.0], after, torch.ones(3), torch.zeros(1), drew=False)

    found = distances(moved_to(1e-8 + shift), moved_to(1e-8), before, {}, steps=1)
    mean = Measure(Quantity.BUFFER, "norm.running_mean")
    assert str(mean) == "buffer norm.running_mean"
    assert check(mean, 0, found[mean], 0.0, 2.0**-16)["kept"] == kept


@pytest.mark.parametrize(
    ("measure", "value", "near"),
    [
        (LOSS, 14.9, True),
        (LOSS, 100.0, False),
        (Measure(Quantity.SCALE, "0.w"), 70.0, True),
        (Measure(Quantity.DICTATED_LOSS), 9.0, False),
    ],
)
def test_what_more_shadows_may_keep_is_near(measure, value, near):
    assert is_near(summary([check(LOSS, 0, 0.0, 1.0, 0.0), check(measure, 0, value, 1.0, 0.0)])) == near


def test_figures_say_for_programs_what_they_are_of():
    layer = check(Measure(Quantity.DICTATED_SCALE, "0.w", "early"), 3, 0.0, 1.0, 0.0)
    assert layer["name"] == "dictated scale of 0.w, early, from step 3"
    assert (layer["quantity"], layer["layer"], layer["step"]) == ("dictated scale", "0.w", 3)
    whole = check(Measure(Quantity.COURSE), 0, 0.0, 1.0, 0.0)
    assert (whole["name"], whole["layer"]) == ("displacement of the course, from step 0", None)
    assert whole["limit"] < check(Measure(Quantity.SCALE, "of the course"), 0, 0.0, 1.0, 0.0)["limit"]


@pytest.mark.parametrize(
    ("measure", "floor"),
    [(Measure(Quantity.DECAY), 1e-3), (LOSS, 2.0**-22), (Measure(Quantity.GRADIENT_NOISE), 0.5)],
)
def test_a_figure_holds_the_envelope_by_which_it_was_scored(measure, floor):
    """Value over envelope is the score that stands beside them, also where the measured spread was finer."""
    narrow, wide = (check(measure, 0, 3 * floor, part * floor, 0.0, floor=floor) for part in (0.25, 2.0))
    assert [narrow["envelope"], wide["envelope"]] == [floor, 2 * floor]
    for figure in (narrow, wide):
        assert figure["score"] == pytest.approx(figure["value"] / figure["envelope"])
    assert math.isnan(check(measure, 0, 1.0, math.nan, 0.0)["envelope"])
    assert check(measure, 0, 1.0, math.inf, 0.0)["envelope"] == math.inf


def test_a_plain_fault_is_never_near():
    assert not is_near(outright(False, "closing the session changes the weights", Quantity.FACTS))


def _ended(parameters, buffers=None, gradients=None, outputs=None):
    still = torch.zeros(1)
    outputs = still if outputs is None else outputs
    return Outcome([1.0], State(parameters, buffers or {}), outputs, still, False, gradients=gradients or {})


def test_a_mask_of_infinities_stands_still_and_is_told_from_another():
    mask, weights = (
        torch.full((3, 3), -math.inf).triu(1),
        {"w": torch.ones(2), "frozen": torch.tensor(-math.inf)},
    )
    before, after = State({**weights, "w": torch.zeros(2)}, {"mask": mask}), _ended(weights, {"mask": mask})
    assert set(distances(_ended(weights, {"mask": mask.clone()}), after, before, {}, 1).values()) == {0.0}
    assert math.isfinite(resolution(after, before)[SCALE])
    for other in (torch.zeros(3, 3), mask.where(mask.isinf(), 1e-3)):
        found = distances(_ended(weights, {"mask": other}), after, before, {}, 1)
        assert found[Measure(Quantity.BUFFER, "mask")] >= 1e-3


def test_outputs_that_a_mask_takes_out_do_not_hide_the_others():
    outputs = torch.tensor([-math.inf, 1.0, 2.0])
    assert output_distance(outputs.clone(), outputs) == 0.0
    assert output_distance(torch.tensor([-math.inf, 1.0, 2.1]), outputs) > 0.05
    assert output_distance(torch.tensor([0.0, 1.0, 2.0]), outputs) == math.inf
    assert math.isnan(output_distance(torch.tensor([math.nan] * 2), torch.tensor([math.nan] * 2)))


def test_of_complex_weights_both_parts_are_compared():
    start = torch.ones(4, dtype=torch.complex64)
    before = State({"w": start}, {"b": start})
    right, wrong = start - 0.1 + 0.1j, start - 0.1 - 0.1j
    theirs = _ended({"w": right}, {"b": right}, {"w": right})
    found = distances(_ended({"w": wrong}, {"b": wrong}, {"w": wrong}), theirs, before, {}, 1)
    for quantity in (Quantity.RESIDUAL, Quantity.GRADIENT_RESIDUAL, Quantity.BUFFER):
        assert found[Measure(quantity, "b" if quantity == Quantity.BUFFER else "w")] > 0.01, quantity
    rounded = right * (1 + 1e-6)
    found = distances(_ended({"w": rounded}, {"b": rounded}, {"w": rounded}), theirs, before, {}, 1)
    assert all(abs(value) < 1e-4 for value in found.values())


def test_a_weight_without_numbers_is_no_obstacle():
    before = State({"w": torch.zeros(2), "none": torch.zeros(0)}, {})
    after = _ended({"w": torch.ones(2), "none": torch.zeros(0)}, gradients={"none": torch.zeros(0)})
    assert resolution(after, before)[SCALE] == 0.0
    assert set(distances(after, after, before, {}, 1).values()) == {0.0}


def test_a_layer_that_steps_use_at_random_may_move_where_the_reference_left_it():
    """As LayerDrop does, and experts to which nothing was routed; one that no shadow moves may not."""
    zeros, ones = torch.zeros(2), torch.ones(2)
    before = State(dict.fromkeys(("w", "drawn", "unused"), zeros), {})
    ends = {"w": ones, "drawn": zeros, "unused": zeros}
    theirs = _ended(ends, gradients={"w": ones})
    shadow = _ended(ends | {"drawn": ones}, gradients={"w": ones, "drawn": ones})
    found = resolution(theirs, before, [distances(one, theirs, before, {}, 1) for one in (theirs, shadow)])
    for quantity in (Quantity.SCALE, Quantity.RESIDUAL):
        assert found[Measure(quantity, "drawn")] == math.inf
        assert found[Measure(quantity, "unused")] < 1.0
        assert resolution(theirs, before)[Measure(quantity, "drawn")] < 1.0


def test_what_is_nan_in_both_is_the_same():
    """As a buffer that waits for its first value, and data with gaps."""
    gaps, weights = torch.tensor([1.0, math.nan]), {"w": torch.zeros(2)}
    before = State(weights, {"gaps": gaps})
    theirs, other = (_ended(weights, {"gaps": one}) for one in (gaps, torch.tensor([1.0, 2.0])))
    mine = _ended(weights, {"gaps": gaps.clone()})
    assert different_states(mine.after, theirs.after) == []
    assert different_states(other.after, theirs.after) == ["gaps"]
    assert distances(mine, theirs, before, {}, 1)[Measure(Quantity.BUFFER, "gaps")] == 0.0
    assert distances(other, theirs, before, {}, 1)[Measure(Quantity.BUFFER, "gaps")] == math.inf
    assert _equal([gaps.clone(), torch.ones(1)], [gaps, torch.ones(1)])
    assert not _equal([torch.tensor([1.0, 2.0])], [gaps])
    assert not _equal([gaps.double()], [gaps.clone().flip(0).double()])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_buffer_is_compared(form):
    """As the neighbours in a graph."""
    weights = {"w": torch.zeros(2)}
    theirs, other = (getattr(torch.eye(3) * size, form)() for size in (1.0, 2.0))
    before, after = State(weights, {"graph": theirs}), _ended(weights, {"graph": theirs})
    for buffer, apart in ((theirs.clone(), False), (other, True)):
        mine = _ended(weights, {"graph": buffer})
        assert bool(different_states(mine.after, after.after)) == apart
        assert bool(distances(mine, after, before, {}, 1)[Measure(Quantity.BUFFER, "graph")]) == apart


@pytest.mark.parametrize("size", [1, 3, 7])
def test_distances_do_not_depend_on_how_many_numbers_are_compared_at_once(size, monkeypatch):
    torch.manual_seed(0)
    shapes = {"plain": (5, 4), "image": (2, 3, 2, 2), "one": (), "none": (0, 3), "parts": (4,), "mask": (6,)}
    before = {name: torch.randn(shape) for name, shape in shapes.items()}
    before["parts"] = torch.randn(4, dtype=torch.complex64)
    before["mask"][2:4] = -math.inf
    theirs = {name: value + 1e-2 * torch.randn_like(value) for name, value in before.items()}
    mine = {name: value + 1e-4 * torch.randn_like(value) for name, value in theirs.items()}
    theirs["image"] = theirs["image"].contiguous(memory_format=torch.channels_last)
    slopes = {name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in mine.items() if name != "one"}
    others = {name: value + 1e-3 * torch.randn_like(value) for name, value in slopes.items()} | {
        "one": torch.ones(())
    }
    ends = [_ended(mine, {}, slopes), _ended(theirs, {}, others)]

    def found():
        start = State(before, {})
        return distances(*ends, start, {"plain": 1e-3}, 1), resolution(ends[1], start)

    whole = found()
    monkeypatch.setattr(displacement, "CHUNK", size)
    for apart, once in zip(found(), whole, strict=True):
        assert apart == pytest.approx(once, rel=1e-9, nan_ok=True)


def test_a_state_that_is_no_number_any_more_is_another_one():
    zero, lost = ({"average": torch.full((3,), value)} for value in (0.0, math.nan))
    assert not same_values(lost, zero)
    assert same_values(lost, {"average": torch.full((3,), math.nan)})
