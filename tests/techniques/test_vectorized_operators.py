import dataclasses
import os
import signal
import threading
import warnings
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.mechanisms import c_code
from vivace.observing.observe import observe
from vivace.operators import LEAST_ONE_BY_ONE as LEAST
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.technique import registry
from vivace.techniques.vectorized_operators import operators
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.testing.contract import plain_profile

VectorizedOperators = registry.find("vectorized_operators")

NO_GCC = not any(map(c_code.shutil.which, ("gcc", "g++")))
needs_gcc = pytest.mark.skipif(NO_GCC, reason="there is no gcc")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
INF, NAN = float("inf"), float("nan")


class Everything(nn.Module):
    """All five operators, on 16,384 numbers or more of 16 samples."""

    def __init__(self, half=False):
        super().__init__()
        self.embed, self.act, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.PReLU(8), nn.Linear(8 * 64, 4)
        self.half = half

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            maps = functional.max_pool2d(self.act(self.embed(x)), 2)  # 32,768 numbers, and 8,192 of them
            flat = maps.flatten(2).transpose(1, 2)
            rows = flat.flatten(0, 1)[torch.arange(4096) * 7 % 1024]  # a graph's edges, say
            scores = (flat @ flat.transpose(1, 2)) / 3  # 16 x 64 x 64
            causal = torch.ones(64, 64, dtype=torch.bool).tril()
            scores = torch.where(causal, scores, -INF).softmax(-1).masked_fill(~causal, 0.0)
            flat = scores.to(flat.dtype) @ flat + rows.view(16, 4, 64, 8).sum(1)
            return self.last(flat.flatten(1)).float()


