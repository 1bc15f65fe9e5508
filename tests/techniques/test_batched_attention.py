"""Attention by products of many heads at once: values, gradients, memory, and what is left to PyTorch."""

import copy
import ctypes
import dataclasses
import os
import platform
import signal
import subprocess
import threading
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.live.candidates import additions
from vivace.mechanisms import c_code
from vivace.operators import LEAST_DROPPED, LEAST_SCORES
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.technique import registry
from vivace.techniques.batched_attention import attention
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile

BatchedAttention = registry.find("batched_attention")
INF, NAN = float("inf"), float("nan")
HALF, FLOAT = torch.bfloat16, torch.float32
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")


class Attending(nn.Module):
    """A causal attention layer over 32 tokens in bfloat16, and a head."""

    def __init__(self, dropped, dtype):
        super().__init__()
        self.embed, self.three, self.head = nn.Embedding(16, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropped, self.dtype = dropped, dtype

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.three(x).to(self.dtype).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        found = sdpa(q, k, v, dropout_p=self.dropped, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + found.float())


def attending(dropped=0.0, dtype=HALF, length=32):
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (48, length), generator=numbers)
    return Job(
        model=lambda: Attending(dropped, dtype),
        data=lambda: DataLoader(tokens, batch_size=16, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


@pytest.mark.usefixtures("one_thread")
class TestBatchedAttention(TechniqueContract):
    technique = BatchedAttention
    jobs: ClassVar = {
        **TINY_JOBS,
        "bfloat16": attending,
        "dropped": lambda: attending(0.1, HALF, 80),
    }


@contextmanager
def acting(least=1, chunk=attention.CHUNK):
    """It computes attention, also of few scores; of how many, each time."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LEAST_SCORES", "LEAST_DROPPED", "LEAST_DROPPED_FLOAT"):
            patch.setattr(attention, name, least)
        patch.setattr(attention, "CHUNK", chunk)
        end = attention.begin(found.append)
        try:
            yield found
        finally:
            end()


def opened(model=None, plan=None):
    model = model or nn.Linear(2, 2)
    return attach(
        Plan.from_dict(plan or {"batched_attention": {}}),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
    )


def lying(shape, dtype, how="contiguous"):
    """Random numbers of (batch, heads, length, width), in memory as `how` says."""
    batch, heads, length, width = shape
    if how == "transposed":
        return torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2)
    if how == "expanded":
        return torch.randn(batch, 1, length, width).to(dtype).expand(shape)
    if how == "columns":
        return torch.randn(batch, heads, width, length).to(dtype).mT
    if how == "sliced":
        return torch.randn(batch + 1, heads, length + 2, width + 3).to(dtype)[1:, :, 1:-1, 2:-1]
    return torch.randn(shape).to(dtype)


def three(dtype=HALF, batch=2, heads=3, length=5, width=8, how="contiguous"):
    return tuple(lying((batch, heads, length, width), dtype, how).requires_grad_() for _ in range(3))


def results(inputs, of_out=None, **options):
    """What each query attends to, and the gradients of query, key and value."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    torch.manual_seed(7)
    out = sdpa(*inputs, **options)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out) if of_out is None else of_out)
    return [out.detach(), *gradients]


def ours(inputs, of_out=None, chunk=attention.CHUNK, **options):
    with acting(chunk=chunk) as told:
        found = results(inputs, of_out, **options)
    (query, key, _) = inputs
    assert told == [query[..., 0].numel() * key.shape[2]]
    return found


def exact(inputs, of_out=None, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """The same in float64."""
    torch.manual_seed(7)
    query, key, value = inputs = [one.detach().double().requires_grad_() for one in inputs]
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    nothing = (scores == -INF).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    if dropout_p:
        kept = torch.empty(scores.shape, dtype=torch.bool).bernoulli_(1 - dropout_p)
        weights = weights * kept / (1 - dropout_p)
    out = weights @ value
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out) if of_out is None else of_out.double())
    return [out.detach(), *gradients]


