"""Gradients of depthwise convolutions by kernels of our own: values, order, bits, what is left alone."""

import copy
import ctypes
import dataclasses
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vivace
from vivace.errors import Refused
from vivace.job import Job
from vivace.ledger import Observation
from vivace.mechanisms import c_code
from vivace.mechanisms.c_code import compiled
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.techniques.depthwise_gradients import operators
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile, this_machine

from .convolving import in_order, results

DepthwiseGradients = registry.find("depthwise_gradients")
WEIGHTS, INPUT = "vivace::depthwise_weights", "vivace::depthwise_input"
OURS = "_DepthwiseBackward"  # what autograd calls a result of the technique


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


def depthwise_layer(channels, window, **options):
    return nn.Conv2d(channels, channels, window, groups=channels, **options)


def depthwise():
    """The tiny network with images, and a depthwise convolution behind its first layer."""
    job = TINY_JOBS["cnn"]()
    model = job.model

    def build():
        layers = list(model())
        return nn.Sequential(layers[0], depthwise_layer(8, 5, padding=2), *layers[1:])

    return Job(**{**vars(job), "model": build})


@pytest.mark.usefixtures("one_thread")
class TestDepthwiseGradients(TechniqueContract):
    technique = DepthwiseGradients
    jobs: ClassVar = {**TINY_JOBS, "depthwise": depthwise}


def opened(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan([DepthwiseGradients()])
    return attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean())


def operators_of(function):
    """The operators of Vivace's that run in it."""
    with torch.profiler.profile() as profiler:
        function()
    return {row.key for row in profiler.key_averages() if row.key.startswith("vivace::")}


@st.composite
def convolutions(draw):
    """A depthwise convolution, a batch for it, and what its output's gradient is."""
    channels = draw(st.one_of(st.integers(2, 15), st.sampled_from([16, 17, 31, 40])))
    window, dilation = draw(pairs(1, 9)), draw(pairs(1, 3))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), pairs(0, 5)))
    stride = (1, 1) if padding == "same" else draw(pairs(1, 3))
    if padding == "same":  # an odd number of zeros is torch's to divide among both sides
        window = tuple(k + (k - 1) * d % 2 for k, d in zip(window, dilation, strict=True))
    zeros = (0, 0) if padding == "valid" else padding
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    least = [1, 1] if padding == "same" else [max(1, r - 2 * z) for r, z in zip(reach, zeros, strict=True)]
    size = [low + more for low, more in zip(least, draw(pairs(0, 9)), strict=True)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "bias": draw(st.booleans())}
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layer = depthwise_layer(channels, window, **options)
    orders = [draw(st.sampled_from([(0, 1, 2, 3), (0, 3, 1, 2), (0, 1, 3, 2)])) for _ in range(2)]
    x = in_order(torch.randn(draw(st.integers(0, 3)), channels, *size), orders[0])
    gradient = in_order(torch.randn_like(layer(x)), orders[1])
    return layer, x, gradient


def assert_near(found, layer, x, gradient, rounding):
    """Within `rounding` times the sum of the products' absolute values, which is what sums round by."""
    exact = copy.deepcopy(layer).double()
    expected = results(exact, x.double(), gradient.double())
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.abs_()
    sizes = results(exact, x.double().abs(), gradient.double().abs())
    for mine, theirs, size in zip(found, expected, sizes, strict=True):
        assert mine.shape == theirs.shape
        excess = (mine.double() - theirs).abs() - rounding * size
        assert excess.numel() == 0 or float(excess.max()) <= 1e-12


@settings(max_examples=150, deadline=None)
@given(convolutions())
def test_values_and_gradients_are_the_plain_modules(case):
    layer, x, gradient = case
    with opened(nn.ModuleList([layer, depthwise_layer(2, 5)])):
        found = results(layer, x, gradient)
    assert "forward" not in vars(layer)
    assert_near(found, layer, x, gradient, rounding=2**-18)


@settings(max_examples=100, deadline=None)
@given(convolutions())
def test_in_bfloat16_they_are_right_up_to_its_rounding(case):
    layer, x, gradient = case
    rounded = copy.deepcopy(layer).bfloat16().float()  # as autocast rounds
    x, gradient = x.bfloat16().float(), gradient.bfloat16().float()
    with opened(nn.ModuleList([layer, depthwise_layer(2, 5)])), torch.autocast("cpu", torch.bfloat16):
        found = results(layer, x, gradient)
    assert found[0].dtype == torch.bfloat16
    assert {one.dtype for one in found[1:]} == {torch.float32}
    # What stays the library's rounds once more where the processor has no units for bfloat16.
    assert_near(found, rounded, x, gradient, rounding=2**-6)