def everything(half=False):
    numbers = torch.Generator().manual_seed(0)
    images = torch.randn(48, 1, 16, 16, generator=numbers)
    data = TensorDataset(images, torch.randint(4, (48,), generator=numbers))
    return Job(
        model=lambda: Everything(half),
        data=lambda: DataLoader(data, batch_size=16, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


@pytest.mark.usefixtures("one_thread")
class TestVectorizedOperators(TechniqueContract):
    technique = VectorizedOperators
    jobs: ClassVar = {**TINY_JOBS, "everything": everything, "half": lambda: everything(half=True)}


@contextmanager
def acting(least=1):
    """The operators compute here, also of few numbers; which have, and of how many numbers each."""
    found = []
    before, operators.LEAST_ONE_BY_ONE = operators.LEAST_ONE_BY_ONE, least
    end = operators.begin(lambda name, numbers: found.append((name, numbers)))
    try:
        yield found
    finally:
        end()
        operators.LEAST_ONE_BY_ONE = before


@pytest.fixture
def deterministic():
    """In the order of the rows torch adds under deterministic algorithms."""
    with in_order():
        yield


@contextmanager
def in_order():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def opened(model=None, plan=None):
    model = model or nn.Linear(2, 2)
    return attach(
        Plan.from_dict(plan or {"vectorized_operators": {}}),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
    )


def outcome(function):
    """What it returns or raises, and of what it warns."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            given = function()
        except Exception as error:
            given = (type(error), str(error))
    given = (given,) if isinstance(given, torch.Tensor) else given
    return given, {str(one.message) for one in said}


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def facts(one, any_nan=False):
    """Of a tensor all that can be known: of a sum of two NaN either's bits may remain."""
    if not isinstance(one, torch.Tensor):
        return one
    bits = (torch.view_as_real(one) if one.is_complex() else one).contiguous()
    if any_nan and bits.is_floating_point():
        bits = bits.nan_to_num(NAN, INF, -INF)
    bits = bits.view(INTEGERS[bits.element_size()]).flatten().tolist()
    return one.dtype, one.shape, one.stride(), bits


def is_same(function, any_nan=False, least=1):
    """It gives with these kernels what it gives without, be it an error; which kernels were used."""
    expected, torchs = outcome(function)
    with acting(least) as told:
        found, said = outcome(function)
    assert [facts(one, any_nan) for one in found] == [facts(one, any_nan) for one in expected]
    assert said <= torchs
    return told


# What they are given

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**31)
FORMS = st.sampled_from(["dense", "dense", "permuted", "gaps", "expanded", "shifted"])
SUITED = (torch.float32, torch.bfloat16, torch.float64)
DTYPES = st.sampled_from([*SUITED, *SUITED, torch.float16, torch.int64, torch.bool, torch.complex64])
SPECIAL = (0.0, -0.0, 1.0, INF, -INF, NAN)


def filled(shape, dtype, seed, usual=False):
    """Any bits, among them NaN of all kinds, or small numbers with many of them equal; and special ones."""
    source = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype == torch.bool or not dtype.is_floating_point or usual:
        found = torch.randint(-3, 4, (count,), generator=source).to(dtype)
        return (found > 0 if dtype == torch.bool else found / 2 if usual else found).to(dtype).view(shape)
    size = torch.tensor([], dtype=dtype).element_size()
    found = torch.randint(256, (count * size,), generator=source, dtype=torch.uint8).view(dtype)
    at = torch.randint(count, (3,), generator=source)
    found[at] = torch.tensor(SPECIAL)[torch.randint(6, (3,), generator=source)].to(dtype)
    return found.view(shape)


def laid(tensor, form, seed):
    """The same numbers, otherwise in memory; where it is to be expanded, one for several."""
    order = torch.randperm(tensor.dim(), generator=torch.Generator().manual_seed(seed)).tolist()
    if form == "permuted":
        back = sorted(range(tensor.dim()), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(back)
    if form == "gaps":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if form == "expanded":
        for axis in order[: 1 + seed % tensor.dim()] if tensor.dim() else ():
            tensor = tensor.narrow(axis, 0, 1).expand_as(tensor)
    if form == "shifted":
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
    return tensor


@st.composite
def tensors(draw, shape, dtype, usual=False):
    seed = draw(SEEDS)
    return laid(filled(shape, dtype, seed, usual), draw(FORMS), seed)


@st.composite
def masks_of(draw, shape):
    """Of the last axes of a shape, one number for several along some."""
    last = shape[draw(st.integers(0, len(shape))) :]
    sizes = tuple(size if draw(st.booleans()) or draw(st.booleans()) else 1 for size in last)
    return draw(tensors(sizes, torch.bool))


# where

OPERANDS = st.one_of(  # numbers, and those in tensors without an axis
    st.sampled_from([0.0, -0.0, 3, -1e30, 2**54 + 2**30 + 1, INF, -INF, NAN, True, 1j]),
    st.builds(lambda dtype, seed: filled((), dtype, seed), DTYPES, SEEDS),
)


@needs_gcc
@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=SHAPES, dtype=DTYPES, alike=st.booleans())
def test_where_is_torchs(data, shape, dtype, alike):
    mask = data.draw(masks_of(shape))
    one = data.draw(st.one_of(OPERANDS, tensors(shape, dtype)))
    other = data.draw(st.one_of(tensors(shape, dtype if alike else data.draw(DTYPES)), OPERANDS))
    is_same(lambda: torch.where(mask, one, other))


def plain(*shape, dtype=torch.float32):
    return filled(shape, dtype, 5)


def mask(*shape):
    return filled(shape, torch.bool, 7)


WHERE = {
    "same": lambda: (mask(6, 4, 5), plain(6, 4, 5), plain(6, 4, 5)),
    "rows": lambda: (mask(4, 1), plain(6, 4, 5), plain(6, 4, 5)),
    "columns": lambda: (mask(5), plain(6, 4, 5), 0.0),
    "outer": lambda: (mask(6, 1, 1), -INF, plain(6, 4, 5)),
    "both": lambda: (mask(6, 1, 5), plain(6, 4, 5, dtype=torch.bfloat16), 2),
    "one": lambda: (mask(), plain(6, 4, 5, dtype=torch.float64), plain(6, 4, 5, dtype=torch.float64)),
    "integers with a fraction": lambda: (mask(5), plain(4, 5, dtype=torch.int64), 0.5),  # torch makes floats
    "number of another type": lambda: (mask(5), plain(4, 5), torch.tensor(0.1, dtype=torch.float64)),
}
WHERE_NOT = {
    "mask in another order": lambda: (mask(4, 6, 5).transpose(0, 1), plain(6, 4, 5), 0.0),
    "mask with gaps": lambda: (mask(6, 4, 10)[..., ::2], plain(6, 4, 5), 0.0),
    "larger mask": lambda: (mask(6, 4, 5), plain(4, 5), 0.0),
    "two numbers": lambda: (mask(6, 4, 5), 1.0, 0.0),
    "channels_last": lambda: (mask(5), plain(2, 3, 4, 5).to(memory_format=torch.channels_last), 0.0),
    "expanded": lambda: (mask(5), plain(4, 1).expand(4, 5), plain(4, 5)),
    "broadcast": lambda: (mask(5), plain(4, 1), plain(4, 5)),
    "two types": lambda: (mask(5), plain(4, 5), plain(4, 5, dtype=torch.float64)),
    "complex number": lambda: (mask(5), plain(4, 5), torch.tensor(1j)),
    "integers": lambda: (mask(5), plain(4, 5, dtype=torch.int64), 0),
    "float16": lambda: (mask(5), plain(4, 5, dtype=torch.float16), 0),
    "uint8": lambda: (mask(5).byte(), plain(4, 5), 0.0),
    "int mask": lambda: (mask(5).int(), plain(4, 5), 0.0),
    "shapes that do not fit": lambda: (mask(3), plain(4, 5), 0.0),
}


@needs_gcc
@pytest.mark.parametrize("name", [*WHERE, *WHERE_NOT])
def test_where_computes_what_suits_it(name):
    given = {**WHERE, **WHERE_NOT}[name]()
    told = is_same(lambda: torch.where(*given))
    assert [one for one, _ in told] == (["where"] if name in WHERE else [])


# masked_fill

VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, -1e9, 3, True, INF, -INF, NAN, 1e39, -3.4e38, 1e300, 5e-324, 1 + 2**-8]),
    st.sampled_from([2**54 + 2**30 + 1, -(2**62) + 1, 2**63 + 5, 2**70, 1j, 2 + 0j]),
    st.floats(),
    st.builds(lambda dtype, seed: filled((), dtype, seed), DTYPES, SEEDS),
    st.builds(lambda number: torch.tensor(number), st.sampled_from([2**54 + 2**30 + 1, 1e39, [1.0], 7])),
)