def assert_right(found, plain, wanted):
    """In float32 to its last places; in bfloat16 about as near as PyTorch."""
    for mine, theirs, right in zip(found, plain, wanted, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        error, other = (float((one.double() - right).norm()) for one in (mine, theirs))
        small = 1e-5 if mine.dtype == FLOAT else 2.0**-6
        assert error <= max(small * max(1.0, float(right.norm())), 2.5 * other)


@st.composite
def masks(draw, sizes, dtype):
    """Of scores of these sizes, or of what is broadcast to them, in some order in memory."""
    sizes = sizes[draw(st.sampled_from([0, 2])) :]
    shape = [draw(st.sampled_from([1, size])) for size in sizes]
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.integers(1, 3))
    numbers = torch.randn([shape[axis] * step for axis in order])
    numbers = numbers[(slice(None, None, step),) * len(shape)]
    numbers = numbers.permute([order.index(axis) for axis in range(len(shape))])
    if draw(st.booleans()):
        mask = numbers > draw(st.sampled_from([-0.5, 0.5, 9.0]))
    else:
        lowest = draw(st.sampled_from([0.0, -INF, torch.finfo(dtype).min]))
        mask = torch.where(numbers > 0, numbers, lowest).to(dtype)
    assert list(mask.shape) == shape
    return mask.expand(sizes) if draw(st.booleans()) else mask