@pytest.mark.parametrize(
    ("options", "in_float32", "in_bfloat16"),
    [
        ({"window": 3}, set(), set()),
        ({"window": 3, "stride": 2}, set(), {INPUT}),
        ({"window": 3, "dilation": 2}, {WEIGHTS, INPUT}, {WEIGHTS, INPUT}),
        ({"window": 5}, {WEIGHTS}, {WEIGHTS}),
        ({"window": (1, 7)}, {WEIGHTS}, {WEIGHTS}),
        ({"window": 5, "stride": (1, 2)}, {WEIGHTS}, {WEIGHTS, INPUT}),
    ],
)
def test_a_gradient_is_the_kernels_where_the_library_is_slow(options, in_float32, in_bfloat16):
    layer, x = depthwise_layer(20, options.pop("window"), **options), torch.randn(2, 20, 12, 12)
    with opened(nn.ModuleList([layer, depthwise_layer(2, 5)])):
        for enabled, expected in [(False, in_float32), (True, in_bfloat16)]:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                ones = torch.ones_like(layer(x))
                assert operators_of(lambda ones=ones: results(layer, x, ones)) == expected


def test_bits_do_not_depend_on_the_number_of_threads():
    layer, x = depthwise_layer(50, 5, stride=2, padding=2), torch.randn(9, 50, 23, 23)
    before, found = torch.get_num_threads(), {}
    try:
        for half in (False, True):
            with opened(layer), torch.autocast("cpu", torch.bfloat16, enabled=half):
                for threads in (1, 2, 2):
                    torch.set_num_threads(threads)
                    gradient = torch.linspace(-1, 1, 9 * 50 * 12 * 12).view(9, 50, 12, 12)
                    again = results(layer, x, gradient)[1:]
                    for one, other in zip(again, found.setdefault(half, again), strict=True):
                        assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


def test_one_number_may_stand_for_rows_and_columns():
    options = {"stride": (2,), "padding": (2,), "dilation": (2,), "bias": False}
    layer, x, gradient = depthwise_layer(4, 9, **options), torch.randn(2, 4, 19, 19), torch.randn(2, 4, 4, 4)
    with opened(layer):
        assert_near(results(layer, x, gradient), layer, x, gradient, rounding=2**-18)


@pytest.mark.parametrize("wanted", ["input", "weights", "bias"])
def test_only_the_wanted_gradient_is_computed(wanted):
    layer, plain = (depthwise_layer(6, 5, dilation=2) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 12, 12)
    with opened(layer):
        for module in (layer, plain):
            module.weight.requires_grad_(wanted == "weights")
            module.bias.requires_grad_(wanted == "bias")
        mine, theirs = (
            [x.clone().requires_grad_(wanted == "input"), m.weight, m.bias] for m in (layer, plain)
        )
        ran = operators_of(lambda: layer(mine[0]).square().sum().backward())
    plain(theirs[0]).square().sum().backward()
    assert ran == {"input": {INPUT}, "weights": {WEIGHTS}, "bias": set()}[wanted]
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_evaluation_single_images_other_formats_and_devices_are_the_modules_own():
    layer = depthwise_layer(4, 5)
    x = torch.randn(1, 4, 8, 8)
    with opened(layer):
        assert type(layer(x).grad_fn).__name__ == OURS
        assert type(layer(input=x).grad_fn).__name__ == OURS
        assert type(layer(x[0]).grad_fn).__name__ != OURS
        layer.eval()
        assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
        layer.train()
        without_memory = copy.deepcopy(layer).to("meta")
        assert type(without_memory(x.to("meta")).grad_fn).__name__ == "ConvolutionBackward0"
        layer.double()
        assert type(layer(x.double()).grad_fn).__name__ == "ConvolutionBackward0"
        layer.float()
        with torch.autocast("cpu", torch.float16):
            assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
    assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"


