"""3x3 convolutions by Winograd's minimal filtering: values, order, bits, what is left alone."""

import contextlib
import copy
import ctypes
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vivace.errors import PlanError, Refused
from vivace.job import Job
from vivace.ledger import Observation
from vivace.mechanisms import c_code
from vivace.mechanisms.c_code import compiled
from vivace.observing.observe import observe
from vivace.operators import FEWEST_TILES, NARROWEST_WINDOW, gains_by_winograd
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.techniques.winograd import operators
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile, this_machine

from .convolving import in_order, results

Winograd = registry.find("winograd")
MAPS, WEIGHTS = "vivace::winograd", "vivace::winograd_weights"
OURS, LIBRARYS = "_WinogradBackward", "ConvolutionBackward0"  # what autograd calls their results
LAST = torch.channels_last
ORDERS = [(0, 1, 2, 3), (0, 3, 1, 2), (0, 1, 3, 2)]  # of maps, as permutations of a contiguous tensor


def wide(inputs=32, outputs=32, **options):
    return nn.Conv2d(inputs, outputs, 3, **options)


def images(*shape):
    return torch.randn(*shape).contiguous(memory_format=LAST)


def network():
    """The tiny network with images, in channels-last order, and with two wide convolutions in it."""
    job = TINY_JOBS["cnn"]()
    model = job.model

    def build():
        layers = list(model())
        between = [nn.Conv2d(8, 32, 1), wide(padding=1), nn.ReLU(), wide(32, 40), nn.Conv2d(40, 8, 1)]
        return nn.Sequential(*layers[:3], *between, *layers[3:]).to(memory_format=LAST)

    return Job(**{**vars(job), "model": build})


@pytest.mark.usefixtures("one_thread")
class TestWinograd(TechniqueContract):
    technique = Winograd
    jobs: ClassVar = {**TINY_JOBS, "wide": network}


def opened(model, **others):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.from_dict({"winograd": {}, **others})
    return attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean())


def operators_of(function):
    """How often each operator of Vivace's runs in it."""
    with torch.profiler.profile() as profiler:
        function()
    return {row.key: row.count for row in profiler.key_averages() if row.key.startswith("vivace::")}


def assert_near(found, layer, x, gradient, rounding=1e-5):
    """Within `rounding` of float64's, relative to the norm."""
    expected = results(copy.deepcopy(layer).double(), x.double(), gradient.double())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert float((mine.double() - theirs).norm()) <= rounding * float(theirs.norm())


# Values


