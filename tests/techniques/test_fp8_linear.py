import copy
import importlib.util

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import Refused
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.testing import TechniqueContract, check

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
Fp8Linear = registry.find("fp8_linear")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
EMULATED = Fp8Linear(emulate=True)


@pytest.mark.usefixtures("one_thread")
class TestFp8Linear(TechniqueContract):
    technique = Fp8Linear


@pytest.mark.parametrize("job", ["mlp", "cnn", "transformer", "lstm"])
@pytest.mark.usefixtures("one_thread")
def test_the_contract_is_kept_where_it_is_emulated(job):
    check(Plan([EMULATED]), job)


def opened(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan([Fp8Linear(**{"emulate": True, **settings})])
    return attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean())


def rounded(tensor, dtype):
    """To float8 by one scale with which the largest number just fits, and back: what torchao documents."""
    scale = LARGEST[dtype] / tensor.abs().max().double().clamp(min=1e-12)
    return ((tensor * scale.float()).to(dtype).float() / scale.float()).float()


@pytest.mark.parametrize("shape", [(16, 32), (5, 32), (2, 7, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_products_of_rounded_tensors(shape, bias):
    numbers = torch.Generator().manual_seed(0)
    model, x = nn.Linear(32, 48, bias=bias), torch.randn(shape, generator=numbers, requires_grad=True)
    weight = model.weight.detach()
    with opened(model):
        seen = model(x)
        gradient = torch.randn(seen.shape, generator=numbers)
        seen.backward(gradient)
    x8, w8 = rounded(x.detach(), torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
    g8 = rounded(gradient, torch.float8_e5m2)
    wanted = x8 @ w8.T + (model.bias.detach() if bias else 0.0)
    torch.testing.assert_close(seen.detach(), wanted)
    torch.testing.assert_close(x.grad, g8 @ w8)
    torch.testing.assert_close(model.weight.grad, g8.flatten(0, -2).T @ x8.flatten(0, -2))
    exact = x.detach() @ weight.T
    error = float((x8 @ w8.T - exact).norm() / exact.norm())
    assert 0.01 < error < 2.0**-4
    if bias:
        torch.testing.assert_close(model.bias.grad, gradient.flatten(0, -2).sum(0))


def test_by_rows_gradients_of_weights_can_stay_exact():
    x = torch.randn(16, 32)
    own = nn.Linear(32, 32)
    plain = copy.deepcopy(own)
    with opened(own, recipe="rowwise_with_gw_hp"):
        own(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(own.weight.grad, plain.weight.grad)
    assert Fp8Linear().stricter() == Fp8Linear(recipe="rowwise_with_gw_hp")
    assert Fp8Linear(recipe="rowwise_with_gw_hp").stricter() is None


def test_evaluation_and_layers_of_other_sizes_keep_their_precision():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    with opened(model) as session:
        assert session.build.notes["fp8_linear"][0] == 1
        assert not torch.equal(model[0](x), plain[0](x))
        assert torch.equal(model[1](x), plain[1](x))
        model.eval()
        assert torch.equal(model(x), plain(x))
        model.train()
    assert torch.equal(model(x), plain(x))


def test_under_autocast_the_result_is_in_bfloat16():
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    with opened(model), torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


def test_refusals_have_reasons(monkeypatch):
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(Refused, match="need a GPU; emulate = true"), opened(model, emulate=False):
        pass
    with pytest.raises(Refused, match="multiples of 16"), opened(nn.Linear(16, 10)):
        pass
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(Refused, match="pip install torchao"), opened(model):
        pass


@pytest.mark.parametrize(
    ("capability", "recipe", "word"), [((8, 6), "tensorwise", r"8\.9"), ((8, 9), "rowwise", r"9\.0")]
)
def test_a_gpu_without_float8_units_is_refused(monkeypatch, capability, recipe, word):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    build = vivace.Build(
        models=[nn.Linear(16, 16)],
        optimizer=None,
        machine=vivace.inspect(),
        device=torch.device("cuda"),
        own_step=False,
    )
    with pytest.raises(Refused, match=f"capability {word}"):
        Fp8Linear(recipe=recipe).apply(build)


def seen(operators, notes=(1, 2)):
    return Observation(operators, {}, 0, 0.0, notes={"fp8_linear": list(notes)})


def test_it_confirms_by_products_that_ran():
    evidence = Fp8Linear().confirm(seen({"aten::_scaled_mm": 6}), seen({}))
    assert evidence == "6 products in float8, of 1 linear layer"
    with pytest.raises(Refused, match="changed nothing"):
        Fp8Linear().confirm(seen({"aten::mm": 6}), seen({}))
    assert "emulated" in EMULATED.confirm(seen({}), seen({}))
    with pytest.raises(Refused, match="changed nothing"):
        EMULATED.confirm(seen({}, (1, 0)), seen({}))


def test_its_words_in_plain_pytorch_do_the_same():
    own, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 10)), torch.randn(5, 32)
    model = copy.deepcopy(own)
    names = {"model": model}
    plain = EMULATED.plain()
    exec("\n".join((*plain.start, *plain.model)), names)
    model(x).sum().backward()
    with opened(own):
        own(x).sum().backward()
    for mine, theirs in zip(own.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_that_gets_no_rows_is_passed(recipe):
    """Such as an expert that nothing was sent to."""
    model = nn.Linear(16, 16)
    with opened(model, recipe=recipe):
        model(torch.zeros(0, 16)).sum().backward()
        assert not model.weight.grad.any()


@pytest.mark.parametrize("beside", [{}, {"bf16_autocast": {}}])
def test_a_layer_whose_forward_a_person_has_replaced_keeps_that(beside):
    """As adapters of low rank are put beside a layer."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    more = nn.Linear(16, 16)
    own = model[0].forward
    model[0].forward = lambda x: own(x) + more(x)
    plan = Plan.from_dict({"fp8_linear": {"emulate": True}, **beside})
    optimizer, x = torch.optim.SGD([*model.parameters(), *more.parameters()], lr=0.0), torch.randn(4, 16)
    wanted = model[0](x)
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()) as session:
        assert session.build.notes["fp8_linear"][0] == 1
        assert torch.equal(model[0](x), wanted)