def test_other_convolutions_are_left_alone():
    class Own(nn.Conv2d):
        """With a forward that does something else with its weights."""

        def forward(self, x):
            return nn.functional.conv2d(x, self.weight - 1, self.bias, groups=self.groups)

    others = [
        nn.Conv2d(4, 4, 5),
        nn.Conv2d(4, 4, 5, groups=2),
        nn.Conv2d(4, 8, 5, groups=4),
        nn.Conv2d(1, 1, 5),
        depthwise_layer(4, 3),
        depthwise_layer(4, 5, padding=2, padding_mode="reflect"),
        depthwise_layer(4, 4, padding="same"),
        Own(4, 4, 5, groups=4),
    ]
    wanted = (
        r"depthwise_gradients: no 2-D convolution is depthwise with a window of more than 3x3, a stride or"
    )
    with pytest.raises(Refused, match=wanted):
        opened(nn.Sequential(*others))
    layer = depthwise_layer(4, 5)
    with opened(nn.Sequential(*others, layer)) as session:
        assert session.build.notes["depthwise_convolutions"] == 1
        assert "forward" in vars(layer)
        assert not any("forward" in vars(other) for other in others)
    assert "forward" not in vars(layer)


def test_a_step_of_the_persons_own_finds_it_inside_the_step_alone():
    layer, x = depthwise_layer(4, 5), torch.randn(1, 4, 8, 8)
    kinds = []

    def step(batch):
        loss = layer(batch)
        kinds.append(type(loss.grad_fn).__name__)
        loss.sum().backward()

    with attach(Plan([DepthwiseGradients()]), step=step, models=[layer]) as session:
        session.step(x)
        assert "forward" not in vars(layer)
        session.step(x)
        session.close()
    assert kinds == [OURS] * 2


