"""Recurrent layers over all steps by C code of our own: values, gradients, rounding, what is left alone."""

import copy
import ctypes
import functools
import os
import pickle
import platform
import shutil
import signal
import subprocess
import threading
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, weight_norm

from vivace.errors import Refused
from vivace.job import Job
from vivace.ledger import Observation
from vivace.mechanisms import c_code
from vivace.mechanisms.c_code import compiled
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.techniques.fused_recurrent import Ran, layers
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile, this_machine
from vivace.torch_internals import recurrent

from .over_steps import assert_near, calls, opened

FusedRecurrent = registry.find("fused_recurrent")
KINDS = {
    "gru": nn.GRU,
    "tanh": functools.partial(nn.RNN, nonlinearity="tanh"),
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Last(nn.Module):
    """A class from the last state of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(16, 4)

    def forward(self, sequences):
        return self.head(self.layer(sequences)[0][:, -1])


class Block(nn.Module):
    """A recurrent layer, and a sum with what came in."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(16, 16, batch_first=True)

    def forward(self, x):
        return x + self.layer(x)[0]


class Several(nn.Module):
    """Blocks that are alike, and a head."""

    def __init__(self, kind):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(kind) for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


def with_layer(kind):
    """The tiny job whose samples are sequences, with another layer."""
    job = TINY_JOBS["lstm"]()
    model = lambda: Last(KINDS[kind](4, 16, batch_first=True))  # noqa: E731
    return lambda: Job(**{**vars(job), "model": model})


@pytest.mark.usefixtures("one_thread")
class TestFusedRecurrent(TechniqueContract):
    technique = FusedRecurrent
    jobs: ClassVar = {**TINY_JOBS, "gru": with_layer("gru"), "rnn": with_layer("tanh")}


def results(layer, x, first=None, of_out=None, of_last=None):
    """Output, last state, and gradients of the input, the first state and all parameters."""
    inputs = [one.detach().requires_grad_() for one in (x, first) if one is not None]
    found = layer(*inputs)
    given = [torch.ones_like(r) if g is None else g for g, r in zip((of_out, of_last), found, strict=True)]
    given = [g.to(r.dtype) for g, r in zip(given, found, strict=True)]
    gradients = torch.autograd.grad(found, [*inputs, *layer.parameters()], given)
    return [*(one.detach() for one in found), *gradients]


def ours(layer, *arguments):
    """The same, by the technique."""
    with opened(layer) as session:
        found = results(layer, *arguments)
        assert calls(session) == 1
    return found


@st.composite
def cases(draw):
    """A layer, a batch for it, a first state, and what both results' gradients are."""
    steps, batch, features = draw(st.integers(4, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 18))
    width = draw(st.one_of(st.integers(1, 15), st.sampled_from([16, 17, 31, 33, 40])))
    options = {name: draw(st.booleans()) for name in ("bias", "batch_first", "bidirectional")}
    torch.manual_seed(draw(st.integers(0, 2**16)))
    num_layers = draw(st.integers(1, 3))
    layer = KINDS[draw(st.sampled_from(list(KINDS)))](features, width, num_layers, **options)
    sizes = (batch, steps) if options["batch_first"] else (steps, batch)
    directions = 1 + options["bidirectional"]
    x, of_out = torch.randn(*sizes, features), torch.randn(*sizes, width * directions)
    first, of_last = (torch.randn(num_layers * directions, batch, width) for _ in range(2))
    return layer, x, first if draw(st.booleans()) else None, of_out, of_last


# Numbers


@settings(max_examples=60, deadline=None)
@given(cases())
def test_values_and_gradients_are_those_of_the_layer_in_float64(case):
    layer, *arguments = case
    found = ours(layer, *arguments)
    assert "forward" not in vars(layer)
    exact = [one if one is None else one.double() for one in arguments]
    assert_near(found, results(copy.deepcopy(layer).double(), *exact), rounding=1e-5)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])
