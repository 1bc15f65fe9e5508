"""fused_batchnorm on networks of torchvision: what is matched, and that they train the same."""

import pytest
import torch
from torch import nn
from torchvision import models

import vivace
from vivace.errors import Refused
from vivace.matching import install
from vivace.plan import Plan
from vivace.testing.fake_cuda import fake_cuda

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan.from_dict({"fused_batchnorm": {}})


@pytest.mark.parametrize(
    ("name", "norms", "chains", "added"),
    [
        ("resnet50", 53, 49, 16),
        ("resnext101_32x8d", 104, 100, 33),
        ("mobilenet_v3_large", 46, 41, 10),
        ("efficientnet_b0", 49, 33, 0),
        ("vgg16_bn", 13, 13, 0),
        ("densenet121", 121, 121, 0),
        ("inception_v3", 94, 94, 0),
    ],
)
def test_the_chains_of_a_network_are_found(name, norms, chains, added):
    """On meta tensors: all but the BatchNorms of shortcuts, and those without an activation of their own."""
    with torch.device("meta"):
        model = getattr(models, name)(**({"init_weights": False} if name == "inception_v3" else {}))
        images = torch.empty(
            2, 3, 299 if name == "inception_v3" else 64, 299 if name == "inception_v3" else 64
        )
    found = {}
    undo, _ = install(model, found)
    model(images)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == norms
    assert len(found) == chains
    assert sum(chain.adds for chain in found.values()) == added
    undo()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("convnext_tiny", "ConvNeXt has no BatchNorm of images; it has LayerNorm, LayerNorm2d"),
        ("vgg16", "VGG has no BatchNorm of images$"),
    ],
)
def test_networks_without_batchnorm_are_refused_by_name(name, reason):
    with torch.device("meta"):
        model = getattr(models, name)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_cuda(), pytest.raises(Refused, match=reason):
        vivace.attach(PLAN, model=model, optimizer=optimizer, loss=lambda m, b: m(b).sum())


@pytest.mark.parametrize(
    "build",
    [
        lambda: models.resnet18(num_classes=4),
        lambda: models.mobilenet_v3_small(num_classes=4, dropout=0.0),
        lambda: models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4),
    ],
    ids=["resnet18", "mobilenet_v3_small", "densenet"],
)
def test_networks_train_the_same(build):
    numbers = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 3, 32, 32, generator=numbers), torch.randint(4, (8,), generator=numbers))
        for _ in range(3)
    ]

    def trained(plan):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with vivace.attach(plan, model=model, optimizer=optimizer, loss=_loss) as session:
            return [float(session.step(batch)) for batch in batches], model.state_dict()

    wanted, state = trained(Plan())
    with fake_cuda():
        seen, moved = trained(PLAN)
    assert seen == pytest.approx(wanted, rel=1e-3)
    for key, value in state.items():
        torch.testing.assert_close(moved[key], value, rtol=1e-2, atol=1e-3, msg=key)


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