@pytest.mark.parametrize("bias", [True, False])
def test_second_derivatives_are_the_convolutions(bias):
    layer, x = depthwise_layer(2, 5, stride=2, bias=bias), torch.randn(1, 2, 6, 6, requires_grad=True)

    def penalty():
        gradients = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, *layer.parameters()])

    expected = penalty()
    with opened(layer):
        assert "Depthwise" in layer(x).grad_fn.name()
        for mine, theirs in zip(penalty(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # in make_dual
def test_transforms_of_functions_and_derivatives_forward_are_the_convolutions():
    layer, x = depthwise_layer(4, 5), torch.randn(3, 4, 8, 8)
    weights = {name: one.detach() for name, one in layer.named_parameters()}

    def loss(weights, image):
        return torch.func.functional_call(layer, weights, (image.unsqueeze(0),)).square().sum()

    def forward():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent

    def every():
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        return [*gradients.values(), forward()]

    expected = every()
    with opened(layer):
        for mine, theirs in zip(every(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_complex_numbers_stay_complex_under_autocast():
    layer, other = depthwise_layer(4, 5, dtype=torch.complex64), depthwise_layer(4, 5)
    x = torch.randn(1, 4, 8, 8, dtype=torch.complex64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        with opened(nn.Sequential(layer, other)):
            torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("later", [{"padding_mode": "reflect"}, {"padding": "same", "kernel_size": (4, 4)}])
def test_settings_may_change_later(later):
    layer, x = depthwise_layer(4, 5, padding=2), torch.randn(1, 4, 8, 8)
    with opened(layer):
        if "kernel_size" in later:
            layer.weight = nn.Parameter(layer.weight[..., :4, :4].detach().clone())
        for name, value in later.items():
            setattr(layer, name, value)
        torch.testing.assert_close(layer(x), nn.Conv2d.forward(layer, x))


def test_another_weight_may_have_more_channels_meanwhile():
    layer, x = depthwise_layer(4, 5, padding=2, bias=False), torch.randn(1, 4, 8, 8)
    weight = torch.randn(8, 1, 5, 5)
    with opened(layer):
        found = torch.func.functional_call(layer, {"weight": weight}, (x,))
    torch.testing.assert_close(found, nn.functional.conv2d(x, weight, padding=2, groups=4))


# What it says of a step


def test_it_confirms_by_the_gradients_that_ran():
    notes = {"depthwise_convolutions": 3}
    seen = Observation({WEIGHTS: 2, INPUT: 1}, {}, 0, 0.0, notes=notes)
    told = DepthwiseGradients().confirm(seen, Observation({}, {}, 0, 0.0))
    assert told == "gradients of 2 weights and 1 inputs of depthwise convolutions"
    compiled = Observation({}, {}, 0, 0.0, compiled_graphs=1, notes=notes)
    assert DepthwiseGradients().confirm(compiled, compiled) == "gradients of up to 3 convolutions"


@pytest.mark.parametrize(("half", "acts"), [(False, False), (True, True)])
def test_strided_windows_of_3x3_gain_in_bfloat16_alone(half, acts):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), depthwise_layer(8, 3, stride=2))
    beside = {"bf16_autocast": {}} if half else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for plan in ({}, {"depthwise_gradients": {}, **beside}):
        named = {"model": model, "optimizer": optimizer, "loss": lambda m, b: m(b).float().square().mean()}
        with attach(Plan.from_dict(plan), **named) as session:
            found = observe(session, [torch.randn(2, 3, 9, 9)])
            seen.append(dataclasses.replace(found, compiled_graphs=0))  # other tests have compiled here
    if acts:
        assert (
            DepthwiseGradients().confirm(seen[1], seen[0]).startswith("gradients of 0 weights and 1 inputs")
        )
    else:
        with pytest.raises(Refused, match="changed nothing"):
            DepthwiseGradients().confirm(seen[1], seen[0])


def test_it_is_proposed_where_such_convolutions_run():
    profile, machine = plain_profile(), this_machine()
    assert DepthwiseGradients.candidates(profile, machine) == [DepthwiseGradients()]
    assert DepthwiseGradients.gain(profile, machine)[1] > 1
    profile.features["slow_depthwise"] = False
    assert DepthwiseGradients.candidates(profile, machine) == []
    assert DepthwiseGradients.gain(profile, machine) == (1.0, 1.0)


# The compiler


@pytest.fixture
def no_kernels_yet(monkeypatch, tmp_path):
    """An empty cache folder, and nothing loaded; afterwards this process loads its own kernels again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.cache_clear()
    yield tmp_path
    compiled.cache_clear()


def compiler_that(folder, text):
    """A program in the place of a compiler. `$real` is the one of this machine."""
    made = folder / "g++"
    made.write_text(f"#!/bin/sh\nreal={shutil.which('g++') or shutil.which('gcc')}\n{text}\n")
    made.chmod(0o755)
    return str(made)


def test_without_a_compiler_it_refuses(monkeypatch, no_kernels_yet):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    layer = depthwise_layer(4, 5)
    with pytest.raises(
        Refused, match=r"could not be compiled: gcc is needed, and neither gcc nor g\+\+ is here"
    ):
        opened(layer)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    "text",
    [
        "echo no such flag >&2; exit 3",
        'case "$*" in *-dM*) exec $real "$@";; esac; echo no such flag >&2; exit 3',
    ],
    ids=["asked", "compiling"],
)
def test_a_compiler_that_fails_is_quoted(monkeypatch, no_kernels_yet, text):
    compiler = compiler_that(no_kernels_yet, text)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    with pytest.raises(Refused, match=r"could not be compiled: .*g\+\+ ends with 3: no such flag"):
        opened(depthwise_layer(4, 5))
    assert [path for path in no_kernels_yet.rglob("*") if path.suffix == ".so"] == []


def test_a_folder_that_cannot_be_written_is_a_reason(monkeypatch, no_kernels_yet):
    (no_kernels_yet / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_kernels_yet / "file"))
    with pytest.raises(Refused, match=r"could not be compiled: .*Not a directory"):
        opened(depthwise_layer(4, 5))


def test_kernels_are_compiled_once_a_machine(monkeypatch, no_kernels_yet):
    with opened(depthwise_layer(4, 5)):
        (made,) = no_kernels_yet.rglob("*.so")
    compiled.cache_clear()
    once = compiler_that(no_kernels_yet, 'case "$*" in *-dM*) exec $real "$@";; esac; exit 3')
    monkeypatch.setattr(shutil, "which", lambda name: once)
    with opened(depthwise_layer(4, 5)):
        assert list(no_kernels_yet.rglob("*.so")) == [made]


SCENE = """
import os
from vivace.techniques.depthwise_gradients.operators import library
os.environ |= {"XDG_CACHE_HOME": f"{FOLDER}/cache", "PATH": f"{FOLDER}:{os.environ['PATH']}"}
library()
"""
SLOWLY = """
case "$*" in *-dM*) exec $real "$@";; esac
for last; do :; done
$real "$@" || exit 1
cp "$last" "$last.whole"; head -c 999 "$last.whole" > "$last"
echo >> FOLDER/half
sleep 1
cat "$last.whole" > "$last"; rm "$last.whole"
"""


def test_processes_that_compile_at_once_leave_one_whole_file(start_scene, tmp_path):
    compiler_that(tmp_path, SLOWLY.replace("FOLDER", str(tmp_path)))
    (tmp_path / "scene.py").write_text(SCENE)
    first = start_scene(tmp_path / "scene.py", FOLDER=str(tmp_path))
    deadline = time.monotonic() + 60
    while not (tmp_path / "half").exists():
        assert time.monotonic() < deadline
        assert first.is_alive()
        time.sleep(0.01)
    second = start_scene(tmp_path / "scene.py", FOLDER=str(tmp_path))  # while half a file has been written
    for process in (first, second):
        process.join(60)
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert Path(tmp_path, "half").read_text() == "\n\n"
    (made,) = Path(tmp_path, "cache", "vivace", "compiled").iterdir()
    assert ctypes.CDLL(str(made)).depthwise_input


# What PyTorch's tools know of the operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 1, 3, 2)])
@pytest.mark.parametrize(("window", "size"), [((5, 3), (7, 6)), ((1, 1), (1, 1))])
def test_fake_tensors_have_the_operators_shapes_and_strides(dtype, order, window, size):
    whole = in_order(torch.randn(2, 10, *size).to(dtype), order)
    weight, where = torch.randn(5, 1, *window).to(dtype), ([2, 1], [1, 1], [1, 1])
    for x in (whole[:, :5].clone(), whole[:, ::2]):  # the clone is as dense as the whole
        gradient = nn.functional.conv2d(x, weight, None, *where, groups=5)
        for operator in (torch.ops.vivace.depthwise_weights, torch.ops.vivace.depthwise_input):
            torch.library.opcheck(operator.default, (gradient, x, weight, *where))


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, {"bf16_autocast": {}}], ids=["float32", "bfloat16"])
def test_compiled_it_trains_the_same_model(beside):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    layers = depthwise_layer(20, 5, padding=2), nn.ReLU(), depthwise_layer(20, 3, stride=2)
    start = nn.Sequential(nn.Conv2d(3, 20, 3), *layers)
    batch = torch.randn(4, 3, 12, 12)
    ends, ran = [], set()
    for plan in (beside, {"depthwise_gradients": {}, "compile": {}, **beside}):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = lambda m, b: (m(b).float() - 1).square().mean()  # noqa: E731
        with vivace.attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
            losses = [float(session.step(batch)) for _ in range(3)]
            ran = operators_of(lambda session=session: session.step(batch))
        ends.append((losses, model.state_dict()))
    assert ran == ({WEIGHTS, INPUT} if beside else {WEIGHTS})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    (plain, expected), (losses, found) = ends
    assert losses == pytest.approx(plain, rel=0.02 if beside else 1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02 if beside else 1e-5)


@pytest.mark.parametrize("channels", [8, 1100])  # of more than 1,024 one sum takes all images
def test_a_large_map_of_positive_numbers_loses_no_small_ones(channels):
    side = 512 if channels == 8 else 40
    layer = depthwise_layer(channels, 5, padding=2)
    x = torch.rand(1, channels, side, side).contiguous(memory_format=torch.channels_last)
    gradient = torch.rand(1, channels, side, side).contiguous(memory_format=torch.channels_last)
    arguments = (gradient, x, layer.weight.detach(), [1, 1], [2, 2], [1, 1])
    found = torch.ops.vivace.depthwise_weights(*arguments)
    wanted = torch.ops.aten.convolution_backward(
        *(one.double() for one in arguments[:3]), None, [1, 1], [2, 2], [1, 1], False, [0, 0], channels,
        [False, True, False],
    )[1]  # fmt: skip
    torch.testing.assert_close(found.double(), wanted, rtol=4e-6, atol=0)


@pytest.mark.parametrize("architecture", ["x86-64", "haswell"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
def test_narrower_vectors_give_the_same(architecture, monkeypatch, tmp_path):
    """Four and eight channels at a time, as on processors without AVX or AVX-512."""
    flags = [flag.replace("native", architecture) for flag in c_code.FLAGS]
    subprocess.run(["gcc", *flags, str(operators.SOURCE), "-o", str(tmp_path / "it.so")], check=True)
    if architecture == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    x = torch.randn(3, 37, 13, 11)
    weight, where = torch.randn(37, 1, 5, 17), ([3, 2], [3, 6], [1, 1])
    gradient = torch.randn_like(torch.conv2d(x, weight, None, *where, 37))
    wanted = [
        operators._depthwise_weights(gradient, x, weight, *where),
        operators._depthwise_input(gradient, x, weight, *where),
    ]
    monkeypatch.setattr(operators, "library", lambda: ctypes.CDLL(str(tmp_path / "it.so")))
    found = [
        operators._depthwise_weights(gradient, x, weight, *where),
        operators._depthwise_input(gradient, x, weight, *where),
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_leaves_float64_as_it_is():
    layer, x = depthwise_layer(4, 5).double(), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    with opened(layer), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float64