@st.composite
def convolutions(draw):
    """A convolution that gains, a batch for it, and what its output's gradient is."""
    inputs, outputs = (draw(st.sampled_from([32, 33, 40, 47, 48, 64])) for _ in range(2))
    padding = draw(st.one_of(st.sampled_from(["same", "valid", 1]), st.tuples(*[st.integers(0, 2)] * 2)))
    around = {"same": (1, 1), "valid": (0, 0), 1: (1, 1)}.get(padding, padding)
    result = [draw(st.sampled_from([4, 6, 7, 8, 11, 12, 13])) for _ in range(2)]
    size = [n + 2 - 2 * p for n, p in zip(result, around, strict=True)]
    filled = result[0] * result[1] / (16 * -(-result[0] // 4) * -(-result[1] // 4))
    least = -(-FEWEST_TILES // (-(-result[0] // 4) * -(-result[1] // 4)))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layer = wide(inputs, outputs, padding=padding, bias=draw(st.booleans()))
    layer.to(memory_format=draw(st.sampled_from([torch.contiguous_format, LAST])))
    x = images(least + draw(st.integers(0, 1)), inputs, *size)
    gradient = torch.randn(len(x), outputs, *result)
    kind = draw(st.sampled_from([*ORDERS, "expanded", "strided"]))
    if kind == "expanded":
        gradient = gradient[..., :1, :1].expand_as(gradient)
    elif kind == "strided":
        gradient = torch.randn(len(x), 2 * outputs, *result)[:, ::2]
    else:
        gradient = in_order(gradient, kind)
    return layer, x, gradient, filled >= 0.6


@settings(max_examples=40, deadline=None)
@given(convolutions())
def test_values_gradients_and_strides_are_the_plain_modules(case):
    layer, x, gradient, gains = case
    plain = copy.deepcopy(layer)
    with opened(nn.ModuleList([layer, wide()])):
        assert (type(layer(x).grad_fn).__name__ == OURS) == gains
        found = results(layer, x, gradient)
        ends = [one.clone().requires_grad_() for one in (x, x)]
        for module, start in zip((layer, plain), ends, strict=True):
            module(start).backward(gradient)
    assert "forward" not in vars(layer)
    assert_near(found, layer, x, gradient)
    assert found[0].stride() == plain(x).stride()
    assert ends[0].grad.stride() == ends[1].grad.stride()
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert mine.grad.stride() == theirs.grad.stride()


@st.composite
def small_maps(draw):
    """Arguments of the operators, with edges everywhere: maps of 1xN pixels, and few channels."""
    images, inputs, outputs = (draw(st.integers(1, most)) for most in (3, 40, 40))
    padding = [draw(st.integers(0, 2)) for _ in range(2)]
    size = [max(1, 3 - 2 * p) + draw(st.integers(0, 9)) for p in padding]
    torch.manual_seed(draw(st.integers(0, 2**16)))
    x = in_order(torch.randn(images, inputs, *size), draw(st.sampled_from(ORDERS)))
    weight = in_order(torch.randn(outputs, inputs, 3, 3), draw(st.sampled_from(ORDERS)))
    if draw(st.booleans()):
        weight = torch.randn(outputs, 2 * inputs, 3, 3)[:, ::2]
    bias = draw(st.sampled_from([None, torch.randn(outputs), torch.randn(2 * outputs)[::2]]))
    shape = nn.functional.conv2d(x, weight, None, 1, padding).shape
    gradient = in_order(torch.randn(shape), draw(st.sampled_from(ORDERS)))
    return gradient, x, weight, bias, padding


@settings(max_examples=120, deadline=None)
@given(small_maps(), st.sampled_from([1, 3, operators.TILES_AT_ONCE]))
def test_the_operators_are_right_for_any_shape_and_order(case, tiles_at_once):
    gradient, x, weight, bias, padding = case
    with pytest.MonkeyPatch.context() as patch:  # several groups of tiles, also of small maps
        patch.setattr(operators, "TILES_AT_ONCE", tiles_at_once)
        patch.setattr(operators, "NUMBERS_AT_ONCE", 1)
        forward = operators._winograd(x, weight, bias, padding, False)
        backward = operators._winograd(gradient, weight, None, [2 - p for p in padding], True)
        of_weights = operators._winograd_weights(gradient, x, weight, padding)
    assert of_weights.stride() == torch.empty_like(weight).stride()

    def all_of(gradient, x, weight, bias):
        forward = nn.functional.conv2d(x, weight, bias, 1, padding)
        arguments = (None, [1, 1], padding, [1, 1], False, [0, 0], 1, [True, True, False])
        return forward, *torch.ops.aten.convolution_backward(gradient, x, weight, *arguments)[:2]

    given = [None if one is None else one.double() for one in (gradient, x, weight, bias)]
    wanted, sizes = all_of(*given), all_of(*(None if one is None else one.abs() for one in given))
    for mine, theirs, size in zip((forward, backward, of_weights), wanted, sizes, strict=True):
        assert mine.shape == theirs.shape
        assert float((mine.double() - theirs).abs().max()) <= 5e-6 * float(size.max())


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": (0, 2), "bias": False}])
def test_second_derivatives_are_the_convolutions(options):
    layer, x = wide(**options), images(8, 32, 8, 8).requires_grad_()

    def penalty():
        gradients = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, *layer.parameters()])

    expected = penalty()
    with opened(layer):
        assert type(layer(x).grad_fn).__name__ == OURS
        for mine, theirs in zip(penalty(), expected, strict=True):
            assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


def test_bits_depend_neither_on_the_number_of_threads_nor_on_the_run():
    """But for the bias's gradient, a sum of PyTorch's, whose order depends on them."""
    before = torch.get_num_threads()
    try:
        for inputs, outputs, size, number in [(32, 48, 9, 8), (64, 64, 28, 4), (33, 130, 14, 5)]:
            layer, x = wide(inputs, outputs, padding=1), images(number, inputs, size, size)
            gradient, first = images(number, outputs, size, size), None
            with opened(layer):
                for threads in (1, 2, 2, 1):
                    torch.set_num_threads(threads)
                    again = results(layer, x, gradient)[:3]
                    first = first or again
                    assert all(map(torch.equal, again, first))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["input", "weight", "bias", "gradient"])