@st.composite
def cases(draw):
    """Query, key and value, the gradient of the result, and options."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([HALF, FLOAT]))
    batch, heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    queries, keys = draw(st.integers(1, 9)), draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 33])))
    of_value = draw(st.one_of(st.just(width), st.integers(1, 9)))
    sizes = (queries, width), (keys, width), (keys, of_value), (queries, of_value)
    orders = st.sampled_from(["contiguous", "transposed", "expanded", "columns", "sliced"])
    *inputs, of_out = (lying((batch, heads, *size), dtype, draw(orders)) for size in sizes)
    kind = draw(st.sampled_from(["none", "causal", "mask"]))
    options = {"dropout_p": draw(st.sampled_from([0.0, 0.3] if dtype == HALF else [0.3]))}
    options["scale"] = draw(st.sampled_from([None, 0.0, 0.5, -0.3]))
    options["is_causal"] = kind == "causal"
    options["attn_mask"] = draw(masks((batch, heads, queries, keys), dtype)) if kind == "mask" else None
    return inputs, of_out, draw(st.sampled_from([1, 40, 100, 2**20])), options


# Numbers


@settings(max_examples=300, deadline=None)
@given(cases())
def test_values_and_gradients_are_those_in_float64(case):
    inputs, of_out, chunk, options = case
    plain, after = results(inputs, of_out, **options), torch.rand(1)
    found, again = ours(inputs, of_out, chunk, **options), torch.rand(1)
    assert_right(found, plain, exact(inputs, of_out, **options))
    assert found[0].stride() == plain[0].stride()
    assert torch.equal(after, again)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_the_dropped_weights_are_those_that_pytorch_drops(dtype):
    query = torch.zeros(2, 3, 7, 4).to(dtype)
    value = torch.eye(16).expand(2, 3, 16, 16).to(dtype)  # by which the result is the weights
    inputs = query, torch.zeros(2, 3, 16, 4).to(dtype), value
    for dropped in (0.1, 0.5, 0.99):
        plain, found = (run(inputs, dropout_p=dropped)[0] for run in (results, ours))
        assert torch.equal(plain != 0, found != 0)
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("lowest", [False, -INF, "least", -1e9, -1e4])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_queries_that_may_see_nothing(lowest, dropped):
    inputs = three(length=9)
    mask = torch.ones(9, 9, dtype=torch.bool) if lowest is False else torch.zeros(9, 9).to(HALF)
    mask[[0, 4]] = torch.finfo(HALF).min if lowest == "least" else lowest
    plain, found = (run(inputs, attn_mask=mask, dropout_p=dropped) for run in (results, ours))
    right = exact(inputs, attn_mask=mask, dropout_p=dropped)
    if lowest in (-1e9, -1e4):  # float32 tells scores beside it no longer apart
        right = [one.clone() for one in right]
        assert torch.isfinite(torch.cat([one.flatten() for one in found])).all()
        assert float(found[3].double().norm() / right[3].norm()) == pytest.approx(1, rel=0.1)
        return
    for mine, theirs, wanted in zip(found, plain, right, strict=True):
        assert bool((mine.double() - wanted).norm() <= 2.0**-6 * wanted.norm())
        assert torch.equal(mine[..., [0, 4], :] == 0, theirs[..., [0, 4], :] == 0) or lowest == "least"


@pytest.mark.parametrize("kept", [1, 2, 3], ids=["query", "key", "value"])
@pytest.mark.parametrize("strange", [INF, -INF, NAN])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_numbers_that_are_not_finite_give_what_they_give(kept, strange, dropped):
    inputs = [one.detach().clone() for one in three(length=6)]
    inputs[kept - 1][1, 2, 3, 4] = strange
    plain, found = (run(inputs, dropout_p=dropped) for run in (results, ours))
    right = exact(inputs, dropout_p=dropped)  # of a query that is NaN PyTorch's kernel makes zeros
    assert torch.equal(found[0].isnan(), right[0].isnan())
    assert torch.equal(found[0].isinf(), right[0].isinf())
    finite = plain[0].isfinite() & right[0].isfinite()
    torch.testing.assert_close(found[0][finite], plain[0][finite], rtol=0.03, atol=0.03)
    other = [one[0].isfinite().all() for one in found]  # of the sample that is ordinary
    assert all(other)


@pytest.mark.parametrize("size", [1e-20, 1e3])
def test_small_and_large_inputs(size):
    inputs = [one.float() * size for one in three(FLOAT)]
    plain, found = (run(inputs, dropout_p=0.2) for run in (results, ours))
    wanted = exact(inputs, dropout_p=0.2)
    for mine, theirs, right in zip(found, plain, wanted, strict=True):
        error, other = (float((one.double() - right).norm()) for one in (mine, theirs))
        assert error <= max(1e-4 * float(right.norm()), 3 * other)


def test_of_many_keys_all_are_read():
    for keys in (1000, attention.MOST_KEYS):
        inputs = lying((1, 2, 3, 8), HALF), *(lying((1, 2, keys, 8), HALF) for _ in range(2))
        mask = torch.rand(3, keys) > 0.1
        arguments = {"attn_mask": mask, "dropout_p": 0.1}
        assert_right(*(run(inputs, **arguments) for run in (ours, results, exact)))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_the_number_of_threads_changes_no_bit_of_the_c_code(dtype):
    before, found = torch.get_num_threads(), []
    scores, gradient, mask = torch.randn(2, 40, 70, 50).to(dtype), torch.randn(40, 70, 50).to(dtype), None
    kept, part = torch.rand(4, 10, 70, 50) > 0.1, (slice(0, 4), slice(0, 10))
    mask = torch.randn(4, 1, 1, 50).to(dtype).expand(4, 10, 70, 50)
    how = attention._How(0.3, is_causal=False, dropped=0.1)
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            sums, (one, two), of = torch.empty(4, 10, 70, dtype=torch.int64), scores.clone(), gradient.clone()
            attention._pass("forward", (one, two), sums, mask, kept, part, how)
            attention._pass("backward", (one, of), sums, mask, kept, part, how)
            found.append((sums, one, two, of))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("architecture", ["x86-64", "haswell"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
def test_narrower_vectors_give_the_same(architecture, monkeypatch, tmp_path):
    """As on processors without AVX or AVX-512."""
    flags = [flag.replace("native", architecture) for flag in c_code.FLAGS]
    subprocess.run(["gcc", *flags, str(attention.SOURCE), "-o", str(tmp_path / "it.so")], check=True)
    if architecture == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    for dtype in (HALF, FLOAT):
        inputs = three(dtype, length=37)
        wide = ours(inputs, dropout_p=0.1, is_causal=True)
        with monkeypatch.context() as patched:
            patched.setattr(attention, "compiled", lambda _: ctypes.CDLL(str(tmp_path / "it.so")))
            narrow = ours(inputs, dropout_p=0.1, is_causal=True)
        for one, other in zip(narrow, wide, strict=True):
            assert float((one - other).norm() / other.norm()) < (1e-5 if dtype == FLOAT else 2.0**-7)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_forked_after_threads_have_begun_does_not_wait_for_them():
    before, inputs = torch.get_num_threads(), three(length=64)
    try:
        with acting():
            torch.set_num_threads(2)
            results(inputs)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the tests
                signal.alarm(20)
                torch.set_num_threads(1)
                results(inputs)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.usefixtures("one_thread")
def test_a_process_forked_while_a_thread_begins_can_begin():
    with attention._ours.lock:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # else it would wait for ever
            ours(three())
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# What is differentiated


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_wanted_gradients_are_there(wanted):
    values = [one.detach() for one in three()]

    def gradients():
        inputs = [one.clone().requires_grad_(n in wanted) for n, one in enumerate(values)]
        sdpa(*inputs).square().sum().backward()
        return [one.grad for one in inputs]

    expected = gradients()
    with acting() as told:
        found = gradients()
    assert len(told) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert float((mine - theirs).norm()) < 0.05 * float(theirs.norm())


def near(found, expected, part=0.05):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.shape == theirs.shape
            assert float((mine - theirs).detach().norm()) <= part * float(theirs.detach().norm())


FORMS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.arange(25).view(5, 5) % 7 > 2},
    "nothing": {"attn_mask": (torch.arange(5) != 2)[:, None].expand(5, 5)},
    "added": {"attn_mask": torch.arange(25.0).view(5, 5) % 3},
    "scale": {"scale": 0.9},
}


@pytest.mark.parametrize("together", [False, True], ids=["three", "one"])
@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_are_pytorchs(form, together):
    """Also where query, key and value are one tensor, or come of each other."""
    start = torch.randn(2, 3, 5, 8)

    def penalty():
        torch.manual_seed(3)
        x = start.clone().requires_grad_()
        inputs = (x, x, x) if together else (x, x * 2, x.square())
        out = sdpa(*inputs, dropout_p=0.2, **FORMS[form])
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), x)]

    expected = penalty()
    with acting() as told:
        near(penalty(), expected, 1e-4)
    assert len(told) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("together", [False, True], ids=["three", "one"])
def test_many_gradients_at_once_are_pytorchs(form, together):
    inputs, of_out = list(three(FLOAT)), torch.randn(4, 2, 3, 5, 8)
    inputs = inputs[:1] * 3 if together else inputs

    def many():
        torch.manual_seed(3)
        out = sdpa(*inputs, dropout_p=0.2, **FORMS[form])
        return torch.autograd.grad(out, inputs[: 1 if together else 3], of_out, is_grads_batched=True)

    expected = many()
    with acting() as told:
        near(many(), expected, 1e-4)
    assert len(told) == 1


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_another_device_may_be_the_usual_one(device):
    inputs, options = three(), {"dropout_p": 0.2, "is_causal": True}
    expected = ours(inputs, **options)
    with torch.device(device):
        assert all(map(torch.equal, ours(inputs, torch.ones(2, 3, 5, 8, device="cpu"), **options), expected))
        with acting():
            out = sdpa(*inputs, **options)
            torch.autograd.grad(out.float().sum(), inputs, create_graph=True)


def test_a_second_backward_pass_gives_the_same():
    inputs = three()
    with acting():
        out = sdpa(*inputs, dropout_p=0.1)
        first, second = (torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", [torch.float16, HALF])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_a_backward_pass_under_an_autocast_that_the_forward_had_off(dtype, kind):
    inputs = three(dtype)
    with acting():
        out = sdpa(*inputs)
        expected = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        with torch.autocast("cpu", kind):
            found = torch.autograd.grad(out.sum(), inputs)
    assert all(map(torch.equal, found, expected))


def test_what_it_returns_may_be_changed_in_place_and_what_it_is_given_may_not():
    inputs = three()
    with acting():
        out = sdpa(*inputs)
        torch.autograd.grad(out.mul_(2).sum(), inputs)
        mask = torch.ones(5, 5, dtype=torch.bool)
        out = sdpa(*inputs, mask)
        mask.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_many_backward_passes_on_other_threads():
    inputs, found = three(length=16), []
    expected = ours(inputs, is_causal=True)

    def repeat():
        for _ in range(30):
            leaves = [one.detach().requires_grad_() for one in inputs]
            out = sdpa(*leaves, is_causal=True)
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])

    with acting() as told:
        others = [threading.Thread(target=repeat) for _ in range(3)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
    assert len(told) == len(found) == 90
    assert all(all(map(torch.equal, one, expected)) for one in found)


# What is left to PyTorch


def plain(*shape, dtype=HALF, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).requires_grad_()


def trained(*inputs, wanted=None, **options):
    out = sdpa(*inputs, **options)
    return [out, *torch.autograd.grad(out.float().sum(), wanted or inputs)]


def seen(context):
    def run():
        with context():
            return [sdpa(plain(2, 3, 5, 8), plain(2, 3, 5, 8), plain(2, 3, 5, 8)).clone()]

    return run


class Own(torch.Tensor):
    """A subclass."""


def compiled_around(backend):
    def run():
        torch._dynamo.reset()
        inputs = [plain(2, 3, 5, 8, seed=n) for n in range(3)]
        return trained_by(torch.compile(sdpa, backend=backend), inputs)

    return run


def trained_by(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.float().sum(), inputs)]


def dual():
    q, k, v = (plain(2, 3, 5, 8, seed=n) for n in range(3))
    with forward_ad.dual_level():  # which PyTorch's kernel does not know
        found = sdpa(forward_ad.make_dual(q, torch.ones_like(q)), k, v, dropout_p=0.1)
        return list(forward_ad.unpack_dual(found))


def alone(dtype, *shape, **options):
    return lambda: trained(*(plain(*shape, dtype=dtype, seed=n) for n in range(3)), **options)


def with_mask(mask):
    return lambda: trained(*(plain(2, 3, 5, 8, seed=n) for n in range(3)), attn_mask=mask())


LEFT = {
    "without gradients": seen(torch.no_grad),
    "inference": seen(torch.inference_mode),
    "nothing differentiable": lambda: [sdpa(*(plain(2, 3, 5, 8).detach() for _ in range(3)))],
    "float32": alone(FLOAT, 2, 3, 5, 8),
    "float64": alone(torch.float64, 2, 3, 5, 8, dropout_p=0.5),
    "float16": alone(torch.float16, 2, 3, 5, 8),
    "3-D": alone(HALF, 3, 5, 8),
    "5-D": alone(HALF, 2, 2, 3, 5, 8),
    "all dropped": alone(HALF, 2, 3, 5, 8, dropout_p=1.0),
    "PyTorch's kernel switched off": lambda: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)(trained)(
        plain(2, 3, 5, 8), plain(2, 3, 5, 8), plain(2, 3, 5, 8)
    ),
    "many queries": lambda: trained(
        plain(1, 1, attention.MOST_KEYS**2 + 1, 1), plain(1, 1, 1, 1), plain(1, 1, 1, 1)
    ),
    "many keys": alone(HALF, 1, 1, attention.MOST_KEYS + 1, 4),
    "no width": lambda: [sdpa(*(plain(2, 3, 5, 0) for _ in range(3)))],
    "one batch for all": lambda: trained(plain(2, 3, 5, 8), plain(1, 3, 5, 8), plain(1, 3, 5, 8)),
    "grouped heads": lambda: trained(
        plain(2, 4, 5, 8), plain(2, 2, 5, 8), plain(2, 2, 5, 8), enable_gqa=True
    ),
    "a mask of gradients": with_mask(lambda: plain(5, 5)),
    "a mask of three dimensions": with_mask(lambda: plain(3, 5, 5).detach() > 0),
    "a mask and causal": alone(
        HALF, 2, 3, 5, 8, attn_mask=torch.ones(5, 5, dtype=torch.bool), is_causal=True
    ),
    "a mask of one dimension": with_mask(lambda: torch.ones(5, dtype=torch.bool)),
    "a mask of other sizes": with_mask(lambda: torch.ones(4, 5, dtype=torch.bool)),
    "a mask of another type": with_mask(lambda: torch.ones(5, 5, dtype=torch.float64)),
    "other types": lambda: trained(plain(2, 3, 5, 8), plain(2, 3, 5, 8, dtype=FLOAT), plain(2, 3, 5, 8)),
    "transform": lambda: [
        torch.func.grad(lambda q, k, v: sdpa(q, k, v).float().sum())(*(plain(2, 3, 5, 8) for _ in range(3)))
    ],
    "vmap": lambda: [torch.vmap(sdpa)(*(plain(4, 2, 3, 5, 8) for _ in range(3)))],
    "forward": dual,
    "meta": lambda: [sdpa(*(plain(2, 3, 5, 8).to("meta") for _ in range(3)))],
    "subclass": lambda: [
        sdpa(*(plain(2, 3, 5, 8).as_subclass(Own) for _ in range(3))).as_subclass(torch.Tensor)
    ],
    "compiled": compiled_around("aot_eager"),
    "a mask of inference": with_mask(lambda: torch.inference_mode()(torch.ones)(5, 5, dtype=torch.bool)),
}


def outcome(function):
    try:
        return [(one.dtype, one.shape, one.stride(), one.detach()) for one in function()]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT)
def test_what_it_is_not_for_is_pytorchs_own(name):
    torch.manual_seed(0)
    expected = outcome(LEFT[name])
    with acting() as told:
        torch.manual_seed(0)
        found = outcome(LEFT[name])
    assert told == []
    if isinstance(expected, tuple):
        assert found == expected
        return
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:3] == theirs[:3]
        assert mine[3].is_meta or torch.equal(mine[3].nan_to_num(9), theirs[3].nan_to_num(9))


def test_few_scores_are_left_to_pytorch():
    small, large = three(batch=1, heads=1, length=127), three(batch=1, heads=1, length=128)
    with acting(LEAST_SCORES) as told:
        for inputs in (small, large):
            sdpa(*inputs)
            sdpa(*(one.float() for one in inputs), dropout_p=0.1)
    assert told == [LEAST_SCORES] * 2
    told, inputs = [], three(batch=8, heads=1, length=128)
    end = attention.begin(told.append)
    sdpa(*inputs, dropout_p=0.1)  # as many as pay
    sdpa(*(one[1:] for one in inputs), dropout_p=0.1)
    sdpa(*(one.float() for one in inputs), dropout_p=0.1)
    end()
    assert told == [LEAST_DROPPED]


def test_tensors_without_memory_are_pytorchs():
    inputs = three()
    with acting() as told:
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = sdpa(*inputs)
            assert sdpa(*three()).shape == (2, 3, 5, 8)
        assert type(found).__name__ == "FakeTensor"
    assert told == []


def test_an_exported_model_holds_pytorchs_operator():
    class Model(nn.Module):
        """Attention of one tensor to itself."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8).to(HALF))

        def forward(self, x):
            return sdpa(x * self.weight, x, x)

    x = torch.randn(2, 3, 5, 8).to(HALF)
    with acting() as told:
        exported = torch.export.export(Model(), (x,))
        assert "scaled_dot_product_attention" in exported.graph_module.code
        assert told == []
        near([exported.module()(x)], [Model()(x)])
        assert told


