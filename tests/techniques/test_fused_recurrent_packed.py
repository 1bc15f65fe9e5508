"""Recurrent layers of packed batches by C code of our own, LSTMs too: numbers, and what is left alone."""

import contextlib
import copy
import functools
import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import vivace
from vivace.inspection import inspect
from vivace.live.candidates import additions
from vivace.live.kept import differentiated_in
from vivace.observing.reference import profile_reference
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.technique import Numerics, registry
from vivace.techniques.fused_recurrent import layers
from vivace.tensors.precision import autocasts_lstm
from vivace.tuning.candidates import candidates

from .over_steps import assert_near, calls, opened

FusedRecurrent = registry.find("fused_recurrent")
KINDS = {
    "gru": nn.GRU,
    "tanh": functools.partial(nn.RNN, nonlinearity="tanh"),
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
    "lstm": nn.LSTM,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
HALF, FULL = torch.bfloat16, torch.float32


def packed(lengths, features, dtype=FULL):
    """A batch of sequences of these lengths, the longest first."""
    return pack_sequence([torch.randn(length, features, dtype=dtype) for length in lengths])


def states_of(layer, batch, dtype=FULL):
    """First states for it, of an LSTM both."""
    sizes = layer.num_layers * (1 + layer.bidirectional), batch, layer.hidden_size
    return tuple(torch.randn(sizes).to(dtype) for _ in range(1 + isinstance(layer, nn.LSTM)))


def flat(layer, x, firsts=()):
    """Output and last states of such a call, in a row."""
    begin = () if not firsts else (tuple(firsts),) if isinstance(layer, nn.LSTM) else firsts
    out, last = layer(x, *begin)
    return [out.data if isinstance(out, PackedSequence) else out, *(last if type(last) is tuple else [last])]


def results(layer, x, firsts=(), of_results=None):
    """Output, last states, and gradients of the input, the first states and all parameters."""
    data, firsts = x.data.detach().requires_grad_(), [one.detach().requires_grad_() for one in firsts]
    found = flat(layer, x._replace(data=data), firsts)
    given = of_results or list(map(torch.ones_like, found))
    given = [g.to(r.dtype) for g, r in zip(given, found, strict=True)]
    gradients = torch.autograd.grad(found, [data, *firsts, *layer.parameters()], given)
    return [*(one.detach() for one in found), *gradients]


def ours(layer, *arguments):
    """The same, by the technique."""
    with opened(layer) as session:
        found = results(layer, *arguments)
        assert calls(session) == 1
    return found


def exact(layer, x, firsts, of_results):
    """The same, in float64."""
    firsts, of_results = ([one.double() for one in some] for some in (firsts, of_results))
    return results(copy.deepcopy(layer).double(), x.double(), firsts, of_results)


def of_each(layer, x, firsts=()):
    """Gradients that come to each result."""
    return [torch.randn(one.shape) for one in flat(layer, x, firsts)]


# Numbers


@st.composite
def lengths(draw):
    """Of up to five sequences, the longest first."""
    longest = draw(st.integers(4, 9))
    rest = st.one_of(st.just(longest), st.just(1), st.integers(1, longest))
    return sorted([longest, *draw(st.lists(rest, max_size=4))], reverse=True)


@st.composite
def cases(draw):
    """A layer, a batch for it, first states or none, and what the results' gradients are."""
    features, width = draw(st.integers(1, 18)), draw(st.one_of(st.integers(1, 15), st.sampled_from([16, 33])))
    options = {name: draw(st.booleans()) for name in ("bias", "bidirectional")}
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind, some = draw(st.sampled_from(list(KINDS))), draw(lengths())
    layer = KINDS[kind](features, width, draw(st.integers(1, 3)), **options)
    if kind == "lstm":  # which is PyTorch's where all are of one length
        some = [*some, 1]
    x, firsts = packed(some, features), states_of(layer, len(some)) if draw(st.booleans()) else ()
    return layer, x, firsts, of_each(layer, x, firsts)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_values_and_gradients_are_those_of_the_layer_in_float64(case):
    assert_near(ours(*case), exact(*case), rounding=1e-5)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])
@every_kind
def test_in_bfloat16_they_are_right_up_to_its_rounding(kind, bidirectional, autocast):
    torch.manual_seed(0)
    layer, some = KINDS[kind](24, 40, 2, bidirectional=bidirectional).bfloat16(), (12, 12, 9, 7, 4, 1)
    x, firsts = packed(some, 24, HALF), states_of(layer, len(some), HALF)
    weights = of_each(layer, x, firsts)
    wanted = exact(layer, x, firsts, weights)
    if autocast:
        layer, x, firsts = layer.float(), x.float(), [one.float() for one in firsts]
    with torch.autocast("cpu", HALF, enabled=autocast):
        plain, found = results(layer, x, firsts, weights), ours(layer, x, firsts, weights)
    for mine, theirs, right in zip(found, plain, wanted, strict=True):
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        error, other = ((one.double() - right).norm() / right.norm() for one in (mine, theirs))
        assert error < max(2.0**-6, 1.5 * other)