@needs_gcc
@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=SHAPES, dtype=DTYPES, value=VALUES, in_place=st.booleans())
def test_masked_fill_is_torchs(data, shape, dtype, value, in_place):
    chosen, form, seed = data.draw(masks_of(shape)), data.draw(FORMS), data.draw(SEEDS)

    def fill():
        given = laid(filled(shape, dtype, seed), form, seed)
        if not in_place:
            return given.masked_fill(chosen, value), given
        changed = given.masked_fill_(chosen, value)
        return changed, given, torch.tensor([changed is given, given._version == 1])

    is_same(fill)


def fills(make, chosen, value):
    return lambda: make().masked_fill_(chosen, value)


def overlapping():
    numbers = torch.ones(16)
    return numbers.masked_fill_(numbers.view(torch.uint8)[:16].view(torch.bool), 3.0)


def leaf():
    return torch.ones(4, 5, requires_grad=True).masked_fill_(mask(5), 0.0)


FILL = {
    "-inf": fills(lambda: plain(4, 5), mask(5), -INF),
    "half": fills(lambda: plain(4, 5, dtype=torch.bfloat16), mask(4, 1), -1e30),
    "tensor": fills(lambda: plain(4, 5, dtype=torch.float64), mask(4, 5).t().contiguous().t()[:, 0:1], 3),
    "of a tensor": fills(lambda: plain(4, 5), mask(), torch.tensor(3)),
}
FILL_NOT = {
    "too large": (fills(lambda: plain(4, 5), mask(5), 1e39), "without overflow"),
    "too large for half": (fills(lambda: plain(4, 5, dtype=torch.bfloat16), mask(5), 3.4e38), "overflow"),
    "complex": (fills(lambda: plain(4, 5), mask(5), 1j), "without overflow"),
    "uint8": (fills(lambda: plain(4, 5), mask(5).byte(), 0.0), "only supports boolean masks"),
    "larger mask": (fills(lambda: plain(5), mask(4, 5), 0.0), "output with shape|must match"),
    "with axes": (fills(lambda: plain(4, 5), mask(5), torch.ones(2)), "0-dimensional"),
    "overlapping": (overlapping, "single memory location"),
    "leaf": (leaf, "a leaf Variable that requires grad"),
}


@needs_gcc
@pytest.mark.parametrize("name", FILL)
def test_masked_fill_computes_what_suits_it(name):
    assert [one for one, _ in is_same(FILL[name])] == ["masked_fill"]


@needs_gcc
@pytest.mark.parametrize("name", FILL_NOT)
def test_of_masked_fill_the_errors_are_torchs(name):
    fill, message = FILL_NOT[name]
    assert is_same(fill) == []
    with acting(), pytest.raises(RuntimeError, match=message):
        fill()


@needs_gcc
def test_of_an_expanded_tensor_that_is_filled_torch_warns():
    def fill():
        return torch.ones(1).expand(5).masked_fill_(mask(5), 0.0)

    assert is_same(fill) == []
    with acting(), pytest.warns(UserWarning, match="masked_fill_ on expanded tensors is deprecated"):
        fill()


# Max pooling

SIZES = st.sampled_from([(2, 3), (3,), (1, 1), (1,)])
NUMBERS = st.integers(1, 4)


def several(numbers):
    return st.one_of(numbers, st.tuples(numbers, numbers))


@needs_gcc
@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    planes=SIZES,
    pixels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([*SUITED, torch.float16, torch.int64]),
    usual=st.booleans(),
    window=several(NUMBERS),
    stride=st.one_of(st.none(), several(NUMBERS)),
    padding=several(st.integers(0, 2)),
    dilation=several(st.integers(1, 3)),
    ceil_mode=st.booleans(),
)
def test_max_pooling_is_torchs(
    data, planes, pixels, dtype, usual, window, stride, padding, dilation, ceil_mode
):
    x = data.draw(tensors((*planes, *pixels), dtype, usual))
    is_same(
        lambda: functional.max_pool2d(x, window, stride, padding, dilation, ceil_mode, return_indices=True)
    )


