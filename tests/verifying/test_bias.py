"""The test of bias: noise of mean zero is no harm, what errs to one side is; and masks of a plan's own."""

import dataclasses
import math
import random

import pytest
import torch
from torch import nn

import vivace
from vivace import Seam, Stage
from vivace.testing import jobs
from vivace.verifying.bias import (
    WHOLE,
    Gradient,
    Pair,
    checks_of,
    estimates,
    pair_of,
    pairs_of,
    sketch,
    spread_of,
)
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.masks import Counted, Kept, fault_of

MACHINE = vivace.inspect().to_dict()
RATE = 0.5


def drawn(seed, count=32, bias=0.0, noise=0.02, lose=0.0, aside=0.0, size=400):
    """Pairs of gradients; `aside`: what one direction that is orthogonal to each gradient adds to it."""
    numbers = torch.Generator().manual_seed(seed)
    found, fixed = [], torch.randn(size, generator=numbers)
    for _ in range(count):
        theirs = torch.randn(size, generator=numbers)
        mine = theirs * (1.0 + bias) + noise * torch.randn(size, generator=numbers)
        if aside:
            across = fixed - theirs * (fixed @ theirs) / (theirs @ theirs)
            mine += aside * theirs.norm() * across / across.norm()
        found.append(pair_of(Gradient(1.0 + lose, {"0.w": mine}), Gradient(1.0, {"0.w": theirs})))
    return found


def broken(pairs, shadows=None):
    return [c["quantity"] for c in checks_of(estimates(pairs), shadows or {}, 0) if not c["kept"]]


NOISY = {Measure(Quantity.GRADIENT_NOISE, layer): 0.3 for layer in (WHOLE, "0.w")}


def test_noise_is_kept_and_a_bias_of_two_percent_is_not():
    assert broken(drawn(0)) == []
    assert broken(drawn(0, noise=0.3), NOISY) == []
    assert broken(drawn(1, bias=0.02)) == ["gradient bias", "gradient bias"]
    assert broken(drawn(1, lose=0.01)) == ["loss bias"]
    assert broken(drawn(1, noise=1.0), dict.fromkeys(NOISY, 0.6)) == ["gradient size"]


def test_more_noise_than_rounding_brings_is_none_of_it():
    assert broken(drawn(0, noise=0.3)) == ["gradient noise", "gradient noise"]
    assert "gradient noise" in broken(drawn(0, noise=1.5), NOISY)


def test_noise_of_the_whole_may_be_twice_as_long_as_shadows_have_it_and_of_a_layer_four_times():
    less = dict.fromkeys(NOISY, 0.2)
    assert broken(drawn(0, noise=0.36), less) == []
    assert broken(drawn(0, noise=0.44), less) == ["gradient noise"]
    assert broken(drawn(0, noise=0.9), less).count("gradient noise") == 2


def test_what_goes_one_way_beside_the_gradients_is_no_noise():
    """The projection on the gradients does not see it, nor does their size."""
    assert broken(drawn(0, aside=0.1), NOISY) == ["gradient drift", "gradient drift"]
    assert broken(drawn(0, aside=0.1, noise=0.3), NOISY) == ["gradient drift", "gradient drift"]
    assert broken(drawn(0, aside=0.01)) == []


@pytest.mark.parametrize("size", [3, 40, 4000])
def test_a_drift_is_as_long_as_it_is_and_noise_is_none(size):
    drift = Measure(Quantity.GRADIENT_DRIFT)
    still = [estimates(drawn(seed, size=size, noise=0.3))[drift] for seed in range(50)]
    assert sum(estimate.certain != 0.0 for estimate in still) == 0
    for aside in (0.05, 0.2) if size > 3 else ():  # else no direction is orthogonal to all gradients
        moved = [estimates(drawn(seed, size=size, aside=aside))[drift].value for seed in range(20)]
        assert sum(moved) / len(moved) == pytest.approx(aside, rel=0.25)


def test_a_sketch_is_as_long_as_its_vector_and_the_same_each_time():
    numbers = torch.Generator().manual_seed(0)
    vectors = [torch.randn(1000, generator=numbers, dtype=torch.float64) for _ in range(100)]
    lengths = [float(sketch(v, "0.w").square().sum() / v.square().sum()) for v in vectors]
    assert sum(lengths) / len(lengths) == pytest.approx(1.0, abs=0.1)
    assert torch.equal(sketch(vectors[0], "0.w"), sketch(vectors[0], "0.w"))
    both = sketch(vectors[0], "0.w") + sketch(vectors[1], "0.w")
    assert torch.allclose(both, sketch(vectors[0] + vectors[1], "0.w"))
    assert not torch.equal(sketch(vectors[0], "0.w"), sketch(vectors[0], "0.v"))