# Where it is called


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_pytorch_attend_by_it(batch_first):
    torch.manual_seed(0)
    layers = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, dropout=0.1)
    x, padded = torch.randn(4, 6, 16), torch.arange(6) > torch.tensor([[5], [3], [4], [1]])
    x = x if batch_first else x.transpose(0, 1)

    def run():
        torch.manual_seed(1)
        out = layers(x, src_key_padding_mask=padded)
        return [out, *torch.autograd.grad(out.square().sum(), list(layers.parameters()))]

    for autocast in (False, True):
        with torch.autocast("cpu", HALF, enabled=autocast):
            expected = run()
            with acting() as told:
                near(run()[:1], expected[:1], 0.05 if autocast else 1e-5)
        assert told == [4 * 2 * 6 * 6]


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
def test_multihead_attention_under_autocast_and_in_bfloat16(autocast):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(4, 6, 16)
    layer, x = (layer, x) if autocast else (layer.to(HALF), x.to(HALF))

    def run():
        with torch.autocast("cpu", HALF, enabled=autocast):
            out = layer(x, x, x, need_weights=False)[0]
        return [out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))]

    expected = run()
    with acting() as told:
        found = run()
    assert len(told) == 1
    keys = slice(16, 32)  # of the bias, whose gradient is only rounding
    found[2], expected[2] = (
        torch.cat([one[2][: keys.start], one[2][keys.stop :]]) for one in (found, expected)
    )
    near(found, expected)