@every_kind
def test_in_bfloat16_they_are_right_up_to_its_rounding(kind, bidirectional, autocast):
    torch.manual_seed(0)
    layer = KINDS[kind](24, 40, 2, bidirectional=bidirectional).bfloat16()
    x, first = torch.randn(12, 8, 24).bfloat16(), torch.randn(2 + 2 * bidirectional, 8, 40).bfloat16()
    weights = torch.randn(12, 8, 40 * (1 + bidirectional)), torch.randn(2 + 2 * bidirectional, 8, 40)
    exact = results(copy.deepcopy(layer).double(), *(one.double() for one in (x, first, *weights)))
    if autocast:
        layer, x, first = layer.float(), x.float(), first.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, found = results(layer, x, first, *weights), ours(layer, x, first, *weights)
    for mine, theirs, wanted in zip(found, plain, exact, strict=True):
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        error, other = ((one.double() - wanted).norm() / wanted.norm() for one in (mine, theirs))
        assert error < max(2.0**-6, 1.5 * other)


@every_kind
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "autocast"]
)
@pytest.mark.parametrize("sizes", [(5, 3, 4), (5, 1, 4), (1, 5, 4), (5, 4)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_results_lie_and_are_typed_as_pytorchs(kind, dtype, sizes, batch_first, bidirectional):
    layer = KINDS[kind](4, 6, bidirectional=bidirectional, batch_first=batch_first).to(dtype)
    x = torch.randn(*sizes).to(dtype or torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        expected = results(layer, x)
        with opened(layer):
            found = results(layer, x)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


@every_kind
@pytest.mark.parametrize("bidirectional", [True, False])
def test_dropout_between_layers_draws_pytorchs_masks(kind, bidirectional):
    layer = KINDS[kind](5, 7, 3, dropout=0.4, bidirectional=bidirectional, batch_first=True)
    x = torch.randn(3, 6, 5)
    torch.manual_seed(1)
    expected, after = results(layer, x), torch.rand(1)
    torch.manual_seed(1)
    found = ours(layer, x)
    assert torch.equal(torch.rand(1), after)
    assert_near(found, expected, rounding=1e-5)


@every_kind
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_small_and_large_inputs(kind, size):
    layer, x = KINDS[kind](5, 7, bias=False), torch.randn(6, 3, 5) * size
    expected = results(copy.deepcopy(layer).double(), x.double())
    for mine, theirs in zip(ours(layer, x), expected, strict=True):
        lost = 1e-3 if size > 1 else 0  # of what float32 cannot tell from a slope of 0, times the input
        assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max()) + lost


@every_kind
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_give_what_they_give(kind, strange):
    layer, x = KINDS[kind](5, 7), torch.randn(6, 3, 5)
    x[2, 1, 3] = strange
    expected = layer(x)
    with opened(layer) as session:
        for mine, theirs in zip(layer(x), expected, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
        assert calls(session) == 1


def gates(values):
    """Sigmoid and tanh of the C code, and what a bfloat16 one hands on of the last."""
    found, zeros = [], torch.zeros(3 * len(values))
    for kind in ("gru", "rnn_tanh"):
        state, out, kept = (torch.zeros(size * len(values)) for size in (1, 1, 4))
        step = layers._cell("forward", kind, len(values), torch.float32)
        places = values.repeat(3), zeros, state, None, out, kept
        step(1, *map(layers._at, places))
        found.append(kept[: len(values)] if kind == "gru" else state)
        assert torch.equal(out, state)
    state, out = torch.zeros_like(values), torch.zeros_like(values).bfloat16()
    step = layers._cell("forward", "rnn_tanh", len(values), torch.bfloat16)
    halves = values.bfloat16(), zeros.bfloat16()  # which have to live until then
    step(1, *map(layers._at, (*halves, state, None, out, zeros)))
    assert torch.equal(out, state.bfloat16())
    return found


def test_gates_are_right_to_the_last_places():
    values = torch.cat([torch.linspace(-100, 100, 200_001), torch.logspace(-38, -1, 10_000)])
    sigmoid, tanh = gates(torch.cat([values, -values[200_001:]]))
    exact = torch.cat([values, -values[200_001:]]).double()
    assert float((sigmoid - exact.sigmoid()).abs().max()) < 3e-7
    assert float((tanh - exact.tanh()).abs().max()) < 3e-7
    moderate = exact.abs() < 80
    assert float((sigmoid / exact.sigmoid() - 1)[moderate].abs().max()) < 5e-7
    small = (exact.abs() < 1) & (exact != 0)
    assert float((tanh / exact.tanh() - 1)[small].abs().max()) < 5e-7
    strange = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    sigmoid, tanh = gates(strange[:2])
    assert sigmoid.tolist() == pytest.approx([1, 0])
    assert tanh.tolist() == [1, -1]
    layer, x = nn.RNN(1, 1), torch.full((4, 1, 1), float("nan")).bfloat16()
    with opened(layer.bfloat16()):
        assert bool(layer(x)[0].isnan().all())


def test_states_are_handed_on_to_the_nearest_bfloat16_and_ties_to_the_even_one():
    torch.manual_seed(0)
    values, more = torch.randn(2, 10_000).bfloat16()
    more[::2] = values[::2] * 2.0 ** torch.randint(-9, 9, (5_000,))  # sums of which many are ties
    state, out = torch.zeros(10_000), torch.zeros_like(values)
    step = layers._cell("forward", "rnn_relu", 10_000, torch.bfloat16)
    step(1, *map(layers._at, (values, more, state, None, out, values)))
    exact = (values.float() + more.float()).relu()
    assert torch.equal(state, exact)
    assert torch.equal(out, exact.bfloat16())


def test_the_number_of_threads_changes_no_bit_of_the_c_code():
    torch.manual_seed(0)
    before, found = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                for kind in layers.KINDS:
                    torch.manual_seed(1)
                    places = [torch.randn(37, 5 * 50).to(dtype) for _ in range(8)]
                    places[2], places[3] = torch.randn(2, 37, 50)  # the states
                    layers._cell("forward", kind, 50, dtype)(37, *map(layers._at, places[:6]))
                    places[1], places[2] = torch.randn(2, 37, 50)
                    places[3] = torch.randn(37, 50).to(dtype)
                    layers._cell("backward", kind, 50, dtype)(37, *map(layers._at, places))
                    again = found.setdefault((dtype, kind), places)
                    assert all(map(torch.equal, places, again))
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_forked_after_threads_have_begun_does_not_wait_for_them():
    before, layer, x = torch.get_num_threads(), nn.GRU(5, 7), torch.randn(6, 3, 5)
    try:
        with opened(layer):
            torch.set_num_threads(2)
            results(layer, x)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the tests
                signal.alarm(20)
                torch.set_num_threads(1)
                results(layer, x)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


# What is differentiated


@every_kind
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["outputs", "last", "both"])
@pytest.mark.parametrize("wanted", ["input", "first", "weights", "biases"])
def test_only_the_wanted_gradients_are_there(kind, used, wanted):
    layer = KINDS[kind](5, 7, 2)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith({"weights": "weight", "biases": "bias"}.get(wanted, "-")))
    values, ends = (torch.randn(6, 3, 5), torch.randn(2, 3, 7)), []

    def run():
        x, first = (
            one.clone().requires_grad_(wanted == name)
            for one, name in zip(values, ("input", "first"), strict=True)
        )
        found = layer(x, first)
        sum(found[i].square().sum() for i in used).backward()
        ends.append([x.grad, first.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()

    run()
    for parameter in layer.parameters():
        parameter.grad = None
    with opened(nn.ModuleList([layer, nn.Linear(1, 1)])) as session:
        run()
        assert calls(session) == 1
    for theirs, mine in zip(*ends, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_kind
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True}])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_second_derivatives_are_the_layers(kind, options, half):
    torch.manual_seed(0)
    layer, x = KINDS[kind](4, 5, **options), torch.randn(5, 2, 4, requires_grad=True)

    def penalty():
        out, last = layer(x)
        wanted = [x, *layer.parameters()]
        gradients = torch.autograd.grad(out.square().sum() + last.sum(), wanted, create_graph=True)
        second = sum(one.square().sum() for one in gradients)
        return [*gradients, *torch.autograd.grad(second, wanted, allow_unused=True)]

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        expected = penalty()
        with opened(layer) as session:
            found = penalty()
            assert calls(session) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert bool((mine - theirs).norm() <= (0.1 if half else 1e-5) * theirs.norm() + 1e-5)


@every_kind
def test_many_gradients_at_once_are_the_layers(kind):
    layer, x = KINDS[kind](4, 5), torch.randn(5, 2, 4, requires_grad=True)
    of_out, of_last = torch.randn(3, 5, 2, 5), torch.randn(3, 1, 2, 5)

    def many():
        found, options = layer(x), {"is_grads_batched": True}
        return torch.autograd.grad(found, [x, *layer.parameters()], (of_out, of_last), **options)

    expected = many()
    with opened(layer) as session:
        assert_near(many(), expected, rounding=1e-5)
        assert calls(session) == 1


@every_kind
def test_states_and_gradients_may_lie_in_any_order(kind):
    layer, x = KINDS[kind](5, 7), torch.randn(6, 3, 5)
    first, of_out, of_last = (
        torch.randn(7, 3).t()[None],
        torch.randn(7, 3, 6).permute(2, 1, 0),
        torch.randn(1, 7, 3),
    )
    for lying in (first, torch.randn(1, 3, 1).expand(1, 3, 7), torch.randn(7).expand(1, 3, 7)):
        arguments = x.transpose(0, 1).contiguous().transpose(0, 1), lying, of_out, of_last.mT
        assert_near(ours(layer, *arguments), results(layer, *arguments), rounding=1e-5)


@every_kind
def test_what_it_returns_may_be_changed_in_place(kind):
    layer, x, ends = KINDS[kind](5, 7), torch.randn(6, 3, 5), []

    def run():
        out, last = layer(x)
        (out.mul_(2).sum() + last.add_(1).square().sum()).backward()
        ends.append([p.grad.clone() for p in layer.parameters()])
        layer.zero_grad()

    run()
    with opened(layer) as session:
        run()
        assert calls(session) == 1
    assert_near(ends[1], ends[0], rounding=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # in make_dual
def test_transforms_of_functions_and_derivatives_forward_are_the_layers():
    layer, x = nn.GRU(4, 5), torch.randn(6, 3, 4)
    weights = {name: one.detach() for name, one in layer.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,))[0].square().sum()

    def forward():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(layer(dual)[0]).tangent

    def every():
        return [*torch.func.grad(loss)(weights, x).values(), forward()]

    expected, value = every(), loss(weights, x)
    with opened(layer) as session:
        assert_near(every(), expected, rounding=1e-5)
        assert calls(session) == 0
        torch.testing.assert_close(loss({k: w.requires_grad_() for k, w in weights.items()}, x), value)
        assert calls(session) == 1


# What is left alone


LEFT = {
    "without gradients": (lambda layer: layer, lambda x: x, torch.no_grad),
    "evaluation": (lambda layer: layer.eval(), lambda x: x, None),
    "three steps": (lambda layer: layer, lambda x: x[:3], None),
    "float64": (lambda layer: layer.double(), lambda x: x.double(), None),
    "no sequences": (lambda layer: layer, lambda x: x[:, :0], None),
    "float16": (lambda layer: layer, lambda x: x, lambda: torch.autocast("cpu", torch.float16)),
    "float64 under autocast": (
        lambda layer: layer.double(),
        lambda x: x.double(),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ),
    "meta": (lambda layer: layer.to("meta"), lambda x: x.to("meta"), None),
}


@every_kind
@pytest.mark.parametrize("case", LEFT)
def test_what_it_is_not_for_is_pytorchs_own(kind, case):
    prepare, make, context = LEFT[case]
    layer = KINDS[kind](5, 7, 2, bidirectional=True)
    x, other = torch.randn(6, 3, 5), KINDS[kind](5, 7)
    with opened(nn.ModuleList([layer, other])) as session:
        prepare(layer)
        with context() if context else torch.enable_grad():
            expected, found = type(layer).forward(layer, make(x)), layer(make(x))
        assert calls(session) == 0
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = (getattr(one, "data", one) for one in (mine, theirs))
        assert mine.dtype == theirs.dtype
        assert mine.is_meta or torch.equal(mine, theirs)


def test_mixed_types_fail_as_they_do_without_it():
    layer = nn.GRU(5, 7)
    with opened(layer), pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(6, 3, 5), torch.zeros(1, 3, 7, dtype=torch.bfloat16))