def test_noise_of_the_reference_itself_is_no_bias():
    """Projected on itself, a noisy gradient would seem longer than another one of the same mean."""
    numbers, pairs = torch.Generator().manual_seed(0), []
    for _ in range(32):
        true = torch.randn(400, generator=numbers)
        noisy = [Gradient(1.0, {"0.w": true + 0.5 * torch.randn(400, generator=numbers)}) for _ in range(4)]
        pairs.append(pair_of(noisy[0], noisy[1], (noisy[2], noisy[3])))
    assert broken(pairs) == []
    assert estimates(pairs)[Measure(Quantity.GRADIENT_BIAS)].error < 0.03


def test_what_right_rounding_brings_is_no_bias():
    shadows = spread_of([drawn(seed, count=8, bias=0.004 * (-1) ** seed) for seed in range(4)])
    assert shadows[Measure(Quantity.GRADIENT_BIAS)] == pytest.approx(0.004, rel=0.5)
    assert broken(drawn(1, bias=0.012), shadows) == []


@pytest.mark.parametrize("what", [torch.inf, torch.nan])
def test_shadows_that_are_not_finite_say_nothing(what):
    def diverging(seed):
        pairs = drawn(seed, count=8)
        mine = Gradient(what, {"0.w": torch.full((400,), what)})
        return [*pairs[1:], pair_of(mine, Gradient(1.0, {"0.w": torch.ones(400)}))]

    shadows = spread_of([drawn(0, count=8), diverging(1)])
    checks = checks_of(estimates(drawn(1)), shadows, 0)
    assert len(checks) == 8
    assert [c["kept"] for c in checks] == [None] * 8
    assert all(math.isnan(c["envelope"]) for c in checks)


@pytest.mark.parametrize("what", [torch.inf, torch.nan])
def test_a_plan_that_is_not_finite_is_broken_where_shadows_are(what):
    wrong = Gradient(what, {"0.w": torch.full((400,), what)})
    right = Gradient(1.0, {"0.w": torch.ones(400)})
    found = broken([*drawn(0), pair_of(wrong, right)], spread_of([drawn(1, count=8)]))
    assert {"loss bias", "gradient bias", "gradient drift", "gradient noise"} <= set(found)


def test_batches_on_which_the_job_itself_diverges_and_skipped_steps_make_no_pair():
    def mine(number):
        return Gradient(1.0, {} if number == 1 else {"0.w": torch.ones(3)})

    def theirs(number):
        return Gradient(1.0, {"0.w": torch.full((3,), torch.nan if number == 2 else 1.0)})

    assert len(pairs_of(mine, theirs, None, 6)) == 4
    skipped = Gradient(1.0, {})
    assert pairs_of(mine, theirs, lambda number: (skipped, theirs(0)), 6) == []


def test_the_error_is_as_wide_as_the_estimates_scatter():
    found = [estimates(drawn(seed, noise=0.3))[Measure(Quantity.GRADIENT_BIAS)] for seed in range(200)]
    outside = sum(abs(estimate.value) > 2 * estimate.error for estimate in found)
    assert 0.01 < outside / len(found) < 0.12
    assert sum(estimate.certain != 0.0 for estimate in found) == 0


def test_a_gradient_that_is_rounding_alone_says_nothing():
    """A bias in front of a BatchNorm has none; what is computed is the sum of the last bits of others."""
    numbers, pairs = torch.Generator().manual_seed(0), []
    for _ in range(32):
        true = torch.randn(400, generator=numbers)
        last_bits = [2.0**-24 * torch.randn(40, generator=numbers) for _ in range(2)]
        pairs.append(pair_of(*(Gradient(1.0, {"w": true, "b": bits}) for bits in last_bits)))
    assert Measure(Quantity.GRADIENT_BIAS, "b") not in estimates(pairs)
    assert broken(pairs) == []
    large = [
        pair_of(*(Gradient(1.0, {"w": true, "b": 0.1 * torch.randn(40, generator=numbers)}) for _ in "ab"))
        for _ in range(32)
    ]
    assert estimates(large)[Measure(Quantity.GRADIENT_BIAS, "b")].certain < -0.5
    assert broken(large)


def test_the_smallest_bias_that_would_be_seen_is_stated():
    (whole,) = (
        c
        for c in checks_of(estimates(drawn(0)), {}, 0)
        if c["quantity"] == "gradient bias" and not c["layer"]
    )
    assert 0.005 < whole["seen_from"] < 0.01
    numbers = random.Random(0)
    caught = sum(
        "gradient bias" in broken(drawn(numbers.randrange(10**6), bias=whole["seen_from"])) for _ in range(20)
    )
    assert caught >= 12


