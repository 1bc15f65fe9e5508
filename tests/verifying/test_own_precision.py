"""Jobs that compute in 16 bits by themselves: what another order of sums does there is rounding."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Seam, Stage
from vivace.verifying.shadow import Rounding


def _layers():
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)),
    )


def _data():
    numbers = torch.Generator().manual_seed(0)
    images, labels = torch.randn(256, 3, 8, 8, generator=numbers), torch.randint(4, (256,), generator=numbers)
    return DataLoader(TensorDataset(images, labels), batch_size=32)


def _under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return functional.cross_entropy(outputs.float(), batch[1])


def _in_halves(model, batch):
    return functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def job(kind):
    model, loss = {
        "autocast": (_layers, _under_autocast),
        "weights": (lambda: _layers().bfloat16(), _in_halves),
    }[kind]
    return vivace.Job(
        model=model,
        data=_data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_another_memory_order_is_rounding(kind, ruler_of):
    verdict = ruler_of(job, kind).judge({"channels_last": {}})
    assert verdict["kept"], verdict["reason"]
    assert max(check["score"] for check in verdict["checks"]) > 0


@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_a_defect_is_no_rounding(kind, ruler_of, planted):
    def scale(build):
        build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * 1.02)

    assert ruler_of(job, kind).judge(planted(scale, Stage.PRECISION))["kept"] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shadow_rounds_products_of_16_bits_to_16_bits(dtype):
    left, right = (torch.randn(64, 64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    exact = left @ right
    with Rounding(2.0**-16, 0, {}):
        rounded = left @ right
    apart = float((rounded.double() - exact.double()).norm() / exact.double().norm())
    assert rounded.dtype == dtype
    assert 0.1 * torch.finfo(dtype).eps < apart < 2 * torch.finfo(dtype).eps