def test_a_language_model_attends_by_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    tokens, mask = torch.randint(20, (3, 7)), torch.arange(7) < torch.tensor([[7], [4], [1]])

    def run():
        torch.manual_seed(1)
        with torch.autocast("cpu", HALF):
            return [model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state]

    expected = run()
    with acting() as told:
        near(run(), expected)
    assert told == [3 * 2 * 7 * 7] * 2


def products(*_, **__):
    """Keeps the results of products, and computes everything else again."""

    def policy(context, operator, *arguments, **keywords):
        keep = operator in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "products kept", "on the host", "debug"])
def test_what_is_saved_may_be_kept_in_other_ways(kind):
    inputs = three(how="transposed")

    def attend(*inputs):
        return sdpa(*inputs, dropout_p=0.2, is_causal=True).float().square()

    def run():
        torch.manual_seed(1)
        leaves = [one.detach().requires_grad_() for one in inputs]
        options = {"use_reentrant": kind == "reentrant"}
        if kind == "products kept":
            options["context_fn"] = products
        with torch.autograd.graph.save_on_cpu() if kind == "on the host" else nullcontext():
            if kind in ("on the host", "debug"):
                with torch.autograd.detect_anomaly() if kind == "debug" else nullcontext():
                    out = attend(*leaves)
            else:
                out = checkpoint(attend, *leaves, **options)
        return (
            [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
            if kind != "reentrant"
            else backward(out, leaves)
        )

    def backward(out, leaves):
        out.sum().backward()
        return [out.detach(), *(one.grad for one in leaves)]

    with acting() as told:
        torch.manual_seed(1)
        leaves = [one.detach().requires_grad_() for one in inputs]
        expected = backward(attend(*leaves), leaves)
        found = run()
    assert len(told) == (3 if kind in ("not reentrant", "products kept") else 2)
    first = kind == "reentrant"  # whose first pass is without gradients, and so PyTorch's
    assert all(map(torch.equal, found[first:], expected[first:]))


def test_who_keeps_float32_in_fewer_bits_keeps_the_sums():
    inputs, packed = three(), []

    def pack(tensor):
        packed.append(tensor.dtype)
        return tensor

    with acting(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sdpa(*inputs, dropout_p=0.1)
    assert FLOAT not in packed


def test_its_products_are_counted():
    inputs = three(length=16)
    with acting() as told, FlopCounterMode(display=False) as counter:
        sdpa(*inputs).sum().backward()
    assert told
    assert counter.get_total_flops() == 7 * 2 * 2 * 3 * 16 * 16 * 8


# For how long, and beside what


def attends():
    """Is it computed here?"""
    query, *rest = three(batch=1, heads=1, length=128)
    out = sdpa(query, *rest)
    return "_Attention" in out.grad_fn.name()


@pytest.mark.parametrize("order", [1, -1])
def test_pytorch_computes_again_once_all_sessions_have_ended(order):
    inputs = three(batch=1, heads=1, length=128)
    expected = results(inputs)
    assert not attends()
    first, second = (opened(), opened())[::order]
    assert attends()
    first.close()
    assert attends()
    second.close()
    assert not attends()
    assert all(map(torch.equal, results(inputs), expected))
    with opened():
        assert attends()
    assert not attends()
    assert not attention._ours.told


def test_a_session_that_fails_in_opening_leaves_pytorchs():
    with pytest.raises(Refused):
        opened(plan={"batched_attention": {}, "conv_gemm": {}})
    assert not attends()


def test_a_session_counts_no_scores_of_an_earlier_one():
    large, small = three(batch=2, heads=1, length=128), three(batch=1, heads=1, length=128)
    with opened() as first:
        sdpa(*large)
        with opened() as second:
            sdpa(*small)
    notes = [one.build.notes["batched_attention"] for one in (first, second)]
    assert notes == [[2 * LEAST_SCORES], [LEAST_SCORES]]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_plan_may_compile_beside_it():
    losses = []
    for plan in ({}, {"batched_attention": {}, "compile": {}}):
        torch.manual_seed(0)
        job = attending()
        with start(job, Plan.from_dict(plan), inspect()) as session:
            losses.append([float(session.step(batch)) for batch in session.batches(job.data())])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    "beside", ["checkpoint", "bf16_autocast", "bf16_weights", "compress_activations", "micro_batches"]
)
@pytest.mark.usefixtures("one_thread")
def test_beside_others_it_trains_the_same_model(beside):
    torch.manual_seed(0)
    start_at = nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
    )
    batch, ends = torch.randn(16, 64, 16), []
    for plan in ({}, {"batched_attention": {}, beside: {}}):
        model = copy.deepcopy(start_at)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda m, b: (m(b).float() - 1).square().mean()  # noqa: E731
        with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
            with torch.autocast("cpu", HALF, enabled=bool(plan) and not beside.startswith("bf16")):
                ends.append([float(session.step(batch)) for _ in range(4)])
            assert not plan or session.build.notes["batched_attention"]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