def test_tensors_without_memory_are_pytorchs():
    layer, x = nn.GRU(5, 7), torch.randn(6, 3, 5)
    with opened(layer) as session:
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert copy.deepcopy(layer)(torch.randn(6, 3, 5))[0].shape == (6, 3, 7)
            assert layer(x)[0].shape == (6, 3, 7)
        assert calls(session) == 0


def test_models_without_such_layers_are_refused():
    class Own(nn.GRU):
        """With a forward of its own."""

        def forward(self, x):
            return (super().forward(x)[0] + 1,)

    others = nn.ModuleList([Own(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)])
    with pytest.raises(
        Refused, match="fused_recurrent: the model has no GRU, LSTM or plain RNN of PyTorch's"
    ):
        opened(others)
    layer, library = nn.GRU(4, 4), nn.LSTM(4, 4)
    x = torch.randn(5, 2, 4)
    expected = [others[0](x)[0], library(x)[0]]
    with opened(nn.ModuleList([*others, layer, library])) as session:
        assert "forward" in vars(layer)
        assert not any("forward" in vars(other) for other in others)
        assert all(map(torch.equal, [others[0](x)[0], library(x)[0]], expected))
        assert calls(session) == 0
    assert "forward" not in vars(layer)


def test_a_subclass_that_keeps_the_forward_is_reached():
    class Named(nn.GRU):
        """With a name of its own."""

    ours(Named(5, 7), torch.randn(6, 3, 5))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "normed", [weight_norm, parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_computed_weights_get_their_gradients(normed):
    layer, x = normed(nn.GRU(5, 7), "weight_hh_l0"), torch.randn(6, 3, 5)
    for _ in range(50):  # as the norm is estimated step by step
        layer(x)
    assert_near(ours(layer, x), results(layer, x), rounding=1e-4)


def test_a_layer_may_be_called_twice():
    layer, x = nn.GRU(5, 5), torch.randn(6, 3, 5)
    twice = lambda: torch.autograd.grad(layer(*layer(x))[0].sum(), list(layer.parameters()))  # noqa: E731
    expected = twice()
    with opened(layer) as session:
        assert_near(twice(), expected, rounding=1e-5)
        assert calls(session) == 2


# The place of PyTorch's functions


def test_another_thread_and_other_moments_have_pytorchs_own():
    layer, x, found = nn.GRU(5, 7), torch.randn(6, 3, 5), []
    expected = layer(x)[0]
    with recurrent.in_place({"gru": lambda *_: (torch.zeros(1), torch.zeros(1))}):
        thread = threading.Thread(target=lambda: found.append(layer(x)[0]))
        thread.start()
        thread.join()
        with recurrent.in_place({}):
            found.append(layer(x)[0])
        assert layer(x)[0].shape == (1,)
        assert nn.RNN(5, 7)(x)[0].shape == (6, 3, 7)
    found.append(layer(x)[0])
    assert all(torch.equal(one, expected) for one in found)
    assert not recurrent.OVER_STEPS.keys() & vars(recurrent._functions).keys()


def test_threads_that_end_in_any_order_leave_pytorchs_own():
    layers_of, x = [nn.GRU(5, 7) for _ in range(2)], torch.randn(6, 3, 5)
    expected, wrong = [one(x)[0].detach() for one in layers_of], []

    def repeat(layer, wanted):
        for _ in range(100):
            wrong.extend([1] * (not torch.allclose(layer(x)[0], wanted, atol=1e-5)))

    with opened(layers_of[0]) as session:
        threads = [
            threading.Thread(target=repeat, args=pair) for pair in zip(layers_of, expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls(session) == 100
    assert not wrong
    assert not recurrent.OVER_STEPS.keys() & vars(recurrent._functions).keys()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of exporting any recurrent layer
def test_afterwards_a_layer_is_scripted_and_exported_as_ever():
    model, x = Block(nn.GRU), torch.randn(6, 3, 16)
    with opened(model) as session:
        session.step(x)
    expected = model(x)
    torch.testing.assert_close(torch.jit.script(model)(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


def test_copies_have_their_own_weights_and_pickles_the_own_forward():
    layer, x = nn.GRU(5, 7), torch.randn(6, 3, 5)
    with opened(layer) as session:
        expected = layer(x)[0]
        copied, read = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        with torch.no_grad():
            layer.weight_hh_l0.zero_()
        before = calls(session)
        for one in (copied, read):
            torch.testing.assert_close(one(x)[0], expected)
        assert calls(session) == before + 1


def test_a_step_of_the_persons_own_finds_it_inside_the_step_alone():
    layer, x = nn.GRU(5, 7), torch.randn(6, 3, 5)
    with attach(
        Plan([FusedRecurrent()]), step=lambda batch: layer(batch)[0].sum().backward(), models=[layer]
    ) as session:
        session.step(x)
        assert "forward" not in vars(layer)
        session.step(x)
        assert calls(session) == 2


# Beside other techniques


@pytest.mark.parametrize(
    "beside",
    [
        "checkpoint",
        "bf16_autocast",
        "bf16_weights",
        "compress_activations",
        "micro_batches",
        pytest.param("compile", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["gru", "tanh"])
def test_beside_others_it_trains_the_same_model(kind, beside):
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = Several(KINDS[kind])
    batch, ends = torch.randn(4, 8, 16), []
    for plan in ({}, {"fused_recurrent": {}, beside: {}}):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = lambda m, b: (m(b).float() - 1).square().mean()  # noqa: E731
        with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
            ends.append([float(session.step(batch)) for _ in range(4)])
            assert not plan or calls(session) >= 8
    assert ends[1] == pytest.approx(ends[0], rel=0.02 if "6" in beside or "compress" in beside else 1e-5)


# What it says of a step


def test_it_confirms_by_the_calls():
    seen = Observation({}, {}, 0, 0.0, notes={"layers_over_steps": Ran(3, calls=7)})
    told = FusedRecurrent().confirm(seen, Observation({}, {}, 0, 0.0))
    assert told == "recurrent layers of up to 3 modules in one pass a step"
    with pytest.raises(Refused, match="changed nothing: no GRU or RNN, and no LSTM of packed"):
        FusedRecurrent().confirm(Observation({}, {}, 0, 0.0, notes={"layers_over_steps": Ran(1)}), seen)


def test_it_is_proposed_where_such_layers_run():
    profile, machine = plain_profile(), this_machine()
    assert FusedRecurrent.candidates(profile, machine) == [FusedRecurrent()]
    assert FusedRecurrent.gain(profile, machine)[1] > 1
    profile.features["stepwise_recurrent"] = False
    assert FusedRecurrent.candidates(profile, machine) == []
    assert FusedRecurrent.gain(profile, machine) == (1.0, 1.0)


def test_without_a_compiler_it_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    layer = nn.GRU(4, 4)
    compiled.cache_clear()
    try:
        with pytest.raises(
            Refused, match=r"could not be compiled: gcc is needed, and neither gcc nor g\+\+ is here"
        ):
            opened(layer)
    finally:
        compiled.cache_clear()
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("architecture", ["x86-64", "haswell"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
def test_narrower_vectors_give_the_same(architecture, monkeypatch, tmp_path):
    """As on processors without AVX or AVX-512."""
    flags = [flag.replace("native", architecture) for flag in c_code.FLAGS]
    subprocess.run(["gcc", *flags, str(layers.SOURCE), "-o", str(tmp_path / "it.so")], check=True)
    if architecture == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    for kind in KINDS:
        layer, x = KINDS[kind](5, 37), torch.randn(6, 3, 5)
        expected = ours(layer, x)
        with monkeypatch.context() as patched:
            patched.setattr(layers, "compiled", lambda _: ctypes.CDLL(str(tmp_path / "it.so")))
            assert_near(ours(layer, x), expected, rounding=1e-5)


def test_a_process_forked_while_another_thread_is_inside_has_torchs_functions():
    entered, may_leave = threading.Event(), threading.Event()

    def stay():
        with recurrent.in_place({}):
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        os._exit(int("gru" in vars(torch._VF)))
    may_leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "gru" not in vars(torch._VF)