@every_kind
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_results_lie_and_are_typed_as_pytorchs(kind, bidirectional, autocast):
    """Also where weights, inputs and first states are of several types; what fails, fails as ever."""
    number, acted = 1 + (kind == "lstm"), 0
    for of_weights, of_x, *of_firsts in itertools.product((FULL, HALF), repeat=2 + number):
        layer = KINDS[kind](4, 6, 2, bidirectional=bidirectional).to(of_weights)
        x, firsts = packed((5, 5, 2), 4, of_x), states_of(layer, 3)
        firsts = [one.to(dtype) for one, dtype in zip(firsts, of_firsts, strict=True)]

        def looks(firsts, x=x, layer=layer):
            try:
                with torch.autocast("cpu", HALF, enabled=autocast):
                    found = results(layer, x, firsts)
            except (RuntimeError, ValueError) as error:
                return type(error), str(error)
            return [(one.dtype, one.shape, one.stride()) for one in found]

        expected = looks(firsts), looks(())
        with opened(layer) as session:
            assert (looks(firsts), looks(())) == expected
            acted += calls(session)
    assert acted == (2 * 2 ** (2 + number) if autocast else 2 + 2 * 2**number)


@every_kind
@pytest.mark.parametrize("bidirectional", [True, False])
def test_dropout_between_layers_draws_pytorchs_masks(kind, bidirectional):
    layer, x = KINDS[kind](5, 7, 3, dropout=0.4, bidirectional=bidirectional), packed((6, 4, 4), 5)
    torch.manual_seed(1)
    expected, after = results(layer, x), torch.get_rng_state()
    torch.manual_seed(1)
    found = ours(layer, x)
    assert torch.equal(torch.get_rng_state(), after)
    assert_near(found, expected, rounding=1e-5)