@needs_gcc
@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    planes=SIZES,
    length=st.integers(1, 20),
    dtype=st.sampled_from(SUITED),
    window=NUMBERS,
    stride=NUMBERS,
    padding=st.integers(0, 2),
    dilation=st.integers(1, 3),
    ceil_mode=st.booleans(),
)
def test_max_pooling_of_rows_is_torchs(
    data, planes, length, dtype, window, stride, padding, dilation, ceil_mode
):
    x = data.draw(tensors((*planes, length), dtype, usual=True))
    is_same(
        lambda: functional.max_pool1d(x, window, stride, padding, dilation, ceil_mode, return_indices=True)
    )


def pooled(x, *settings_, **keywords):
    return lambda: torch.ops.aten.max_pool2d_with_indices(x, *settings_, **keywords)


def unpooled():
    values, places = functional.max_pool2d(plain(2, 3, 8, 8), 2, return_indices=True)
    return functional.max_unpool2d(values, places, 2)


MAPS = plain(2, 3, 8, 10)
POOL = {
    "plain": pooled(MAPS, [2]),
    "settings": pooled(MAPS, [3, 2], [2, 1], [1, 0], [1, 2], True),
    "nothing but -inf": pooled(torch.full((2, 3, 8, 10), -INF), [3], [1], [1]),
    "equal numbers": pooled(torch.zeros(2, 3, 8, 10), [3], [1], [1]),
    "a sample": pooled(MAPS[0], [2]),
    "half": pooled(MAPS.bfloat16().nan_to_num(1.0), [2]),
    "unpooled": unpooled,
    "larger than the map": pooled(MAPS[..., :3, :3].contiguous(), [5], [5], [2]),
}
POOL_NOT = {
    "channels_last": pooled(MAPS.to(memory_format=torch.channels_last), [2]),
    "gaps": pooled(MAPS[..., ::2], [2]),
    "double": pooled(MAPS.double(), [2]),
    "empty batch": pooled(MAPS[:0], [2]),
}
POOL_WRONG = {
    "no channels": pooled(MAPS[:, :0], [2]),
    "no window": pooled(MAPS, [0], [1]),
    "no row of a window": pooled(MAPS, [0, 2], [1]),
    "window below nothing": pooled(MAPS, [-1], [1]),
    "no stride": pooled(MAPS, [2], [0]),
    "stride below nothing": pooled(MAPS, [2], [1, -1]),
    "padding below nothing": pooled(MAPS, [2], [2], [-1]),
    "too much padding": pooled(MAPS, [2], [2], [2]),
    "no dilation": pooled(MAPS, [2], [2], [0], [0]),
    "too large": pooled(MAPS, [9]),
    "three numbers": pooled(MAPS, [2, 2, 2]),
    "three strides": pooled(MAPS, [2], [1, 2, 3]),
    "three paddings": pooled(MAPS, [2], [1], [0, 1, 0]),
    "three dilations": pooled(MAPS, [2], [1], [0], [1, 1, 1]),
    "no number": pooled(MAPS, []),
    "no padding": pooled(MAPS, [2], [1], []),
    "dilations without a number": pooled(MAPS, [2], [1], [0], []),
    "two axes": pooled(MAPS[0, 0], [2]),
    "five axes": pooled(MAPS[None], [2]),
}


@needs_gcc
@pytest.mark.parametrize("name", [*POOL, *POOL_NOT, *POOL_WRONG])
def test_max_pooling_computes_what_suits_it(name):
    told = is_same({**POOL, **POOL_NOT, **POOL_WRONG}[name])
    assert [one for one, _ in told] == (["max_pool"] if name in POOL else [])
    if name in POOL_WRONG:
        with pytest.raises(RuntimeError):
            POOL_WRONG[name]()


# Rows that are added


@needs_gcc
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 6),
    more=st.lists(st.integers(1, 5), max_size=2),
    picked=st.lists(st.integers(1, 7), max_size=3),
    dtype=st.sampled_from([*SUITED, torch.float16, torch.int64]),
    usual=st.booleans(),
    accumulate=st.sampled_from([True, True, False]),
)
def test_rows_are_added_as_by_torch(data, rows, more, picked, dtype, usual, accumulate):
    seed = data.draw(SEEDS)
    source = torch.Generator().manual_seed(seed)
    indices = laid(torch.randint(-rows, rows, tuple(picked), generator=source), data.draw(FORMS), seed)
    values = data.draw(tensors((*picked, *more), dtype, usual))
    form = data.draw(st.sampled_from(["dense", "dense", "permuted", "gaps"]))

    def put():
        sums = laid(filled((rows, *more), dtype, seed, usual), form, seed)
        return sums.index_put_((indices,), values, accumulate=accumulate), sums

    with in_order():
        is_same(put, any_nan=True)


