"""BatchNorm folded into the convolution before it: the same outputs, and nothing folded that must not be."""

import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.calls import Flat
from vivace.serving.folding import folded
from vivace.serving.forms import form_named
from vivace.serving.making import in_numbers
from vivace.serving.material import Material


class Residual(nn.Module):
    """Two convolutions with norms, the second one also read before its norm."""

    def __init__(self, *, read_twice=False, shared=False):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)
        self.read_twice, self.shared = read_twice, shared

    def forward(self, x):
        y = torch.relu(self.first_norm(self.first(x)))
        between = self.second(y)
        z = self.second_norm(between)
        if self.shared:
            z = self.second_norm(z)
        return x + z + (between if self.read_twice else 0)


class Choosing(nn.Module):
    """A forward that cannot be traced, around parts that can."""

    def __init__(self):
        super().__init__()
        self.block, self.other = Residual(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        return self.block(x) if x.sum() > 0 else self.other(x)


def trained(model):
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.uniform_(module.bias, -1, 1)
    return model.eval().requires_grad_(False)


def norms(model):
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (Residual(), 0),
        (Residual(read_twice=True), 1),
        (Residual(shared=True), 1),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), Residual())), 0),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), Residual()), 1),
        (Choosing(), 0),
    ],
    ids=["both", "read twice", "called twice", "nested", "apart", "untraceable"],
)
def test_the_same_outputs_with_fewer_norms(model, left):
    model = trained(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one = folded(model)
    for seed in range(3):
        x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(one(x), model(x), rtol=1e-5, atol=1e-5)
    assert norms(one) == left < norms(model)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_nothing_to_fold_is_a_refusal():
    with pytest.raises(Refused, match="nothing to fold"):
        folded(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(Refused, match="nothing to fold"):
        folded(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)))


@pytest.mark.parametrize(
    ("name", "near"), [("folded_fp32", 1e-5), ("pruned_folded_fp32", 1e-5), ("folded_bf16", 0.05)]
)
def test_the_form_is_the_folded_model_in_its_numbers(name, near):
    model = trained(Residual())
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    material = Material(Flat(model, ((x,), {})).eval(), calls=None, calibration=None)
    (found,) = in_numbers(form_named(name), material)(x)
    assert norms(in_numbers(form_named(name), material)) == 0
    assert found.dtype == torch.float32
    assert float((found - model(x)).abs().max() / model(x).abs().max()) < near
