import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from vivace.tensors.precision import SHORT, RowsInFloat32, sum_in_float32
from vivace.torch_internals.tensors import OperatorMode

TORCHS_OWN = functional.scaled_dot_product_attention


@pytest.fixture
def build():
    """A workbench without models, which is closed afterwards."""
    found = SimpleNamespace(device=torch.device("cpu"), models=[], callbacks=[])
    found.on_close = found.callbacks.append
    sum_in_float32(found)
    yield found
    for callback in reversed(found.callbacks):
        callback()
    assert functional.scaled_dot_product_attention is TORCHS_OWN


class Attention(OperatorMode):
    """Notes in which types the kernels of attention, or the products of it, compute."""

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def run_operator(self, function, arguments, keywords):
        if "attention" in str(function) or "bmm" in str(function):
            self.kinds.add(arguments[0].dtype)
        return function(*arguments, **keywords)


def heads(positions, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 4, positions, 32, generator=generator).to(dtype) for _ in range(3)]
    return [one.requires_grad_() for one in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "sums"}])
def test_attention_over_short_sequences_computes_in_float32(build, dtype, options):
    inputs = heads(64, dtype)
    if "attn_mask" in options:
        options = {"attn_mask": torch.zeros(64, 64, dtype=dtype).masked_fill(torch.eye(64).bool(), -1e4)}
    with Attention() as seen:
        found = functional.scaled_dot_product_attention(*inputs, **options)
        found.float().sum().backward()
    assert seen.kinds == {torch.float32}
    assert found.dtype == dtype
    assert {one.grad.dtype for one in inputs} == {dtype}
    exact = [one.detach().double().requires_grad_() for one in inputs]
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    wanted = TORCHS_OWN(*exact, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_under_autocast_it_gives_what_autocast_would(build):
    inputs = heads(64, torch.float32)
    with Attention() as seen, torch.autocast("cpu", torch.bfloat16):
        found = functional.scaled_dot_product_attention(*inputs)
    assert (seen.kinds, found.dtype) == ({torch.float32}, torch.bfloat16)


@pytest.mark.parametrize(
    ("positions", "dtype", "options"),
    [
        (SHORT // 32 + 1, torch.bfloat16, {}),
        (64, torch.bfloat16, {"dropout_p": 0.1}),
        (64, torch.float32, {}),
        (64, torch.float64, {}),
    ],
)
def test_other_attention_is_torchs_own(build, positions, dtype, options):
    found, wanted = [], []
    for attend, into in ((functional.scaled_dot_product_attention, found), (TORCHS_OWN, wanted)):
        torch.manual_seed(0)
        inputs = heads(positions, dtype)
        into.append(attend(*inputs, **options))
        into[0].sum().backward()
        into += [one.grad for one in inputs]
    assert all(map(torch.equal, found, wanted))


def test_compiled_attention_computes_in_float32_too(build):
    inputs = heads(64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*inputs)
        wanted = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(found, wanted)


def test_copies_and_pickles_of_a_model_have_the_forwards_of_their_own_classes():
    model, undo = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), []
    build = SimpleNamespace(device=torch.device("cpu"), models=[model], on_close=undo.append)
    sum_in_float32(build)
    names = [part.forward.__name__ for part in model if "forward" in vars(part)]
    copies = [copy.deepcopy(model), copy.copy(model[0]), pickle.loads(pickle.dumps(model))]
    for callback in reversed(undo):
        callback()
    assert names == ["forward"] * 2
    for part in (part for one in (model, *copies) for part in one.modules()):
        assert not {"forward", "__getstate__"} & vars(part).keys()
    assert torch.equal(copies[0][0].weight, model[0].weight)


@pytest.mark.parametrize("named", [(), ("weight",), ("input", "weight")])
def test_rows_add_up_in_float32_however_the_table_is_handed_over(named):
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    given = {"input": torch.zeros(8192, dtype=torch.long), "weight": weight}
    positional = [value for name, value in given.items() if name not in named]
    with RowsInFloat32():
        rows = functional.embedding(*positional, **{name: given[name] for name in named})
    rows.backward(torch.ones_like(rows))
    assert weight.grad[0].tolist() == [8192.0] * 4