@pytest.mark.parametrize("plan", ["bf16_autocast", "bf16_weights"])
def test_half_precision_leaves_many_scores_alone_and_no_others(plan):
    class Model(nn.Module):
        """Attention of one tensor to itself."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            return functional.scaled_dot_product_attention(x, x, x)  # which is exchanged

    many, model = torch.randn(8, 1, 128, 8), Model()
    with opened(model, {plan: {}, "batched_attention": {}}) as session:
        scores = session.build.notes["batched_attention"]
        session.step(many[:7])
        with torch.no_grad():
            model(many)
        assert scores == []
        session.step(many)
        assert scores == [LEAST_DROPPED]


# What it says of a step


@on_cpu
def test_it_confirms_by_its_scores():
    job = attending()
    with start(job, Plan([BatchedAttention()]), inspect()) as session:
        for batch in session.batches(job.data()):
            session.step(batch)
        seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
    assert (
        BatchedAttention().confirm(seen, seen) == "attention of up to 32,768 scores by products of many heads"
    )
    nothing = Observation({}, {}, 0, 0.0, notes={"batched_attention": []})
    with pytest.raises(Refused, match="changed nothing: no attention of 16,384 scores or more in bfloat16"):
        BatchedAttention().confirm(nothing, nothing)


def changed(machine, *features, **profile):
    device = dataclasses.replace(machine.device, features=features)
    machine = dataclasses.replace(
        machine, devices=tuple(device if one == machine.device else one for one in machine.devices)
    )
    plain = plain_profile()
    return dataclasses.replace(plain, features=plain.features | profile), machine


@on_cpu
def test_it_is_proposed_where_attention_is_slow_or_would_be_in_bfloat16():
    def proposed(*features, **profile):
        return BatchedAttention.candidates(*changed(inspect(), *features, **profile))

    def company(*features, **profile):
        return BatchedAttention().company(*changed(inspect(), *features, **profile))

    assert proposed("avx512_bf16") == proposed() == [BatchedAttention()]
    assert proposed(slow_attention=False) == []
    assert proposed("avx512_bf16", slow_attention=False) == [BatchedAttention()]
    assert proposed("avx512_bf16", attention_scores=LEAST_SCORES - 1) == []
    assert company() == [{}]
    assert company("avx512_bf16") == [{}, {"bf16_autocast": {}}, {"bf16_weights": {}}]
    assert company("amx_bf16", slow_attention=False) == [{"bf16_autocast": {}}, {"bf16_weights": {}}]
    assert company("amx_bf16", dtype="bfloat16") == [{}]
    old = dataclasses.replace(plain_profile(), features={})
    assert BatchedAttention.candidates(old, inspect()) == []


def test_more_scores_may_gain_more():
    def most(scores):
        profile = dataclasses.replace(plain_profile(), features={"attention_scores": scores})
        return BatchedAttention.gain(profile, inspect())[1]

    assert most(0) == 1
    assert most(200_000) == pytest.approx(1 / 0.88)  # half of 2.4 of 10 ms
    assert most(10**9) == pytest.approx(2)


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_code.shutil, "which", lambda _: None)
    c_code.compiled.cache_clear()
    try:
        with pytest.raises(
            Refused, match="batched_attention: its C code could not be compiled: gcc is needed"
        ):
            opened()
    finally:
        c_code.compiled.cache_clear()
    assert not attends()


@on_cpu
def test_run_adds_it_where_attention_is_slow():
    def added(differentiated, *features, own=(), model=None):
        _, machine = changed(inspect(), *features)
        groups = additions(model or nn.Linear(2, 2), machine, own, differentiated)
        return [[one.name for one in group] for group in groups if BatchedAttention() in group]

    both = ["bf16_autocast", "batched_attention"]
    flash, written = "ScaledDotProductFlashAttentionForCpuBackward0", "SafeSoftmaxBackward0"
    assert added([]) == []
    assert added([flash]) == []
    assert added([flash], "avx512_bf16") == [both]
    assert added([flash], "avx512_bf16", model=nn.Linear(2, 2).bfloat16())[0] == ["batched_attention"]
    assert added([written], "avx512_bf16") == [["batched_attention"], both]
    assert added([written], "avx512_bf16", own=("batched_attention",)) == []
    assert added([flash], "avx512_bf16", own=("bf16_autocast",)) == [["batched_attention"]]