def test_a_missing_gradient_is_zero_and_too_few_pairs_say_nothing():
    products = {"0.v": (0.0, 0.0, 3.0, 0.0), "0.w": (0.0, 3.0, 0.0, 3.0), WHOLE: (0.0, 3.0, 3.0, 3.0)}
    pair = pair_of(Gradient(1.0, {"0.v": torch.ones(3)}), Gradient(1.0, {"0.w": torch.ones(3)}))
    assert pair == Pair((1.0, 1.0), products)
    assert estimates([pair] * 3) == {}
    assert "gradient bias of 0.w" in broken([pair] * 4) or "gradient bias" in broken([pair] * 4)


def dropping():
    """A job whose hidden units are left out at random, as many samples and units as a mask needs."""

    def data():
        numbers = torch.Generator().manual_seed(0)
        inputs = torch.randn(1024, 16, generator=numbers)
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=128, shuffle=True
        )

    return dataclasses.replace(
        jobs.mlp(),
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(RATE), nn.Linear(64, 4)),
        data=data,
    )


def own_masks(build, rate, scale, *, shared=False, stays=False):
    """Draw the masks from a generator of the plan's own."""
    (module,) = (m for m in build.model.modules() if isinstance(m, nn.Dropout))
    numbers = torch.Generator().manual_seed(7)

    def forward(hidden):
        if not module.training:
            return hidden
        torch.rand(1)  # the main stream moves, too
        if stays:
            numbers.manual_seed(7)
        shape = (1, hidden.shape[1]) if shared else hidden.shape
        return hidden * (torch.rand(shape, generator=numbers) >= rate) * scale

    module.forward = forward
    build.on_close(lambda: module.__dict__.pop("forward"))


def right_masks(build):
    own_masks(build, RATE, 1 / (1 - RATE))


def half_the_rate(build):
    own_masks(build, RATE / 2, 1 / (1 - RATE / 2))


def unscaled(build):
    own_masks(build, RATE, 1.0)


def one_mask_for_the_batch(build):
    own_masks(build, RATE, 1 / (1 - RATE), shared=True)


def one_mask_for_ever(build):
    own_masks(build, RATE, 1 / (1 - RATE), stays=True)


class OtherMask(torch.autograd.Function):
    """Dropout whose backward pass draws anew, as blocks do that are computed again without their stream."""

    @staticmethod
    def forward(context, hidden):
        return hidden * torch.empty_like(hidden).bernoulli_(1 - RATE) / (1 - RATE)

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.empty_like(gradient).bernoulli_(1 - RATE) / (1 - RATE)


def other_masks_backward(build):
    (module,) = (m for m in build.model.modules() if isinstance(m, nn.Dropout))
    module.forward = lambda hidden: OtherMask.apply(hidden) if module.training else hidden
    build.on_close(lambda: module.__dict__.pop("forward"))


def in_halves(build, *, shared):
    """A batch in two pieces, which draw one after the other, or both the same."""

    def gradients(batch):
        state, total = torch.get_rng_state(), 0.0
        for half in zip(*(part.chunk(2) for part in batch), strict=True):
            if shared:
                torch.set_rng_state(state)
            loss = build.seams.forward(half) / 2
            build.seams.backward(loss)
            total = total + loss.detach()
        return total

    build.replace(Seam.GRADIENTS, gradients)


def halves(build):
    in_halves(build, shared=False)


def halves_with_one_mask(build):
    in_halves(build, shared=True)


def head_learns_less(build):
    def finish(following):
        following()
        list(build.model.parameters())[-2].grad.mul_(0.98)

    build.wrap(Seam.FINISH, finish)


@pytest.fixture(scope="module")
def ruler(ruler_of):
    return ruler_of(dropping)


@pytest.mark.parametrize(
    "defect",
    [
        half_the_rate,
        unscaled,
        one_mask_for_the_batch,
        one_mask_for_ever,
        other_masks_backward,
        halves_with_one_mask,
    ],
)
def test_wrong_masks_of_a_plans_own_are_caught(defect, ruler, planted):
    verdict = ruler.judge(planted(defect, Stage.MODEL))
    assert verdict["kept"] is False, verdict["reason"]


@pytest.mark.parametrize("right", [right_masks, halves])
def test_right_masks_of_a_plans_own_are_kept(right, ruler, planted):
    verdict = ruler.judge(planted(right, Stage.MODEL))
    assert verdict["kept"], verdict["reason"]
    assert any("seen_from" in check for check in verdict["checks"])
    handed = any("with its own masks" in check["name"] for check in verdict["checks"])
    assert handed is (right is halves)


def test_why_bias_was_not_tested_is_said(ruler, planted):
    plan = planted(right_masks, Stage.MODEL)
    assert ruler.judge(plan)["bias"] == {"pairs": 32, "not_tested": ""}
    full = ruler.effort
    ruler.effort = dataclasses.replace(full, pairs=0)
    try:
        found = ruler.judge(plan)["bias"]
    finally:
        ruler.effort = full
    assert found == {"pairs": 0, "not_tested": "so short an effort leaves no time for it"}


