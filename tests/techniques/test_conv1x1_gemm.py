import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract

Conv1x1Gemm = registry.find("conv1x1_gemm")


def bottleneck():
    """The tiny network with images, squeezed by a 1x1 convolution."""
    job = TINY_JOBS["cnn"]()
    model = job.model

    def build():
        layers = list(model())
        return nn.Sequential(layers[0], nn.Conv2d(8, 8, 1, bias=False), *layers[1:])

    return Job(**{**vars(job), "model": build})


@pytest.mark.usefixtures("one_thread")
class TestConv1x1Gemm(TechniqueContract):
    technique = Conv1x1Gemm
    jobs: ClassVar = {**TINY_JOBS, "bottleneck": bottleneck}


def opened(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(
        Plan([Conv1x1Gemm()]), model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean()
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_values_gradients_and_memory_order_are_the_convolutions(bias, order):
    model = nn.Sequential(nn.Conv2d(6, 5, 1, bias=bias), nn.Conv2d(5, 4, 3)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64).contiguous(memory_format=order)
    with opened(model):
        inner = model[0](x)
        assert inner.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(inner, plain[0](x))
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert not any("forward" in vars(m) for m in model.modules())


def test_other_convolutions_are_left_alone():
    layers = [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 1, groups=2)]
    with pytest.raises(Refused, match="no 2-D convolution has a 1x1 window"):
        opened(nn.Sequential(*layers))
    with opened(nn.Sequential(*layers, nn.Conv2d(4, 4, 1))) as session:
        assert session.build.notes["convolutions_as_products"] == 1


def test_it_confirms_by_the_convolutions_that_are_gone():
    before = Observation({"aten::convolution": 3}, {}, 0, 0.0, notes={"convolutions_as_products": 1})
    with pytest.raises(Refused, match="changed nothing"):
        Conv1x1Gemm().confirm(before, before)
    after = Observation({"aten::convolution": 2}, {}, 0, 0.0, notes={"convolutions_as_products": 1})
    assert "1 1x1 convolutions" in Conv1x1Gemm().confirm(after, before)