@every_kind
def test_a_wide_layer_on_one_thread_and_on_two(kind):
    before, layer, x = (
        torch.get_num_threads(),
        KINDS[kind](20, 700, bidirectional=True),
        packed((9, 8, 5), 20),
    )
    expected = results(layer, x)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_near(ours(layer, x), expected, rounding=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_forked_after_threads_have_begun_does_not_wait_for_them():
    before, layer, x = torch.get_num_threads(), nn.LSTM(5, 900), packed([6] * 40, 5)
    try:
        with opened(layer):
            torch.set_num_threads(2)
            results(layer, x)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the tests
                signal.alarm(20)
                torch.set_num_threads(1)
                results(layer, packed((6, 3), 5))
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


# How a batch is packed


@every_kind
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_sequences_in_any_order_come_back_padded_in_theirs(kind, batch_first, bidirectional):
    layer = KINDS[kind](5, 7, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn((4, 9, 5) if batch_first else (9, 4, 5), requires_grad=True)
    firsts = [one.requires_grad_() for one in states_of(layer, 4)]

    def run():
        options = {"batch_first": batch_first}
        some = pack_padded_sequence(x, torch.tensor([3, 9, 1, 6]), enforce_sorted=False, **options)
        out, last = layer(some, tuple(firsts) if kind == "lstm" else firsts[0])
        assert torch.equal(out.batch_sizes, some.batch_sizes)
        assert torch.equal(out.unsorted_indices, some.unsorted_indices)
        out, sizes = pad_packed_sequence(out, total_length=11, padding_value=0.5, **options)
        assert sizes.tolist() == [3, 9, 1, 6]
        found = [out, *(last if kind == "lstm" else [last])]
        loss = sum(one.square().sum() for one in found)
        return [*found, *torch.autograd.grad(loss, [x, *firsts, *layer.parameters()])]

    expected = run()
    with opened(layer) as session:
        assert_near(run(), expected, rounding=1e-5)
        assert calls(session) == 1


def in_no_order(x):
    """The same numbers elsewhere in memory: columns, every second row, a view with its sign turned."""
    yield x.t().contiguous().t()
    yield x.repeat_interleave(2, 0)[::2]
    yield torch.complex(torch.zeros_like(x), -x).conj().imag


@every_kind
@pytest.mark.parametrize("bidirectional", [True, False])
def test_inputs_states_and_gradients_may_lie_in_any_order(kind, bidirectional):
    layer, x = KINDS[kind](5, 7, bidirectional=bidirectional), packed((6, 5, 5, 2), 5)
    firsts = states_of(layer, 4)
    of_results = of_each(layer, x, firsts)
    expected = results(layer, x, firsts, of_results)
    for data in in_no_order(x.data):
        assert_near(ours(layer, x._replace(data=data), firsts, of_results), expected, rounding=1e-5)
    for first, of_out in zip(in_no_order(firsts[0].flatten(0, 1)), in_no_order(of_results[0]), strict=True):
        others = [first.unflatten(0, firsts[0].shape[:2]), *firsts[1:]], [of_out, *of_results[1:]]
        assert_near(ours(layer, x, *others), expected, rounding=1e-5)
    turned = [torch._neg_view(-one) for one in of_results]
    assert_near(ours(layer, x, firsts, turned), expected, rounding=1e-5)
    alike = [torch.randn(7).expand(firsts[0].shape) for _ in firsts]
    wanted = results(layer, x, alike, of_results)
    assert_near(ours(layer, x, alike, of_results), wanted, rounding=1e-5)


@every_kind
def test_what_is_saved_for_gradients_may_come_back_in_another_order(kind):
    layer, x = KINDS[kind](5, 7), packed((6, 5, 5, 2), 5)
    expected = results(layer, x)
    turned = lambda one: one.detach().t().contiguous().t() if one.dim() == 2 else one  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(turned, lambda one: one):
        assert_near(ours(layer, x), expected, rounding=1e-5)


def outcome(layer, x):
    """What a call gives, or says."""
    try:
        found = flat(layer, x)
        return [*found, *torch.autograd.grad(sum(one.sum() for one in found), list(layer.parameters()))]
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


STRANGE = {  # counts of each step that no function of PyTorch's makes, by how many rows they come with
    "more rows": (9, [3, 2, 2, 1]),
    "fewer rows": (7, [3, 2, 2, 1]),
    "rising": (10, [1, 3, 3, 3]),
    "rising at last": (8, [1, 1, 1, 5]),
    "an empty step": (8, [3, 3, 2, 0]),
    "an empty step between": (9, [3, 3, 2, 0, 1]),
    "less than none": (9, [4, 4, 2, -1]),
    "short numbers": (8, torch.tensor([2, 2, 2, 2], dtype=torch.int32)),
    "no integers": (8, torch.tensor([2.0, 2.0, 2.0, 2.0])),
    "a table": (8, [[2, 2, 2, 2]]),
}


@every_kind
@pytest.mark.parametrize("case", STRANGE)
def test_strange_counts_give_what_pytorch_gives_or_fail_as_there(kind, case):
    rows, counts = STRANGE[case]
    layer, x = KINDS[kind](4, 6), PackedSequence(torch.randn(rows, 4), torch.as_tensor(counts))
    expected = outcome(layer, x)
    with opened(layer) as session:
        found = outcome(layer, x)
        assert calls(session) == 0
    assert type(found) is type(expected)
    assert found == expected if isinstance(found, str) else all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", layers.KINDS)
@pytest.mark.parametrize("length", [2, 200])
@pytest.mark.parametrize("changed", ["of inputs", "of states", "first", "none"])
def test_weights_and_states_of_another_size_are_left_to_pytorch(kind, length, changed):
    """Which fails, or ends the process itself."""
    gates, x, told = layers.GATES.get(kind, 1) * 6, packed((6, 5, 2), 4), []
    of_inputs = torch.randn(length if changed == "of inputs" else gates, 4)
    of_states = torch.randn(length if changed == "of states" else gates, 6)
    first = torch.randn(1, length if changed == "first" else 3, 6)
    firsts = (first, torch.randn(1, 3, 6)) if kind == "lstm" else first
    options = (False, 1, 0.0, True, False)
    arguments = x.data, x.batch_sizes, firsts, [of_inputs, of_states], *options
    found = layers.over_steps(kind, lambda: told.append(1), *arguments)
    assert (found is None) == (told == []) == (changed != "none")


# What is differentiated


@every_kind
@pytest.mark.parametrize("wanted", ["data", "first", "cell", "weights", "biases"])
@pytest.mark.parametrize("used", [(0,), (1,), (-1,), (0, 1, -1)], ids=["outputs", "last", "cell", "all"])
def test_only_the_wanted_gradients_are_there(kind, used, wanted):
    layer, x = KINDS[kind](5, 7, 2), packed((6, 4, 4), 5)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith({"weights": "weight", "biases": "bias"}.get(wanted, "-")))
    firsts = states_of(layer, 3)
    if wanted == "cell" and kind != "lstm":
        return

    def run():
        places = [one.clone() for one in (x.data, *firsts)]
        for place, name in zip(places, ("data", "first", "cell"), strict=False):
            place.requires_grad_(wanted == name)
        found = flat(layer, x._replace(data=places[0]), places[1:])
        sum(found[i].square().sum() for i in used).backward()
        ends = [one.grad for one in (*places, *layer.parameters())]
        layer.zero_grad()
        return ends

    expected = run()
    with opened(nn.ModuleList([layer, nn.Linear(1, 1)])) as session:
        found = run()
        assert calls(session) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_kind
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2}])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_second_derivatives_are_the_layers(kind, options, half):
    torch.manual_seed(0)
    layer, x = KINDS[kind](4, 5, **options), packed((5, 3, 1), 4)
    firsts = [one.requires_grad_() for one in states_of(layer, 3)]
    data = x.data.requires_grad_()

    def penalty():
        found, wanted = flat(layer, x._replace(data=data), firsts), [data, *firsts, *layer.parameters()]
        loss = sum(one.square().sum() for one in found)
        gradients = torch.autograd.grad(loss, wanted, create_graph=True)
        return [*gradients, *torch.autograd.grad(sum(one.square().sum() for one in gradients), wanted)]

    with torch.autocast("cpu", HALF, enabled=half):
        expected = penalty()
        with opened(layer) as session:
            found = penalty()
            assert calls(session) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert bool((mine - theirs).norm() <= (0.1 if half else 1e-5) * theirs.norm() + 1e-5)