def test_a_step_that_draws_too_little_or_twice_the_same_is_told():
    def drawn(*shapes, again=False):
        kept, state = Kept(), torch.get_rng_state()
        with kept:
            for shape in shapes:
                if again:
                    torch.set_rng_state(state)
                nn.functional.dropout(torch.ones(shape), RATE)
        return kept.counted

    job = drawn((64, 8), (64, 8))
    assert "at 1 instead of 2 places" in fault_of(drawn((64, 8)), job)
    assert fault_of(drawn((128, 8)), job) == ""  # all at once
    assert fault_of(drawn((60, 8), (60, 8)), job) == ""  # without padding
    assert "the same random numbers twice" in fault_of(drawn((64, 8), (64, 8), again=True), job)
    stays = Counted(*job[:3], stays=True)
    assert "the same random numbers in each step" in fault_of(stays, job)
    assert fault_of(stays, stays) == ""


def test_a_layer_that_learns_two_percent_less_is_not_hidden_by_bfloat16(ruler, planted):
    plan = planted(head_learns_less, Stage.MODEL) | {"bf16_autocast": {}}
    verdict = ruler.judge(plan)
    assert verdict["kept"] is False
    assert ruler.judge({"bf16_autocast": {}})["kept"]


class Aside(torch.autograd.Function):
    """A weight whose gradient gets a share of a direction that is orthogonal to it, drawn from `numbers`."""

    @staticmethod
    def forward(context, weight, share, numbers):
        context.share, context.numbers = share, numbers
        return weight.view_as(weight)

    @staticmethod
    def backward(context, gradient):
        drawn = torch.randn(gradient.shape, generator=context.numbers())
        across = drawn - gradient * ((drawn * gradient).sum() / gradient.square().sum())
        return gradient + context.share * gradient.norm() * across / across.norm(), None, None


def a_layer_goes_aside(build, share=0.1, numbers=lambda: torch.Generator().manual_seed(5)):
    """In the model's own backward pass, where a rehearsal does not come; always the same way."""
    layer = next(m for m in build.model.modules() if isinstance(m, nn.Linear))
    aside = lambda: Aside.apply(layer.weight, share, numbers)  # noqa: E731
    layer.forward = lambda inputs: nn.functional.linear(inputs, aside(), layer.bias)
    build.on_close(lambda: layer.__dict__.pop("forward"))


def a_layer_goes_anywhere(build):
    """Another way each time: no mean shows it."""
    generator = torch.Generator().manual_seed(5)
    a_layer_goes_aside(build, share=0.3, numbers=lambda: generator)


@pytest.mark.parametrize(
    ("defect", "shown"), [(a_layer_goes_aside, "gradient drift"), (a_layer_goes_anywhere, "gradient noise")]
)
def test_a_layer_whose_gradient_goes_aside_is_not_hidden_by_bfloat16(defect, shown, ruler, planted):
    plan = planted(defect, Stage.MODEL) | {"bf16_autocast": {}}
    verdict = ruler.judge(plan)
    assert verdict["kept"] is False
    broken = {check["quantity"] for check in verdict["checks"] if check["kept"] is False}
    assert shown in broken
    assert "gradient bias" not in broken


class Cliff(nn.Module):
    """Finite as long as a product of numbers with ones and zeros gives these numbers, as it does in fp32."""

    def __init__(self):
        super().__init__()
        self.body = jobs.mlp().model()
        self.register_buffer("numbers", torch.linspace(0.1, 0.9, 16).view(4, 4))

    def forward(self, inputs):
        gap = (self.numbers @ torch.eye(4) - self.numbers).abs().max()
        return self.body(inputs) + gap * 1e30 * 1e30


def nothing(build):
    pass


def test_a_shadow_that_is_not_finite_is_named_and_no_figure_is_kept_for_it(planted, ruler_of):
    ruler = ruler_of(lambda: dataclasses.replace(jobs.mlp(), model=Cliff))
    verdict = ruler.judge(planted(nothing, Stage.MODEL))
    assert verdict["kept"] is None
    assert verdict["reason"].startswith("scale of body.0.weight, from step 0, cannot be judged: a shadow, ")
    biases = [c for c in verdict["checks"] if c["quantity"] in ("loss bias", "gradient noise")]
    assert {c["quantity"] for c in biases} == {"loss bias", "gradient noise"}
    assert [c["kept"] for c in biases] == [None] * len(biases)


def test_of_complex_gradients_both_parts_are_compared():
    right = torch.ones(4, dtype=torch.complex64)
    pair = pair_of(Gradient(1.0, {"w": right + 1.0j}), Gradient(1.0, {"w": right - 1.0j}))
    assert pair.products["w"] == (0.0, 8.0, 8.0, 8.0)
