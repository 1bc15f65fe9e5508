"""fused_batchnorm on networks of torchvision: what is matched, and that they train the same."""

import pytest
import torch
from torch import nn
from torchvision import models

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.technique import Build, registry
from vivace.techniques.fused_batchnorm.matching import install

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "norms", "chains", "added", "products", "with_products"),
    [
        ("resnet50", 53, 49, 16, 32, 49),
        ("resnext101_32x8d", 104, 100, 33, 66, 100),
        ("mobilenet_v3_large", 46, 41, 10, 30, 46),
        ("efficientnet_b0", 49, 33, 0, 32, 49),
        ("vgg16_bn", 13, 13, 0, 0, 13),
        ("densenet121", 121, 121, 0, 58, 121),
        ("inception_v3", 96, 96, 0, 41, 96),
    ],
)
def test_the_chains_of_a_network_are_found(name, norms, chains, added, products, with_products):
    """On meta tensors: all but those without an activation of their own, these too where a 1x1 convolution
    leaves their statistics; a shortcut's is a part of the chain that it is added to.
    """
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
    found = {}
    undo, _ = install(model, found, products=True)
    model(images)
    assert (sum(chain.product for chain in found.values()), len(found)) == (products, with_products)
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
    build = Build(
        models=[model], optimizer=None, machine=inspect(), device=torch.device("cpu"), own_step=False
    )
    with pytest.raises(Refused, match=reason):
        registry.find("fused_batchnorm")().apply(build)


@pytest.mark.parametrize(
    "build",
    [
        lambda: models.resnet18(num_classes=4),
        lambda: models.mobilenet_v3_small(num_classes=4, dropout=0.0),
        lambda: models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4),
        lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=4),
    ],
    ids=["resnet18", "mobilenet_v3_small", "densenet", "bottlenecks"],
)
@pytest.mark.parametrize("products", [False, True])
def test_networks_train_the_same(build, products):
    """In float64, which the reference can and the technique refuses: a difference is a fault, no rounding."""
    numbers = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 3, 32, 32, generator=numbers).double(), torch.randint(4, (4,), generator=numbers))
        for _ in range(3)
    ]

    def trained(fused):
        torch.manual_seed(0)
        model = build().double()
        undo, _ = install(model, {}, products=products) if fused else (lambda: None, False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses = []
        for inputs, labels in batches:
            losses.append(nn.functional.cross_entropy(model(inputs), labels))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        undo()
        return [loss.item() for loss in losses], model.state_dict()

    wanted, state = trained(False)
    seen, moved = trained(True)
    assert seen == pytest.approx(wanted, rel=1e-8)
    for key, value in state.items():
        torch.testing.assert_close(moved[key], value, rtol=1e-7, atol=1e-8, msg=key)
