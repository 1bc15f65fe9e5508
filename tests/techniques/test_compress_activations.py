import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vivace
from vivace.ledger import Observation
from vivace.mechanisms.saved_tensors import Bfloat16Store, Int8Store, Stored
from vivace.observing.observe import observe
from vivace.technique import registry
from vivace.testing import TechniqueContract

from . import blocky

CompressActivations = registry.find("compress_activations")


@pytest.mark.usefixtures("one_thread")
class TestCompressActivations(TechniqueContract):
    technique = CompressActivations


def distance(seen, wanted):
    one, other = (torch.cat([c[k].flatten() for k in c if k.startswith("gradient")]) for c in (seen, wanted))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 2.0**-8), ("int8", 0.02)])
def test_only_gradients_are_rounded(dtype, largest):
    seen, notes = blocky.course({"compress_activations": {"dtype": dtype}})
    wanted, _ = blocky.course({})
    assert seen["losses"][0] == wanted["losses"][0]
    assert seen["blocks.0.body.1.running_mean"] == pytest.approx(
        wanted["blocks.0.body.1.running_mean"], rel=1e-2
    )
    assert torch.equal(
        seen["blocks.0.body.1.num_batches_tracked"], wanted["blocks.0.body.1.num_batches_tracked"]
    )
    assert torch.equal(seen["stream"], wanted["stream"])
    assert 0 < distance(seen, wanted) < largest
    assert len(notes["compressed_bytes"]) == 4
    assert all(notes["compressed_bytes"].values())


def test_int8_declares_semantics():
    assert blocky.opened({"compress_activations": {}}).promise is vivace.Numerics.ROUNDING
    assert blocky.opened({"compress_activations": {"dtype": "int8"}}).promise is vivace.Numerics.SEMANTICS


def test_the_peak_falls():
    peaks = []
    for plan in ({}, {"compress_activations": {}}, {"compress_activations": {"dtype": "int8"}}):
        with blocky.opened(plan, blocky.Net(12)) as session:
            peaks.append(observe(session, blocky.BATCHES).peak_bytes)
    assert peaks[2] < peaks[1] < 0.8 * peaks[0]


class Nothing:
    """The build and the visit of a store that is tested alone."""


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600))
@settings(max_examples=50, deadline=None)
def test_errors_stay_within_their_bounds(values):
    flat = torch.tensor(values, dtype=torch.float32)
    for store in (Bfloat16Store(Nothing, "x"), Int8Store(Nothing, "x")):
        content, _ = store.put(flat)
        error = (store.get(Stored(content, 0, Nothing())) - flat).abs()
        if type(store) is Bfloat16Store:
            bound = flat.abs() * 2.0**-8 + 1e-38
        else:
            groups = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
            largest = groups.abs().amax(1, keepdim=True).expand_as(groups).reshape(-1)[: len(flat)]
            bound = largest / 252 * 1.0001 + 1e-38
        assert bool((error <= bound).all())


@pytest.mark.parametrize("store", [Bfloat16Store, Int8Store])
def test_what_is_not_finite_spoils_no_neighbour(store):
    own, infinity = store(Nothing, "x"), float("inf")
    flat = torch.tensor([1.0, -infinity, 0.5, infinity, 0.0, float("nan"), -1.0] + [-infinity] * 400)
    found = own.get(Stored(own.put(flat)[0], 0, Nothing()))
    finite = flat.isfinite()
    assert not found[~finite].isfinite().any()
    assert torch.equal(found[flat.isinf()], flat[flat.isinf()])
    assert torch.allclose(found[finite], flat[finite], atol=1 / 252)


@given(st.floats(2.0**-60, 2.0**60, width=32), st.lists(st.booleans(), min_size=1, max_size=3000))
@settings(max_examples=50, deadline=None)
def test_a_mask_with_one_number_beside_zeros_is_kept_as_it_is(number, kept):
    """Of all that dropout keeps, rounding would shift every gradient to the same side."""
    mask, store = torch.tensor(kept, dtype=torch.float32) * number, Bfloat16Store(Nothing, "x")
    content, size = store.put(mask)
    assert size == 2 * len(mask)
    if any(kept[:1000]) or not any(kept):
        assert torch.equal(store.get(Stored(content, 0, Nothing())), mask)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_dropout_shifts_no_gradient_to_one_side(share):
    found = []
    for plan in ({}, {"compress_activations": {}}):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(share)) for _ in range(8)]
        model = torch.nn.Sequential(*layers)
        parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        parts["on_gradients"] = lambda m: found.append(m[0][0].weight.grad.clone())
        parts["loss"] = lambda m, x: (m(x) - 1).square().mean()
        with vivace.attach(vivace.Plan.from_dict(plan), **parts) as session:
            session.step(torch.randn(256, 32))
    wanted, seen = found
    assert float((wanted * seen).sum() / wanted.square().sum()) == pytest.approx(1, abs=1e-3)


class Masked(torch.nn.Module):
    """Causal attention whose mask, of zeros and -inf, is kept for the backward pass."""

    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        query, key, value = self.into(x).chunk(3, -1)
        mask = torch.full((len(x), len(x)), -float("inf")).triu(1)
        return x + self.out((Kept.apply(query @ key.T, mask)).softmax(-1) @ value)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, mask):
        ctx.save_for_backward(mask)
        return scores + mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask.exp(), None


def test_a_mask_of_attention_gives_gradients():
    gradients = []
    for plan in ({}, {"compress_activations": {"dtype": "int8"}}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Masked(), Masked())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keep = lambda m: gradients.append([p.grad.clone() for p in m.parameters()])  # noqa: E731
        more = {"loss": lambda m, x: m(x).square().mean(), "on_gradients": keep}
        plan = vivace.Plan.from_dict(plan)
        with vivace.attach(plan, model=model, optimizer=optimizer, **more) as session:
            session.step(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    for wanted, found in zip(*gradients, strict=True):
        assert torch.allclose(wanted, found, atol=0.05 * float(wanted.abs().max()))


def test_gradients_of_gradients_are_refused_by_name():
    with (
        blocky.opened({"compress_activations": {}}, loss=blocky.penalised) as session,
        pytest.raises(vivace.Refused, match=r"^compress_activations: .*gradients of gradients"),
    ):
        session.step(blocky.BATCHES[0])


def test_confirmation_names_blocks_and_bytes():
    notes = {"compressed_blocks": 2, "compressed_bytes": {"a": 2**20, "b": 2**19}}
    seen = Observation({}, {}, 0, 0.0, notes=notes)
    assert CompressActivations().confirm(seen, seen) == (
        "2 blocks keep 1.50 MiB less for the backward pass, in bfloat16"
    )
    with pytest.raises(vivace.Refused, match="changed nothing"):
        CompressActivations().confirm(Observation({}, {}, 0, 0.0), seen)
