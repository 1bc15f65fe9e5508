import copy
from typing import ClassVar

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from vivace.errors import Refused
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.techniques.conv_gemm.columns import convolution_by_columns
from vivace.testing import TINY_JOBS, TechniqueContract

ConvGemm = registry.find("conv_gemm")


def with_layers(*sizes, **options):
    """The tiny network with images, and convolutions behind its first."""
    job = TINY_JOBS["cnn"]()
    model = job.model

    def build():
        layers = list(model())
        between = [nn.Conv2d(*size, bias=False, **options) for size in sizes]
        return nn.Sequential(layers[0], *between, *layers[1:])

    return Job(**{**vars(job), "model": build})


def bottleneck():
    return with_layers((8, 8, 1))


def windows():
    return with_layers((8, 16, 1), (16, 16, 3), (16, 8, 1), padding="same")


@pytest.mark.usefixtures("one_thread")
class TestConvGemm(TechniqueContract):
    technique = ConvGemm
    jobs: ClassVar = {**TINY_JOBS, "bottleneck": bottleneck, "windows": windows}


def opened(model, window_pixels=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(
        Plan([ConvGemm(window_pixels)]),
        model=model,
        optimizer=optimizer,
        loss=lambda m, b: m(b).square().mean(),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": (1, 2)}])
@pytest.mark.parametrize("window", [1, 3])
def test_values_gradients_and_memory_order_are_the_convolutions(bias, order, options, window):
    options = {"bias": bias, "padding": window // 2, **options}
    model = nn.Sequential(nn.Conv2d(16, 17, window, **options), nn.Conv2d(17, 4, 1)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 16, 4, 3, dtype=torch.float64).to(memory_format=order)
    with opened(model, window_pixels=100):
        with torch.profiler.profile() as profiler:
            inner = model[0](x)
        ran = {row.key for row in profiler.key_averages()}
        assert ("aten::convolution" in ran) == (window == 1 and order == torch.contiguous_format)
        assert inner.is_contiguous(memory_format=order)
        torch.testing.assert_close(inner, plain[0](x))
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert not any("forward" in vars(m) for m in model.modules())


@settings(max_examples=60, deadline=None)
@given(
    data=st.tuples(*[st.integers(1, 3)] * 4),
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    padding=st.one_of(st.just("same"), st.just("valid"), st.tuples(st.integers(0, 3), st.integers(0, 3))),
    bias=st.booleans(),
)
def test_windows_give_the_convolutions_values_and_gradients(data, size, padding, bias):
    high, wide, down, across = data
    assume(padding != "same" or (high % 2 and wide % 2))  # else one side has more zeros
    assume((high, wide) != (1, 1) or padding in ("same", "valid", (0, 0)))
    stride = (1, 1) if padding == "same" else (down, across)
    convolution = nn.Conv2d(16, 17, (high, wide), stride=stride, padding=padding, bias=bias).double()
    model, plain = nn.Sequential(convolution), copy.deepcopy(convolution)
    x = torch.randn(2, 16, *size, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with opened(model, window_pixels=400):
        (found, expected) = model(x), plain(other)
        torch.testing.assert_close(found, expected)
        shape = torch.randn_like(expected)
        (found * shape).sum().backward()
        (expected * shape).sum().backward()
    for mine, theirs in zip([x, *model.parameters()], [other, *plain.parameters()], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_gradient_of_gradients_is_the_convolutions():
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    for stride in [(1, 1), (2, 2)]:

        def convolved(x, weight, stride=stride):
            return convolution_by_columns(x, weight, None, stride, (1, 1))

        assert torch.autograd.gradcheck(convolved, (x, weight))
        assert torch.autograd.gradgradcheck(convolved, (x, weight))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [1, 3])
def test_a_result_may_be_changed_in_place_or_viewed(window, order):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(16, 16, window, padding="same", bias=False)
            self.second = copy.deepcopy(self.first)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.second(self.relu(self.first(x)))
            out += x
            return out.view(len(x), -1) if order == torch.contiguous_format else out

    model, x = Residual().double(), torch.randn(2, 16, 4, 4, dtype=torch.float64).to(memory_format=order)
    plain = copy.deepcopy(model)
    with opened(model, window_pixels=100):
        found, expected = (one(x) for one in (model, plain))
        torch.testing.assert_close(found, expected)
        shape = torch.randn_like(expected)
        (found * shape).sum().backward()
        (expected * shape).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # in make_dual
@pytest.mark.parametrize("window", [1, 3])
def test_transforms_of_functions_and_derivatives_forward_are_the_convolutions(window):
    layer = nn.Conv2d(16, 16, window, padding=window // 2)
    x = torch.randn(3, 16, 4, 4).to(memory_format=torch.channels_last)
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
    with opened(nn.Sequential(layer), window_pixels=100):
        for mine, theirs in zip(every(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("window", "later"),
    [
        (1, {"padding": (1, 1)}),
        (1, {"groups": 2}),
        (3, {"dilation": (2, 2)}),
        (3, {"groups": 2}),
        (3, {"padding_mode": "reflect"}),
    ],
)
def test_settings_may_change_later(window, later):
    layer = nn.Conv2d(16, 16, window, padding=window // 2)
    x = torch.randn(1, 16, 6, 6).to(memory_format=torch.channels_last)
    with opened(nn.Sequential(layer), window_pixels=100):
        if "groups" in later:
            layer.weight = nn.Parameter(layer.weight[:, :8].detach().clone())
        for name, value in later.items():
            setattr(layer, name, value)
        torch.testing.assert_close(layer(x), nn.Conv2d.forward(layer, x))


def test_autocast_rounds_windows_as_it_rounds_convolutions():
    x, weight, bias = torch.randn(2, 16, 5, 5), torch.randn(16, 16, 3, 3, requires_grad=True), torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        found = convolution_by_columns(x, weight, bias, (1, 1), (1, 1))
        expected = nn.functional.conv2d(x, weight, bias, padding=1)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)  # a bfloat16 has eight bits
    (gradient,) = torch.autograd.grad(found.float().sum(), weight)
    assert gradient.dtype == torch.float32


def test_windows_of_a_large_map_stay_convolutions_and_evaluation_too():
    model = nn.Sequential(nn.Conv2d(16, 16, 3))

    def convolutions(pixels):
        with torch.profiler.profile() as profiler:
            model(torch.randn(1, 16, pixels + 2, pixels + 2))
        return sum(row.count for row in profiler.key_averages() if row.key == "aten::convolution")

    with opened(model, window_pixels=9):
        assert (convolutions(3), convolutions(4)) == (0, 1)
        model.eval()
        assert convolutions(3) == 1


def test_other_convolutions_are_left_alone():
    layers = [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(16, 16, 3, dilation=2),
        nn.Conv2d(16, 16, 3, padding_mode="reflect", padding=1),
        nn.Conv2d(16, 16, 2, padding="same"),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
    ]
    with pytest.raises(Refused, match=r"no 2-D convolution of one group .* has a 1x1 window"):
        opened(nn.Sequential(nn.Conv2d(16, 16, 3)))
    with pytest.raises(Refused, match="window_pixels is -5; it must be 0 or more"):
        opened(nn.Sequential(*layers), window_pixels=-5)
    with pytest.raises(Refused, match="16 channels or more"):
        opened(nn.Sequential(*layers), window_pixels=64)
    with opened(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), window_pixels=64) as session:
        assert session.build.notes["convolutions_as_products"] == [1, 0]


def test_it_confirms_by_the_products_that_ran_whatever_else_replaces_convolutions():
    before = Observation({"aten::convolution": 3}, {}, 0, 0.0)
    after = Observation({"aten::convolution": 2}, {}, 0, 0.0, notes={"convolutions_as_products": [1, 0]})
    with pytest.raises(Refused, match="changed nothing"):
        ConvGemm().confirm(after, before)
    after.notes["convolutions_as_products"][1] += 1
    assert ConvGemm().confirm(after, before) == "up to 1 convolution ran as matrix products"


def test_it_counts_the_products_of_a_step():
    layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    with opened(layers) as session:
        layers(torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last))
        assert session.build.notes["convolutions_as_products"] == [1, 1]


def test_a_convolution_with_a_forward_of_its_own_stays():
    """As those that standardise their weights, or pad what they are given."""

    class Standardised(nn.Conv2d):
        def forward(self, x):
            return nn.functional.conv2d(x, self.weight - self.weight.mean(), self.bias)

    with pytest.raises(Refused, match="no 2-D convolution of one group"):
        opened(nn.Sequential(Standardised(4, 4, 1)))
    found = []
    for plan in (Plan(), Plan([ConvGemm()])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1), Standardised(4, 4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean = lambda m, b: m(b).square().mean()  # noqa: E731
        with attach(plan, model=model, optimizer=optimizer, loss=mean) as session:
            found.append([float(session.step(torch.ones(2, 3, 4, 4))) for _ in range(3)])
    assert found[1] == pytest.approx(found[0])


@pytest.mark.parametrize("name", ["conv_gemm", "padded_stem", "channels_last"])
def test_a_convolution_may_be_given_its_input_by_name(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 1)

        def forward(self, images):
            return self.convolution(input=images)

    model, images = Named(), torch.randn(2, 3, 4, 4)
    wanted = model(images)
    more = {"weights": False} if name == "channels_last" else {}
    plan = Plan.from_dict({name: more})
    with attach(plan, step=lambda batch: None, models=[model]):
        torch.testing.assert_close(model(images), wanted)


def test_windows_of_complex_convolutions_stay_the_librarys():
    made = nn.Conv2d(16, 16, 3, dtype=torch.complex64), nn.Conv2d(16, 16, 3)
    with opened(nn.Sequential(*made), window_pixels=100) as session:
        assert session.build.notes["convolutions_as_products"] == [1, 0]
        assert ["forward" in vars(one) for one in made] == [False, True]
