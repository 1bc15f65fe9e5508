"""Narrow 1x1 convolutions at a stride train soundly in channels-last order on a CPU."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vivace.live.hosted import Hosted
from vivace.mechanisms.strided import BLOCK
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique.registry import find
from vivace.testing.contract import this_machine

TORCHS_OWN = torch.conv2d


class Convolutions(TorchDispatchMode):
    """Of each convolution of the library: input channels, window, stride, and whether it was NHWC."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        if operator is torch.ops.aten.convolution.default:
            image, weight, _, stride = arguments[:4]
            order = image.stride(1) < image.shape[-1]
            self.seen.append((weight.shape[1], weight.shape[2], stride[0], order))
        return operator(*arguments, **(named or {}))


def model(**options):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 1, stride=2, **options), nn.ReLU(), nn.Conv2d(8, 16, 1, stride=3)
    return nn.Sequential(*layers, nn.Conv2d(16, 4, 1, stride=2))


def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()


def gradients_in_float64():
    exact = model().double()
    loss(exact, images().double()).backward()
    return [parameter.grad for parameter in exact.parameters()]


def assert_right(gradients):
    for gradient, exact in zip(gradients, gradients_in_float64(), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-6)


def trained(plan, net, batch):
    """The convolutions of a session's step, which takes each weight's gradient from it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(plan, model=net, optimizer=optimizer, loss=loss) as session, Convolutions() as convolutions:
        session.step(batch)
    return convolutions.seen


def test_in_channels_last_order_they_read_the_pixels_that_they_use():
    net = model()
    seen = trained(Plan([find("channels_last")()]), net, images())
    assert seen == [(3, 1, 1, True), (8, 1, 1, True), (16, 1, 2, True)]  # of a whole block it stays as it is
    assert_right(before - after for before, after in zip(model().parameters(), net.parameters(), strict=True))
    assert torch.conv2d is nn.functional.conv2d is TORCHS_OWN


class Standardized(nn.Conv2d):
    """With a weight that its forward computes, as in networks without BatchNorm."""

    def forward(self, input):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding)


class Called(nn.Module):
    """A convolution that is no layer."""

    def __init__(self):
        super().__init__()
        self.before, self.weight = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.randn(8, 3, 1, 1))

    def forward(self, input):
        return torch.conv2d(self.before(input), self.weight, None, 2, (1, 2))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", ["standardized", "called", "one image", "padded"])
def test_however_they_are_called(kind, weights):
    torch.manual_seed(0)
    net = {"standardized": lambda: Standardized(3, 8, 1, stride=2), "called": Called}.get(
        kind, lambda: nn.Conv2d(3, 8, 1, stride=2)
    )()
    net, batch = nn.Sequential(net), images()[..., :31, :31]  # of this size oneDNN writes nothing past it
    batch = batch[0] if kind == "one image" else batch
    before, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    loss(exact, batch.double()).backward()
    names = ["padded_stem"] if kind == "padded" else []
    plan = Plan([find("channels_last")(weights=weights), *(find(name)() for name in names)])
    if kind == "called" and not weights:
        batch = batch.to(memory_format=torch.channels_last)
    seen = trained(plan, net, batch)
    assert seen[-1][1:3] == (1, 1)
    for old, new, truth in zip(before.parameters(), net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close((old - new).double(), truth.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_model_is_scripted_meanwhile_as_ever():
    net, batch = model(), images()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(Plan([find("channels_last")()]), model=net, optimizer=optimizer, loss=loss):
        assert torch.conv2d is not TORCHS_OWN
        scripted = torch.jit.script(net)
        torch.testing.assert_close(scripted(batch), net(batch))
    assert "aten::conv2d" in str(scripted.inlined_graph)


def test_in_the_usual_order_and_in_the_job_as_it_is_they_stay_as_they_are():
    usual = [(3, 1, 2, False), (8, 1, 3, False), (16, 1, 2, False)]
    assert trained(Plan([find("fused_optimizer")()]), model(), images()) == usual
    net, batch = model(), images().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(Plan([]), model=net, optimizer=optimizer, loss=loss), Convolutions() as convolutions:
        net(batch)  # and no gradients, which on some processors end the process
    assert convolutions.seen[0] == (3, 1, 2, True)


def test_on_a_loop_that_vivace_does_not_run_too():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    plan = Plan([find("channels_last")(weights=False)])
    hosted = Hosted(plan, net, optimizer, this_machine())
    with Convolutions() as convolutions:
        result = hosted.call(net.forward, (images().to(memory_format=torch.channels_last),), {})
        result.square().mean().backward()
    hosted.close()
    assert torch.conv2d is nn.functional.conv2d is TORCHS_OWN
    narrow = [stride for channels, _, stride, order in convolutions.seen if order and channels < BLOCK]
    assert narrow == [1, 1]
    assert_right(parameter.grad for parameter in net.parameters())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_those_that_pad_read_the_pixels_that_they_use_too(mode):
    options = {"padding": (1, 2), "padding_mode": mode}
    net, exact = model(**options), model(**options).double()
    loss(exact, images().double()).backward()
    before = copy.deepcopy(net)
    seen = trained(Plan([find("channels_last")()]), net, images())
    assert seen[0][:3] == (3, 1, 1)
    for old, new, wanted in zip(before.parameters(), net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close((old - new).double(), wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "names", [["channels_last"], ["channels_last", "conv_gemm"], ["channels_last", "depthwise_gradients"]]
)
def test_settings_may_be_one_number_for_rows_and_columns(names):
    torch.manual_seed(0)
    narrow, depthwise = nn.Conv2d(3, 8, 1, stride=2), nn.Conv2d(8, 8, 5, padding=2, groups=8)
    net = nn.Sequential(narrow, depthwise, nn.Conv2d(8, 4, 1))
    plain = copy.deepcopy(net).double()
    for model in (net, plain):
        for layer in model:
            layer.stride, layer.padding, layer.dilation = layer.stride[0], layer.padding[0], layer.dilation[0]
    loss(plain, images().double()).backward()
    before = copy.deepcopy(net)
    trained(Plan([find(name)() for name in names]), net, images())
    for old, new, exact in zip(before.parameters(), net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close((old - new).double(), exact.grad, rtol=1e-3, atol=1e-6)


class Named(nn.Conv2d):
    """A convolution of a person's own, which does what torch's does."""


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "subclass", "one's own"])
def test_computed_weights_and_subclasses_too(name):
    class Own(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - 1, bias)

    torch.manual_seed(0)
    kind = {"subclass": Named, "one's own": Own}.get(name, nn.Conv2d)
    layer = kind(3, 8, 1, stride=2)
    if name.endswith("norm"):
        layer = getattr(nn.utils.parametrizations, name)(layer)
    net, batch = nn.Sequential(layer), images()[..., :31, :31]  # of this size oneDNN writes nothing past it
    exact = copy.deepcopy(net).double()
    before = copy.deepcopy(net)
    loss(exact, batch.double()).backward()
    seen = trained(Plan([find("channels_last")()]), net, batch)
    assert [one[2] for one in seen] == [1]
    for old, new, truth in zip(before.parameters(), net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close((old - new).double(), truth.grad, rtol=1e-3, atol=1e-6)
    for one, other in zip(net.buffers(), exact.buffers(), strict=True):  # of the norm, which moves in a call
        torch.testing.assert_close(one.double(), other)


@pytest.mark.parametrize("weight", ["plain", "weight_norm"])
@pytest.mark.parametrize(
    ("image", "stride"),
    [
        (images(), 2),
        (torch.randn(2, 3, 32, 1), 2),
        (images().to(memory_format=torch.channels_last), 1),
        (torch.randn(2, 192, 32, 32).to(memory_format=torch.channels_last)[:, ::64], 1),
        (torch.randn(2, 32, 1, 3).permute(0, 3, 1, 2), 1),  # NHWC maps of one pixel's width
    ],
    ids=["NCHW", "narrow NCHW", "NHWC", "part of NHWC", "narrow NHWC"],
)
def test_they_stay_as_they_are_only_where_the_order_is_surely_the_usual(image, stride, weight):
    layer = nn.Conv2d(3, 8, 1, stride=2)
    if weight == "weight_norm":
        layer = nn.utils.parametrizations.weight_norm(layer)
    seen = trained(Plan([find("fused_optimizer")()]), nn.Sequential(layer), image)
    assert [one[2] for one in seen] == [stride]


@pytest.mark.slow
def test_compiled_steps_do_not_end_the_process():
    code = """
        import copy, torch, vivace
        from torch import nn
        from vivace.plan import Plan
        from vivace.technique.registry import find
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 48, 1, stride=2, bias=False), nn.Hardtanh())
        image, loss = torch.randn(8, 3, 128, 128), lambda model, batch: model(batch).square().mean()
        doubled = copy.deepcopy(net).double()
        (exact,) = torch.autograd.grad(loss(doubled, image.double()), [doubled[0].weight])
        before = net[0].weight.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        with vivace.attach(Plan([find("compile")()]), model=net, optimizer=optimizer, loss=loss) as session:
            for turn in range(10):
                with torch.no_grad():
                    net[0].weight.copy_(before)
                session.step(image)
                others = [torch.randn(100 * size + turn) for size in range(50)]
        print(float((before - net[0].weight - exact).abs().max() / exact.abs().max()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert float(ended.stdout) < 1e-3