def test_what_is_not_finite_does_not_stay_hidden(value, where):
    layer, x, gradient = wide(padding=1), images(4, 32, 12, 12), images(4, 32, 12, 12)
    with torch.no_grad():
        place = {"input": x, "weight": layer.weight, "bias": layer.bias, "gradient": gradient}[where]
        place[(0,) * (place.dim() - 1)][-1] = value
    expected = results(layer, x, gradient)
    with opened(layer):
        found = results(layer, x, gradient)
    assert not all(bool(one.isfinite().all()) for one in expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert not bool((mine.isfinite() & ~theirs.isfinite()).any())


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "weight and bias"])
def test_only_the_wanted_gradients_are_computed(wanted):
    layer, x = wide(padding=1), images(8, 32, 8, 8).requires_grad_("input" in wanted)
    layer.weight.requires_grad_("weight" in wanted)
    layer.bias.requires_grad_("bias" in wanted)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    named = {"model": layer, "optimizer": optimizer, "loss": lambda m, b: m(b).square().mean()}
    with attach(Plan([Winograd()]), **named):
        ran = operators_of(lambda: layer(x).square().sum().backward())
    assert ran == {MAPS: 1 + ("input" in wanted), **({WEIGHTS: 1} if "weight" in wanted else {})}
    assert (x.grad is None) == ("input" not in wanted)
    assert (layer.bias.grad is None) == ("bias" not in wanted)


def test_without_gradients_it_gives_values_all_the_same():
    layer, x = wide(padding=1), images(8, 32, 8, 8)
    expected = layer(x)
    with opened(layer), torch.no_grad():
        assert operators_of(lambda: layer(x)) == {MAPS: 1}
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_many_gradients_at_once_are_the_convolutions():
    layer, x = wide(padding=1), images(8, 32, 8, 8).requires_grad_()
    gradients = torch.randn(3, 8, 32, 8, 8)

    def every():
        return torch.autograd.grad(layer(x), [x, *layer.parameters()], gradients, is_grads_batched=True)

    expected = every()
    with opened(layer):
        for mine, theirs in zip(every(), expected, strict=True):
            assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # in make_dual
def test_transforms_of_functions_and_derivatives_forward_are_the_librarys():
    layer, batches, one = wide(padding=1), torch.randn(3, 8, 32, 8, 8), images(8, 32, 8, 8)
    weights = {name: one.detach() for name, one in layer.named_parameters()}

    def loss(weights, batch):
        return torch.func.functional_call(layer, weights, (batch,)).square().sum()

    def forward():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(one, torch.ones_like(one))
            return torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent

    def every():
        gradient = torch.func.grad(loss)
        many = torch.func.vmap(gradient, in_dims=(None, 0))(weights, batches)
        return [*many.values(), *gradient(weights, one).values(), forward()]

    expected = every()
    with opened(layer):
        assert operators_of(every) == {}
        assert all(map(torch.equal, every(), expected))


# What stays the library's


class Own(nn.Conv2d):
    """A class of somebody's own, which may do something else with its weights."""