def puts(indices, values, *shape, dtype=torch.float32, accumulate=True):
    return lambda: torch.ones(shape, dtype=dtype).index_put_(indices, values, accumulate=accumulate)


def put_outside():
    """Torch's error, and what torch has added before it."""
    sums = torch.ones(3, 5)
    with pytest.raises(IndexError, match="index -4 is out of bounds") as raised:
        sums.index_put_((torch.tensor([0, 1, -4]),), plain(3, 5), accumulate=True)
    return sums, str(raised.value)


def put_itself():
    sums = torch.ones(4, 5)
    return sums.index_put_((torch.tensor([1, 2]),), sums[:2], accumulate=True)


def put_by_itself():
    sums = torch.zeros(12, 5)
    return sums.index_put_((sums.view(torch.int64)[:2, 0],), plain(2, 5), accumulate=True)


def put_leaf():
    return torch.ones(3, 5, requires_grad=True).index_put_((FEW,), plain(3, 5), accumulate=True)


FEW = torch.tensor([2, -1, 2])
MANY = torch.tensor([[0, 2, 1], [2, 2, -3]])
PUT = {
    "repeated": puts((FEW,), plain(3, 5), 3, 5),
    "numbers": puts((FEW,), plain(3), 3),
    "several axes of an index": puts((MANY,), plain(2, 3, 5), 3, 5),
    "several axes of a row": puts((FEW,), plain(3, 2, 5), 3, 2, 5),
    "with gaps": puts((FEW,), plain(3, 10)[:, ::2], 3, 5),
    "one for all": puts((FEW,), plain(1, 5).expand(3, 5), 3, 5),
    "half": puts((FEW,), plain(3, 5, dtype=torch.bfloat16), 3, 5, dtype=torch.bfloat16),
}
PUT_NOT = {
    "axes in another order": puts((MANY,), plain(3, 2, 5).transpose(0, 1), 3, 5),
    "index in another order": puts((MANY.t().contiguous().t(),), plain(1, 1, 5).expand(2, 3, 5), 3, 5),
    "double": puts((FEW,), plain(3, 5, dtype=torch.float64), 3, 5, dtype=torch.float64),
    "where true": puts((torch.tensor([True, False, True]),), plain(2, 5), 3, 5),
    "by bytes": puts((torch.tensor([0, 2], dtype=torch.uint8),), plain(2, 5), 2, 5),
    "by int32": puts((FEW.int(),), plain(3, 5), 3, 5),
    "by two": puts((FEW, FEW), plain(3), 3, 5),
    "by the second": puts((None, FEW), plain(4, 3), 4, 5),
    "values that are repeated": puts((FEW,), plain(5), 3, 5),
    "values of a place": puts((FEW,), torch.tensor(2.0), 3, 5),
    "values of another shape": puts((FEW,), plain(2, 5), 3, 5),
    "values of another type": puts((FEW,), plain(3, 5, dtype=torch.float64), 3, 5),
    "put": puts((FEW[:2],), plain(2, 5), 3, 5, accumulate=False),
    "outside": put_outside,
    "itself": put_itself,
    "by itself": put_by_itself,
    "leaf": put_leaf,
    "into nothing": puts((FEW,), plain(3, 5), 0, 5),
    "a number": puts((FEW,), plain(3)),
    "expanded": lambda: torch.ones(1, 5).expand(3, 5).index_put_((FEW,), plain(3, 5), accumulate=True),
}


@needs_gcc
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", [*PUT, *PUT_NOT])
def test_rows_are_added_where_that_suits(name):
    told = is_same({**PUT, **PUT_NOT}[name])
    assert [one for one, _ in told] == (["index_put"] if name in PUT else [])


@needs_gcc
def test_where_an_index_is_out_of_range_no_row_is_added_twice():
    sums, values = torch.ones(3, 5), torch.ones(3, 5)
    code = c_code.compiled(operators.SOURCE)
    indices = torch.tensor([0, 1, -4])
    places = (sums.data_ptr(), indices.data_ptr(), values.data_ptr())
    numbers = map(operators.ctypes.c_int64, (3, 3, 5, 0, 1))
    assert code.add_rows(*map(operators.ctypes.c_void_p, places), *numbers) == 1
    assert torch.equal(sums, torch.ones(3, 5))


# PReLU