@every_kind
def test_many_gradients_at_once_are_the_layers(kind):
    layer, x = KINDS[kind](4, 5), packed((5, 3, 1), 4)
    several = [torch.randn(3, *one.shape) for one in flat(layer, x)]

    def many():
        return torch.autograd.grad(flat(layer, x), list(layer.parameters()), several, is_grads_batched=True)

    expected = many()
    with opened(layer) as session:
        assert_near(many(), expected, rounding=1e-5)
        assert calls(session) == 1


@every_kind
@pytest.mark.parametrize("bidirectional", [True, False])
def test_what_it_returns_may_be_changed_in_place(kind, bidirectional):
    layer, x = KINDS[kind](5, 7, 2, bidirectional=bidirectional), packed((6, 4, 4), 5)

    def run():
        out, *lasts = flat(layer, x)
        loss = out.mul_(2).sum() + sum(one.add_(1).square().sum() for one in lasts)
        return torch.autograd.grad(loss, list(layer.parameters()))

    expected = run()
    with opened(layer) as session:
        assert_near(run(), expected, rounding=1e-5)
        assert calls(session) == 1


def test_what_was_changed_in_place_before_the_gradients_is_noticed():
    layer, x = nn.LSTM(5, 7), packed((6, 4, 4), 5)
    with opened(layer):
        found = flat(layer, x)[0].sum()
        x.data.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.backward()


# What is left alone


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


LEFT = {
    "without gradients": (lambda layer: layer, lambda x: x, torch.no_grad),
    "evaluation": (lambda layer: layer.eval(), lambda x: x, None),
    "three steps": (lambda layer: layer, lambda x: packed((3, 2, 1), 5), None),
    "float64": (lambda layer: layer.double(), lambda x: x.double(), None),
    "float16": (lambda layer: layer, lambda x: x, lambda: torch.autocast("cpu", torch.float16)),
    "meta": (lambda layer: layer.to("meta"), lambda x: x._replace(data=x.data.to("meta")), None),
    "subclass": (lambda layer: layer, lambda x: x._replace(data=x.data.as_subclass(Marked)), None),
}