def strange(layer, **attributes):
    """The layer, whose settings were changed after it was made."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


LEFT_ALONE = {
    "bfloat16 by autocast": (lambda: wide(padding=1), lambda: images(8, 32, 8, 8), torch.bfloat16),
    "float16 by autocast": (lambda: wide(padding=1), lambda: images(8, 32, 8, 8), torch.float16),
    "float64": (lambda: wide(padding=1).double(), lambda: images(8, 32, 8, 8).double(), None),
    "bfloat16": (lambda: wide(padding=1).bfloat16(), lambda: images(8, 32, 8, 8).bfloat16(), None),
    "evaluation": (lambda: wide(padding=1).eval(), lambda: images(8, 32, 8, 8), None),
    "NCHW": (lambda: wide(padding=1), lambda: torch.randn(8, 32, 8, 8), None),
    "one image": (lambda: wide(padding=1), lambda: torch.randn(32, 40, 40), None),
    "no image": (lambda: wide(padding=1), lambda: images(0, 32, 8, 8), None),
    "a subclass": (lambda: Own(32, 32, 3, padding=1), lambda: images(8, 32, 8, 8), None),
    "reflect": (lambda: wide(padding=1, padding_mode="reflect"), lambda: images(8, 32, 8, 8), None),
    "circular": (lambda: wide(padding=1, padding_mode="circular"), lambda: images(8, 32, 8, 8), None),
    "groups": (lambda: wide(64, 64, padding=1, groups=2), lambda: images(8, 64, 8, 8), None),
    "a stride": (lambda: wide(padding=1, stride=(1, 2)), lambda: images(8, 32, 16, 16), None),
    "a dilation": (lambda: wide(padding=2, dilation=2), lambda: images(8, 32, 8, 8), None),
    "more padding": (lambda: wide(padding=(1, 3)), lambda: images(8, 32, 8, 8), None),
    "few inputs": (
        lambda: wide(NARROWEST_WINDOW - 1, 32, padding=1),
        lambda: images(8, NARROWEST_WINDOW - 1, 8, 8),
        None,
    ),
    "few outputs": (lambda: wide(32, NARROWEST_WINDOW - 1, padding=1), lambda: images(8, 32, 8, 8), None),
    "few tiles": (lambda: wide(padding=1), lambda: images(FEWEST_TILES - 1, 32, 4, 4), None),
    "a window of 5": (lambda: nn.Conv2d(32, 32, 5, padding=2), lambda: images(8, 32, 8, 8), None),
    "a window of 1x3": (lambda: nn.Conv2d(32, 32, (1, 3)), lambda: images(8, 32, 8, 8), None),
    "badly filled tiles": (lambda: wide(padding=1), lambda: images(32, 32, 5, 5), None),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_convolutions_are_the_librarys_bit_for_bit(name):
    build, data, autocast = LEFT_ALONE[name]
    layer, x = build(), data()
    casting = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with casting:
        gradient = torch.randn_like(layer(x))
        expected = results(layer, x, gradient)
        with opened(nn.ModuleList([layer, wide()])):
            assert operators_of(lambda: results(layer, x, gradient)) == {}
            found = results(layer, x, gradient)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(mine, theirs)


def test_nothing_but_the_plain_module_is_replaced_and_that_only_meanwhile():
    layer, plain = wide(padding=1), wide(padding=1).eval()
    x = images(8, 32, 8, 8)
    with opened(layer):
        assert type(layer(x).grad_fn).__name__ == OURS
        assert type(layer(input=x).grad_fn).__name__ == OURS
        without_memory = copy.deepcopy(layer).to("meta")
        assert type(without_memory(x.to("meta")).grad_fn).__name__ == LIBRARYS
        assert type(plain(x).grad_fn).__name__ == LIBRARYS
        copied = copy.deepcopy(layer)
        with torch.no_grad():
            copied.weight.zero_()
            copied.bias.zero_()
        assert not bool(copied(x).any())
    assert type(layer(x).grad_fn).__name__ == LIBRARYS


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: strange(layer, bias=nn.Parameter(layer.bias.detach().double())),
        lambda layer: strange(layer, bias=nn.Parameter(torch.ones(1))),
        lambda layer: strange(layer, weight=nn.Parameter(torch.randn(33, 32, 3, 3))),
        lambda layer: strange(layer, weight=nn.Parameter(torch.randn(32, 33, 3, 3))),
    ],
    ids=["a bias of float64", "a bias of one number", "more outputs", "more inputs"],
)
def test_parameters_that_do_not_fit_are_the_librarys_to_refuse(change):
    layer, x = wide(padding=1), images(8, 32, 8, 8)
    with opened(layer):
        change(layer)
        with pytest.raises(RuntimeError):
            nn.Conv2d.forward(layer, x)
        with pytest.raises(RuntimeError):
            layer(x)


def test_a_window_may_change_its_settings_later():
    layer, x = wide(padding=1), images(8, 32, 13, 13)
    changes = [{"padding": 2}, {"padding": "valid"}, {"bias": None}, {"padding": 1}, {"dilation": 2}]
    changes += [{"dilation": 1, "stride": (1, 2)}, {"stride": 1, "padding_mode": "reflect"}]
    with opened(layer):
        for later in changes:
            strange(layer, **later)
            with torch.no_grad():
                expected = nn.Conv2d.forward(layer, x)
                assert float((layer(x) - expected).norm()) <= 1e-5 * float(expected.norm())


def test_maps_gain_where_tiles_are_many_and_filled():
    assert gains_by_winograd((32, 32, 3, 3), (8, 32, 8, 8))
    assert not gains_by_winograd((32, 31, 3, 3), (8, 32, 8, 8))
    assert not gains_by_winograd((31, 32, 3, 3), (8, 31, 8, 8))
    assert not gains_by_winograd((32, 32, 3, 1), (8, 32, 8, 8))
    assert not gains_by_winograd((32, 32, 3, 3), (7, 32, 8, 8))  # 28 tiles
    assert gains_by_winograd((32, 32, 3, 3), (8, 32, 7, 7))
    assert not gains_by_winograd((32, 32, 3, 3), (8, 32, 5, 6))
    assert not gains_by_winograd((32, 32, 3, 3), (8, 32, -1, -1))


# What it says of a step, and with which others it goes


def test_it_is_refused_where_no_such_convolution_is():
    others = [wide(31, 32), wide(stride=2), wide(dilation=2), wide(64, 64, groups=2), nn.Conv2d(32, 32, 5)]
    others += [Own(32, 32, 3), wide(padding=3), wide(padding_mode="reflect"), nn.Conv1d(32, 32, 3)]
    wanted = r"winograd: no 2-D convolution in float32 has a 3x3 window at a stride of one, in one group"
    with pytest.raises(Refused, match=wanted):
        opened(nn.Sequential(*others))
    layer = wide()
    with opened(nn.Sequential(*others, layer)):
        assert "forward" in vars(layer)
        assert not any("forward" in vars(other) for other in others)


@pytest.mark.parametrize("beside", [{}, {"channels_last": {}}])
def test_it_confirms_by_what_ran_and_is_refused_where_nothing_did(beside):
    model = nn.Sequential(wide(padding=1), wide(32, 40))
    named = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda m, b: m(b).square().mean(),
    }
    seen = []
    for plan in ({}, {**beside, "winograd": {}}):
        with attach(Plan.from_dict(plan), **named) as session:
            found = observe(session, [torch.randn(8, 32, 10, 10)])
            seen.append(dataclasses.replace(found, compiled_graphs=0))  # other tests have compiled here
    if beside:
        told = Winograd().confirm(seen[1], seen[0])
        assert told == "3 feature maps or their gradients, and gradients of 2 weights"
    else:
        with pytest.raises(Refused, match="changed nothing"):
            Winograd().confirm(seen[1], seen[0])


def test_what_the_process_compiled_elsewhere_is_no_evidence():
    seen = Observation({}, {}, 0, 0.0, compiled_graphs=1)
    with pytest.raises(Refused, match="changed nothing"):
        Winograd().confirm(seen, seen)


def attached(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(
        Plan([Winograd()]), model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean()
    )


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_convolution_whose_forward_somebody_has_replaced_is_left_alone(name):
    layer, calls = wide(padding=1), []
    own = getattr(layer, name)
    setattr(layer, name, lambda *given: calls.append(1) or own(*given))
    with pytest.raises(Refused, match="no 2-D convolution in float32"):
        attached(nn.Sequential(layer))
    with attached(nn.Sequential(layer, wide(padding=1))) as session:
        session.model(images(8, 32, 8, 8))
    assert calls == [1]


def test_weights_in_double_precision_are_refused():
    with pytest.raises(Refused, match="no 2-D convolution in float32"):
        attached(nn.Sequential(wide(padding=1)).double())


def test_it_is_refused_where_the_script_lets_products_round():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(Refused, match="lets matrix products in float32 round as bf16"):
            attached(nn.Sequential(wide(padding=1)))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_maps_in_the_usual_order_meet_weights_in_channels_last_as_in_the_library():
    layer, x = wide(padding=1).to(memory_format=torch.channels_last), torch.randn(8, 32, 8, 8)
    wanted = layer(x)
    found = operators.convolution(layer, x)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_step_of_the_persons_own_finds_it_inside_the_step_alone():
    layer, x, kinds = wide(padding=1), images(8, 32, 8, 8), []

    def step(batch):
        loss = layer(batch)
        kinds.append(type(loss.grad_fn).__name__)
        loss.sum().backward()

    with attach(Plan([Winograd()]), step=step, models=[layer]) as session:
        session.step(x)
        assert "forward" not in vars(layer)
        session.step(x)
        session.close()
    assert kinds == [OURS] * 2


def test_it_is_proposed_where_such_convolutions_run():
    profile, machine = plain_profile(), this_machine()
    plain, units = (
        dataclasses.replace(machine, devices=(dataclasses.replace(machine.device, features=features),))
        for features in (("avx2", "avx512_bf16"), ("avx2", "avx512_bf16", "amx_bf16"))
    )
    assert Winograd.candidates(profile, plain) == [Winograd()]
    assert Winograd.candidates(profile, units) == []
    low, high = Winograd.gain(profile, machine)
    assert low < 1 < high
    assert Winograd().company(profile, machine) == [{"channels_last": {}}, {}]
    profile.features["winograd_convolutions"] = 0.0
    assert Winograd.candidates(profile, plain) == []
    assert Winograd.gain(profile, machine) == (1.0, 1.0)


@pytest.mark.parametrize("other", ["bf16_autocast", "fp16_autocast"])
def test_two_precisions_exclude_each_other(other):
    with pytest.raises(
        PlanError, match=rf"'{other}' and 'winograd' exclude each other \(precision\): keep one"
    ):
        Plan.from_dict({"winograd": {}, other: {}})


@pytest.mark.parametrize(("cheap", "extra"), [(["*"], 0), ([], 1)])
def test_where_only_the_cheap_runs_again_it_does_not(cheap, extra, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(wide(padding=1), nn.ReLU()) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    own, model, ran = operators._run, Net(), []
    monkeypatch.setattr(operators, "_run", lambda name, *given: ran.append(name) or own(name, *given))
    counts = []
    for others in ({"channels_last": {}}, {"channels_last": {}, "checkpoint": {"cheap": cheap}}):
        ran.clear()
        with opened(copy.deepcopy(model), **others) as session:
            session.step(images(8, 32, 8, 8))
        counts.append(ran.count("planes_of_weights"))  # once for each map, forward or backward
    assert counts[1] == counts[0] + 4 * extra


def trained(plan, start, batches):
    """Losses of a few steps, and the operators of one more."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])  # noqa: E731
    with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
        losses = [float(session.step(batch)) for batch in batches]
        ran = operators_of(lambda: session.step(batches[0]))
    return losses, ran