@needs_gcc
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    dtype=st.sampled_from([*SUITED, torch.float16]),
    one=st.booleans(),
    usual=st.booleans(),
)
def test_gradients_of_prelu_are_torchs(data, shape, dtype, one, usual):
    channels = shape[1] if len(shape) > 1 and not one else 1
    weight = data.draw(tensors((channels,), dtype, usual)).detach().requires_grad_()
    x = data.draw(tensors(shape, dtype, usual)).detach().requires_grad_()
    gradient = data.draw(tensors(shape, dtype, usual))

    def differentiated():
        return torch.autograd.grad(functional.prelu(x, weight), (x, weight), gradient)

    told = is_same(differentiated)
    dense = x.is_contiguous() and weight.is_contiguous() and 1 not in shape
    assert not dense or bool(told) == (len(shape) > 1 and dtype in operators.SUMMED)


@needs_gcc
@pytest.mark.parametrize("dtype", operators.SUMMED)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", [torch.channels_last, torch.channels_last_3d])
def test_gradients_of_prelu_in_channels_last_order_are_torchs(form, channels, dtype):
    shape = (2, 3, 4, 5) if form == torch.channels_last else (2, 3, 2, 4, 5)
    x, gradient = (filled(shape, dtype, n, usual=True) for n in (1, 2))
    x = x.to(memory_format=form)
    weight = torch.tensor([0.25, -1.0, 0.3][:channels], dtype=dtype).view(1, -1, *[1] * (len(shape) - 2))
    told = is_same(lambda: torch.ops.aten._prelu_kernel_backward(gradient, x, weight))
    assert told == [("prelu_backward", x.numel())]


# By way of autograd, on threads, and around the least number


def attention(x):
    scores = torch.where(torch.ones(32, 32, dtype=torch.bool).tril(), x @ x.transpose(-1, -2), -INF)
    return scores.softmax(-1) @ x


def losses_with_masks(x):
    return x.masked_fill(x > 1, 0.0) * x


CALLS = {
    "where": attention,
    "both sides": lambda x: torch.where(x > 0, x, x.square()),
    "masked_fill": losses_with_masks,
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "max_pool1d": lambda x: functional.max_pool1d(x.flatten(1), 4),
    "module": lambda x: nn.MaxPool2d(2)(x),
    "rows": lambda x: x.flatten(0, 2)[torch.arange(5000) * 7 % 2048],
    "prelu": lambda x: nn.PReLU(8, 0.3, dtype=x.dtype)(x),
    "vmap": lambda x: torch.vmap(lambda one: torch.where(one > 0, one, 0.0))(x),
}
USED = {"rows": {"index_put"}, "prelu": {"prelu_backward"}, "masked_fill": {"masked_fill"}}
USED |= {"max_pool2d": {"max_pool"}, "max_pool1d": {"max_pool"}, "module": {"max_pool"}}


