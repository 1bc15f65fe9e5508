"""branch_streams: what runs where and in which order, and that nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torchvision import models

import vivace
from vivace.errors import Refused
from vivace.job import Job
from vivace.mechanisms.graphs import trace
from vivace.plan import Plan
from vivace.technique import registry
from vivace.techniques.branch_streams import branches
from vivace.testing import TINY_JOBS, TechniqueContract

BranchStreams = registry.find("branch_streams")
pytestmark = pytest.mark.usefixtures("one_thread")


class Inception(nn.Module):
    """Four branches, one of which joins two of its own; one has no weights."""

    def __init__(self, shared=False, inplace=False):
        super().__init__()
        self.one, self.three = (
            nn.Conv2d(4, 2, 1),
            nn.Sequential(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 2, 3, padding=1)),
        )
        self.left, self.right = (nn.Conv2d(4, 2, k, padding=k // 2) for k in (1, 3))
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.shared = self.one if shared else nn.Conv2d(4, 2, 1)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x):
        inner = torch.cat([self.left(x), self.right(x)], 1)
        return torch.cat([self.one(x), self.three(self.relu(x)), inner, self.pool(x), self.shared(x)], 1)


def job():
    """The tiny network of images with such a module."""
    tiny = TINY_JOBS["cnn"]()

    def model():
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(14, 4))
        return nn.Sequential(nn.Conv2d(3, 4, 3), Inception(), *head)

    return Job(**{**vars(tiny), "model": model})


class Unsure(nn.Module):
    """A branch with a function of its own, in place or not."""

    def __init__(self, writes):
        super().__init__()
        self.conv, self.norm, self.writes = nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), writes

    def forward(self, x):
        if self.writes:
            x = torch.nn.functional.relu(x, inplace=True)
        return torch.nn.functional.relu(self.norm(self.conv(x)), inplace=True)


class Beside(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.one, self.other = Unsure(writes), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return torch.cat([self.one(x), self.other(x)], 1)


@pytest.mark.parametrize("writes", [True, False])
def test_a_called_module_that_writes_what_others_read_is_no_branch_of_its_own(writes):
    found, order = order_of(Beside(writes))
    assert found == ([] if writes else [2])
    assert ("fork" in order) is not writes


@pytest.mark.gpu
class TestBranchStreams(TechniqueContract):
    technique = BranchStreams
    jobs = {"inception": job, "cnn": TINY_JOBS["cnn"], "mlp": TINY_JOBS["mlp"]}  # noqa: RUF012


def opened(model, plan=("branch_streams",)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.from_dict({name: {} for name in plan})
    return vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean())


def order_of(owner):
    graph, inlined = trace(owner, (-1,))
    found = branches.find_branches(graph, owner, inlined)
    names = {branches.fork: "fork", branches.enter: "enter", branches.leave: "leave", branches.join: "join"}
    return found, [names.get(node.target, str(node.target)) for node in graph.nodes]


def test_side_branches_run_between_fork_and_join_and_the_largest_on_the_main_stream():
    found, order = order_of(Inception())
    assert found == [4]
    inside = order[order.index("fork") : order.index("join")]
    assert inside.count("enter") == inside.count("leave") == 3
    last = len(inside) - 1 - inside[::-1].index("leave")
    assert "three.0" not in inside[last:]
    assert {"left", "right"} <= set(inside[last:]), "the two together have the most weights"
    assert order.index("pool") < order.index("fork"), "what has no weights stays where it is"


@pytest.mark.parametrize("settings", [{"shared": True}, {"inplace": True}])
def test_branches_that_share_a_module_or_write_their_input_are_left_alone(settings):
    found, order = order_of(Inception(**settings))
    assert found == [2]
    assert order.count("fork") == 1
    assert {"left", "right"} <= set(order[order.index("fork") : order.index("join")])


@pytest.mark.gpu
def test_an_error_inside_of_a_branch_returns_to_the_main_stream(monkeypatch):
    main = torch.cuda.current_stream()
    model = Inception().cuda()
    with opened(model) as session:
        monkeypatch.setattr(model.one, "forward", lambda x: 1 / 0)
        branches.enter(0)
        assert torch.cuda.current_stream() != main
        with pytest.raises(ZeroDivisionError):
            session.step(torch.randn(2, 4, 5, 5))
    assert torch.cuda.current_stream() == main
    assert not branches._mains


@pytest.mark.gpu
def test_it_goes_with_fused_batchnorm_in_one_forward():
    """A ResNet's shortcut with a convolution is a branch beside the three of the block."""
    torch.manual_seed(0)
    shortcut = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16))
    model = models.resnet.Bottleneck(8, 4, downsample=shortcut).cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 8, 4, 4).cuda()
    with opened(model, ("branch_streams", "fused_batchnorm")) as session:
        assert list(session.build.notes["parallel_joins"].values()) == [[2]]
        assert len(session.build.notes["fused_chains"]) == 3
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(m) for m in model.modules())


def test_inception_has_branches():
    with torch.device("meta"):
        model = models.inception_v3(init_weights=False)
    found = {}
    branches.install(model, found)
    assert sum(len(counts) for counts in found.values()) >= 11


@pytest.mark.gpu
def test_a_plain_network_is_refused():
    with pytest.raises(Refused, match="Sequential has no branches with weights"):
        opened(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).cuda())