def assert_equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (type(mine), mine.dtype, mine.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert mine.is_meta or torch.equal(mine, theirs)


@every_kind
@pytest.mark.parametrize("case", LEFT)
def test_what_it_is_not_for_is_pytorchs_own(kind, case):
    prepare, make, context = LEFT[case]
    layer, x = KINDS[kind](5, 7, 2, bidirectional=True), make(packed((6, 4, 4), 5))
    with opened(nn.ModuleList([layer, KINDS[kind](5, 7)])) as session:
        prepare(layer)
        with context() if context else contextlib.nullcontext():
            found = flat(layer, x)
            assert calls(session) == 0
    with context() if context else contextlib.nullcontext():
        assert_equal(found, flat(layer, x))


@pytest.mark.parametrize("autocast", [True, False] if autocasts_lstm() else [False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_lstm_of_sequences_of_one_length_is_pytorchs(batch_first, autocast):
    layer, x = nn.LSTM(5, 7, 2, batch_first=batch_first, bidirectional=True), torch.randn(6, 4, 5)
    with torch.autocast("cpu", HALF, enabled=autocast):
        for data, firsts in (
            (x, ()),
            (x, states_of(layer, 6 if batch_first else 4)),
            (x[0], ()),
            (packed((6, 6), 5), ()),
        ):
            expected = flat(layer, data, firsts)
            with opened(layer) as session:
                assert_equal(flat(layer, data, firsts), expected)
                assert calls(session) == 0


@pytest.mark.parametrize("options", [{}, {"bias": False, "num_layers": 2, "bidirectional": True}])
def test_an_lstm_with_projected_states_is_pytorchs(options):
    layer, x = nn.LSTM(5, 7, proj_size=3, **options), packed((6, 4, 4), 5)
    expected = flat(layer, x)
    with opened(layer) as session:
        assert_equal(flat(layer, x), expected)
        assert calls(session) == 0


@every_kind
def test_tensors_without_memory_and_transforms_of_functions_fail_as_they_do_without_it(kind):
    layer, x = KINDS[kind](4, 5), packed((6, 4, 4), 4)
    weights = {name: one.detach() for name, one in layer.named_parameters()}

    def loss(weights, data):
        some = PackedSequence(data, x.batch_sizes)
        return torch.func.functional_call(layer, weights, (some,))[0].data.square().sum()

    def both():
        with pytest.raises(RuntimeError) as transformed:
            torch.func.grad(loss)(weights, x.data)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
            layer(x)
        return str(transformed.value)

    expected = both()
    with opened(layer) as session:
        assert both() == expected
        assert calls(session) == 0


# A tagger of sentences


SCENE = Path(__file__).parents[1] / "scenes" / "tagger.py"
MACHINE = inspect()


@pytest.fixture(scope="module")
def tagger():
    return vivace.job.load(f"{SCENE}:packed"), vivace.job.load(f"{SCENE}:padded")


@pytest.mark.usefixtures("one_thread")
def test_it_is_proposed_for_a_packed_lstm_and_not_for_a_padded_one(tagger):
    for job, expected in zip(tagger, (True, False), strict=True):
        with start(job, Plan(), MACHINE) as session:
            profile = profile_reference(session, job, list(session.batches(job.data())))
        assert profile.features["stepwise_recurrent"] == expected
        found, _ = candidates(profile, MACHINE, allow=Numerics.ROUNDING, memory=None)
        assert (FusedRecurrent() in [one.technique for one in found]) == (
            expected and profile.device == "cpu"
        )


def test_in_a_loop_it_is_proposed_for_a_packed_lstm_and_not_for_a_padded_one(tagger):
    for job, expected in zip(tagger, (True, False), strict=True):
        model, (words, _, lengths) = job.model(), job.data()[0]
        for half in {False, autocasts_lstm()}:
            with torch.autocast("cpu", HALF, enabled=half):
                made = differentiated_in([model(words, lengths)])
            assert ([FusedRecurrent()] in additions(model, MACHINE, (), made)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, {"bf16_autocast" if autocasts_lstm() else "bf16_weights": {}}])
def test_a_tagger_under_it_is_the_same_model(beside):
    verdict = vivace.verify(f"{SCENE}:packed", Plan.from_dict({"fused_recurrent": {}, **beside}), budget=10)
    assert verdict.kept, verdict.reason


def test_for_a_padded_lstm_it_says_that_it_did_nothing():
    with pytest.raises(vivace.Refused, match="no LSTM of packed sequences"):
        vivace.verify(f"{SCENE}:padded", Plan.from_dict({"fused_recurrent": {}}), budget=5)


@pytest.mark.parametrize(
    "beside",
    [
        *(["bf16_autocast"] if autocasts_lstm() else []),
        "bf16_weights",
        "host_allocator",
        "micro_batches",
        pytest.param("compile", marks=pytest.mark.slow),
    ],
)
def test_beside_others_it_trains_the_same_tagger(tagger, beside):
    torch._dynamo.reset()
    torch.manual_seed(0)
    job, ends = tagger[0], []
    start_at, batches = job.model(), job.data()
    for plan in ({beside: {}}, {"fused_recurrent": {}, beside: {}}):
        model = copy.deepcopy(start_at)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=job.loss) as session:
            ends.append([float(session.step(batch)) for batch in batches])
            assert len(plan) == 1 or calls(session) >= len(batches)
    assert ends[1] == pytest.approx(ends[0], rel=0.02 if "6" in beside else 1e-5)