def small_network():
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), wide(32, 64, padding=1)
    more = nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 32, 1), wide(32, 48, padding="same")
    return nn.Sequential(*layers, *more, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5))


@pytest.mark.parametrize("others", [["channels_last"], ["channels_last", "host_allocator", "conv_gemm"]])
def test_beside_others_the_losses_are_strict_float32s_up_to_rounding(others):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(5, (8,))) for _ in range(4)]
    start = small_network()
    plain, none = trained({}, start, batches)
    losses, ran = trained({**{name: {} for name in others}, "winograd": {}}, start, batches)
    assert none == {}
    assert (ran[MAPS], ran[WEIGHTS]) == (4, 2)
    assert losses == pytest.approx(plain, rel=1e-4)


# The compiler


@pytest.fixture
def no_kernels_yet(monkeypatch, tmp_path):
    """An empty cache folder, and nothing loaded; afterwards this process loads its own kernels again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.cache_clear()
    yield tmp_path
    compiled.cache_clear()


def test_without_a_compiler_it_refuses(monkeypatch, no_kernels_yet):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    layer = wide()
    with pytest.raises(
        Refused,
        match=r"winograd: its kernels could not be compiled: gcc is needed, and neither gcc nor g\+\+",
    ):
        opened(layer)
    assert "forward" not in vars(layer)


def test_kernels_that_lack_memory_raise_no_wrong_numbers(monkeypatch):
    monkeypatch.setattr(operators, "library", lambda: SimpleNamespace(planes_of_weights=lambda *given: 1))
    with pytest.raises(MemoryError, match="no memory left"):
        operators._winograd(images(1, 2, 4, 4), torch.randn(2, 2, 3, 3), None, [1, 1], False)


@pytest.mark.parametrize("architecture", ["x86-64", "haswell"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
def test_narrower_vectors_give_the_same(architecture, monkeypatch, tmp_path):
    """Four and eight channels at a time, as on processors without AVX or AVX-512."""
    flags = [flag.replace("native", architecture) for flag in c_code.FLAGS]
    subprocess.run(["gcc", *flags, str(operators.SOURCE), "-o", str(tmp_path / "it.so")], check=True)
    if architecture == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    x, weight, bias = images(3, 37, 13, 11), torch.randn(21, 37, 3, 3), torch.randn(21)
    gradient = images(3, 21, 15, 9)

    def every():
        forward = operators._winograd(x, weight, bias, [2, 0], False)
        backward = operators._winograd(gradient, weight, None, [0, 2], True)
        return forward, backward, operators._winograd_weights(gradient, x, weight, [2, 0])

    wanted = every()
    monkeypatch.setattr(operators, "library", lambda: ctypes.CDLL(str(tmp_path / "it.so")))
    for one, other in zip(every(), wanted, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


def test_the_kernels_read_and_write_their_own_memory_alone(tmp_path):
    """At all edges of small maps, with sanitizers, in a program of its own."""
    made, program = tmp_path / "edges", Path(__file__).with_name("winograd_edges.c")
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Wno-psabi"]
    flags = [
        "-O1",
        "-g",
        "-march=native",
        "-fopenmp",
        f"-I{operators.SOURCE.parent}",
        f"-I{c_code.HEADER.parent}",
    ]
    built = subprocess.run(
        ["gcc", *flags, *checks, str(program), "-o", str(made), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert (built.returncode, built.stderr) == (0, "")
    surroundings = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # which needs rights that not all have
    done = subprocess.run([str(made)], env=surroundings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# What PyTorch's tools know of the operators


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(7, 6), (1, 3)])
def test_fake_tensors_have_the_operators_shapes_and_strides(order, size):
    whole = in_order(torch.randn(2, 10, *size), order)
    bias, padding = torch.randn(6), [1, 2]
    for weight in (torch.randn(6, 5, 3, 3), torch.randn(6, 5, 3, 3).to(memory_format=LAST)):
        for x in (whole[:, :5].clone(), whole[:, ::2]):  # the clone is as dense as the whole
            gradient = in_order(nn.functional.conv2d(x, weight, None, 1, padding), order)
            torch.library.opcheck(torch.ops.vivace.winograd.default, (x, weight, bias, padding, False))
            torch.library.opcheck(torch.ops.vivace.winograd.default, (gradient, weight, None, [1, 0], True))
            torch.library.opcheck(torch.ops.vivace.winograd_weights.default, (gradient, x, weight, padding))


@pytest.mark.slow
def test_compiled_it_trains_the_same_model():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(5, (8,))) for _ in range(3)]
    start = small_network()
    plain, _ = trained({}, start, batches)
    losses, ran = trained({"channels_last": {}, "winograd": {}, "compile": {}}, start, batches)
    assert (ran[MAPS], ran[WEIGHTS]) == (4, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert losses == pytest.approx(plain, rel=1e-4)