def called(function, x):
    """Values and gradient."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    values = function(x)
    return values, *torch.autograd.grad(values.float().square().sum(), x)


@needs_gcc
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "channels_last"])
def test_functions_and_their_gradients_are_the_same_bits(name, form):
    x = torch.randn(8, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16() if form == "bfloat16" else x
    x = x.to(memory_format=torch.channels_last) if form == "channels_last" else x
    told = is_same(lambda: called(CALLS[name], x), least=LEAST)
    if form != "channels_last":
        assert {one for one, _ in told} >= USED.get(name, {"where"})


@pytest.fixture
def threads():
    """How many, to be set."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_gcc
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["where", "masked_fill", "max_pool2d", "rows", "prelu"])
@pytest.mark.parametrize("dtype", operators.SUMMED)
def test_the_number_of_threads_changes_no_bit(name, dtype, threads):
    x = torch.randn(8, 8, 32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    threads(1)
    expected = [facts(one) for one in called(CALLS[name], x)]
    with acting(LEAST) as told:
        for number in (1, 2, 3):
            threads(number)
            assert [facts(one) for one in called(CALLS[name], x)] == expected
    assert told


@needs_gcc
def test_rows_are_added_in_their_order_on_several_threads(threads):
    threads(3)
    rows, values = torch.arange(6000) * 7 % 5, plain(6000, 8).nan_to_num(1, 1, 1).clamp(-9, 9)
    with in_order():
        expected = torch.zeros(5, 8).index_put_((rows,), values, accumulate=True)
    with acting() as told:
        assert torch.equal(torch.zeros(5, 8).index_put_((rows,), values, accumulate=True), expected)
    assert told == [("index_put", 48_000)]


class Seen(TorchDispatchMode):
    """The operators that run."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names = [*getattr(self, "names", []), str(function)]
        return function(*arguments, **(keywords or {}))


class Functions(TorchFunctionMode):
    """The functions that are called."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.names = [*getattr(self, "names", []), getattr(function, "__name__", str(function))]
        return function(*arguments, **(keywords or {}))


@needs_gcc
@pytest.mark.parametrize("name", USED)
def test_who_looks_on_sees_the_same_operators(name):
    x = torch.randn(8, 8, 32, 32, generator=torch.Generator().manual_seed(0))

    def seen():
        with Seen() as outer, Seen() as inner, Functions() as functions:
            called(CALLS[name], x)
        return outer.names, inner.names, functions.names

    expected = seen()
    with acting() as told:
        assert seen() == expected
    assert told


@needs_gcc
def test_derivatives_forward_and_inference_are_the_same_bits():
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def function(x):
        return functional.max_pool2d(torch.where(x > 0, x, 0.1), 2).masked_fill(x[..., ::2, ::2] > 1, 0.0)

    def inferred():
        with torch.inference_mode():
            found = function(x)
        assert found.is_inference()
        return found.clone()

    assert is_same(inferred)
    assert is_same(lambda: torch.func.jvp(function, (x,), (x * 2,)))


AROUND = {
    "where": lambda n: torch.where(mask(n), plain(n), 0.0),
    "masked_fill": lambda n: plain(n).masked_fill_(mask(n), 0.0),
    "max_pool": lambda n: functional.max_pool2d(plain(1, 1, n), (1, 2), return_indices=True),
    "index_put": lambda n: torch.zeros(9).index_put_((torch.arange(n) % 9,), torch.ones(n), accumulate=True),
    "prelu_backward": lambda n: torch.ops.aten._prelu_kernel_backward(
        plain(n, 1), plain(n, 1), torch.tensor([[0.5]])
    ),
}


@needs_gcc
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", AROUND)
def test_few_numbers_are_left_to_torch(name):
    assert is_same(lambda: AROUND[name](LEAST - 1), least=LEAST) == []
    assert is_same(lambda: AROUND[name](LEAST), least=LEAST) == [(name, LEAST)]


# For how long


@pytest.fixture
def in_vectors(monkeypatch):
    """A function: are these operators computed by our code now?"""
    calls, compiled = [], operators.compiled
    monkeypatch.setattr(operators, "compiled", lambda source: calls.append(1) or compiled(source))

    def ask():
        calls.clear()
        for one in AROUND.values():
            one(LEAST)
        assert len(calls) in (0, len(AROUND))
        return bool(calls)

    return ask


@needs_gcc
@pytest.mark.parametrize("order", [1, -1])
def test_torch_computes_itself_again_once_all_sessions_have_ended(order, in_vectors):
    assert not in_vectors()
    first, second = (opened(), opened())[::order]
    assert in_vectors()
    first.close()
    assert in_vectors()
    second.close()
    assert not in_vectors()
    with opened():
        assert in_vectors()
    assert not in_vectors()


@needs_gcc
def test_after_a_session_that_fails_in_opening_torch_computes_itself(in_vectors):
    with pytest.raises(Refused) as refused:
        opened(plan={"vectorized_operators": {}, "conv_gemm": {}})
    assert refused.value.technique == "conv_gemm"
    assert not in_vectors()
    with opened():
        with pytest.raises(Refused):
            opened(plan={"vectorized_operators": {}, "conv_gemm": {}})
        assert in_vectors()


@needs_gcc
def test_kernels_that_cannot_be_exchanged_leave_nothing_behind(monkeypatch, in_vectors):
    exchange = operators.exchange

    def exchanged(name, make):
        if name.startswith("max_pool"):  # others have been exchanged before it
            raise Refused("no kernel of PyTorch's own can be exchanged")
        exchange(name, make)

    with monkeypatch.context() as patch:
        patch.setattr(operators._ours, "is_there", False)
        patch.setattr(operators, "exchange", exchanged)
        with pytest.raises(Refused, match=r"^vectorized_operators: no kernel of PyTorch's own"):
            opened()
    assert not in_vectors()
    with opened():
        assert in_vectors()
    assert not in_vectors()


@needs_gcc
def test_a_session_counts_no_numbers_of_an_earlier_one():
    with opened() as first:
        AROUND["where"](3 * LEAST)
        with opened() as second:
            assert second.build.notes["vectorized_operators"] == {}
            AROUND["where"](LEAST)
        AROUND["where"](2 * LEAST)
    assert first.build.notes["vectorized_operators"] == {"where": 3 * LEAST}
    assert second.build.notes["vectorized_operators"] == {"where": LEAST}


@needs_gcc
def test_sessions_may_begin_and_end_while_other_threads_compute():
    chosen, x = mask(LEAST), plain(LEAST).nan_to_num(1.0)
    expected, different = torch.where(chosen, x, 0.0), []
    with opened():
        pass  # what is exchanged and compiled
    ended = threading.Event()

    def compute():
        while not ended.is_set():
            if not torch.equal(torch.where(chosen, x, 0.0), expected):
                different.append(1)

    others = [threading.Thread(target=compute) for _ in range(2)]
    for thread in others:
        thread.start()
    for _ in range(50):
        with opened():
            torch.where(chosen, x, 0.0)
    ended.set()
    for thread in others:
        thread.join()
    assert not different
    assert not operators._ours.told


@needs_gcc
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.usefixtures("one_thread")
def test_a_process_forked_while_a_thread_begins_can_begin():
    with operators._ours.lock:
        child = os.fork()
        if not child:
            signal.alarm(60)  # else it would wait for ever
            with acting() as told:
                torch.where(mask(5), plain(5), 0.0)
            os._exit(told != [("where", 5)])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# When it acts, and what it says


def watched(make, steps=None):
    job = make()
    with start(job, Plan([VectorizedOperators()]), inspect()) as session:
        seen = observe(session, list(session.batches(job.data()))[:steps])
        return VectorizedOperators().confirm(seen, seen), seen.notes


@on_cpu
@needs_gcc
@pytest.mark.parametrize("half", [False, True])
def test_it_confirms_by_what_it_computed(half):
    sentence, notes = watched(lambda: everything(half))
    assert sentence == (
        "index_put of up to 32,768 numbers, masked_fill of up to 65,536 numbers, max_pool of up to 32,768 "
        "numbers, prelu_backward of up to 32,768 numbers, where of up to 65,536 numbers"
    )
    assert repr(watched(lambda: everything(half), steps=1)[1]) == repr(
        notes
    )  # by which equal trials are known


@on_cpu
@needs_gcc
def test_without_such_operators_on_many_numbers_it_changed_nothing():
    with pytest.raises(Refused, match=r"changed nothing: no such operator ran on 16,384 numbers or more"):
        watched(TINY_JOBS["mlp"])


@pytest.fixture
def new_machine(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    c_code.compiled.cache_clear()
    yield tmp_path
    c_code.compiled.cache_clear()


def test_without_a_compiler_it_is_refused(new_machine, monkeypatch, in_vectors):
    monkeypatch.setattr(c_code.shutil, "which", lambda _: None)
    sentence = r"^vectorized_operators: its C code could not be compiled: gcc is needed, and neither gcc nor"
    with pytest.raises(Refused, match=sentence):
        opened()
    assert not in_vectors()


def test_a_compiler_that_fails_is_told(new_machine, monkeypatch, in_vectors):
    compiler = new_machine / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option: -x' >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(new_machine))
    with pytest.raises(Refused, match=r"could not be compiled: .*g\+\+ ends with 4: unknown option: -x"):
        opened()
    assert not in_vectors()


def test_it_is_proposed_where_many_numbers_are_computed_one_by_one():
    def proposed(**features):
        profile = plain_profile()
        profile = dataclasses.replace(profile, features=profile.features | features)
        return VectorizedOperators.candidates(profile, inspect())

    assert proposed() == [VectorizedOperators()]
    assert proposed(one_by_one=LEAST) == [VectorizedOperators()]
    assert proposed(one_by_one=LEAST - 1) == proposed(one_by_one=0) == []
    old = dataclasses.replace(plain_profile(), features={})
    assert VectorizedOperators.candidates(old, inspect()) == []


def test_more_numbers_may_gain_more():
    def most(**features):
        profile = dataclasses.replace(plain_profile(), features=features)
        assert profile.step_seconds == 0.01
        return VectorizedOperators.gain(profile, inspect())[1]

    assert most() == most(one_by_one=0) == 1
    assert most(one_by_one=1_000_000) == pytest.approx(1 / 0.8)  # 2 of 10 ms
    assert most(one_by_one=10**9) == pytest.approx(5)


# With what compiles


@needs_gcc
@pytest.mark.usefixtures("one_thread")
def test_what_is_traced_for_a_compiler_computes_the_same():
    x = torch.randn(2, 4, 128, 128, generator=torch.Generator().manual_seed(0))

    def function(x):
        return functional.max_pool2d(torch.where(x > 0, x, 0.1), 2).masked_fill(x[..., ::2, ::2] > 1, 0.0)

    expected = [facts(one) for one in called(function, x)]
    with acting(LEAST) as told:
        found = called(torch.compile(function, backend="aot_eager"), x)
    assert [facts(one) for one in found] == expected
    assert {one for one, _ in told} >= {"where", "max_pool"}


@needs_gcc
@on_cpu
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_plan_may_compile_beside_it():
    losses = []
    for plan in ({}, {"vectorized_operators": {}, "compile": {}}):
        torch.manual_seed(0)
        job = everything()
        with start(job, Plan.from_dict(plan), inspect()) as session:
            losses.append([float(session.step(batch)) for batch in session.batches(job.data())])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
