"""fused_batchnorm on a CPU, where its operators run the plain-PyTorch reference; in graphs on a GPU."""

import copy
import dataclasses
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.mechanisms.graphs import AsksForTypes, Untraceable, signature_of, trace
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start, training_device
from vivace.technique import registry
from vivace.techniques.fused_batchnorm.matching import find_chains, install
from vivace.testing import TINY_JOBS, TechniqueContract, check
from vivace.work.count import count_work

FusedBatchnorm = registry.find("fused_batchnorm")
ALL = (-1,)
GRAPH = pytest.param({"fused_optimizer": {}, "cuda_graph_step": {}}, marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def one_thread_each(one_thread):
    """Tiny operators."""


@pytest.fixture
def acted_out(monkeypatch):
    """It is not refused on a CPU."""
    card = dataclasses.replace(FusedBatchnorm.card, devices=("cpu", "cuda"))
    monkeypatch.setattr(FusedBatchnorm, "card", card)


@pytest.mark.usefixtures("acted_out")
class TestFusedBatchnorm(TechniqueContract):
    technique = FusedBatchnorm


class Residual(nn.Module):
    """A ResNet's block, with one ReLU for all and a BatchNorm in the shortcut."""

    def __init__(self, width=6):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=None)
        self.short = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, scale=1.0):
        identity = self.short(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out) * scale


class Dense(nn.Module):
    """A DenseNet's layer: tensors or lists of some."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, features):
        if isinstance(features, torch.Tensor):
            features = [features]
        return self.conv(functional.relu(self.norm(torch.cat(features, 1)), inplace=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU(inplace=True))
        self.blocks = nn.Sequential(Residual(), Residual())
        self.squeeze, self.dense, self.head = nn.Conv2d(6, 3, 1), Dense(), nn.Linear(3, 4)

    def forward(self, x):
        x = self.squeeze(self.blocks(self.stem(x)))
        return self.head(self.dense([x, x]).mean((2, 3)))


def batches(count=4):
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 7, 7, generator=numbers), torch.randint(4, (4,), generator=numbers))
        for _ in range(count)
    ]


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def chains_of(owner, signature=ALL):
    graph, passed_over = trace(owner, signature)
    return find_chains(graph, owner, passed_over)


def opened(model, plan=None, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = Plan.from_dict({"fused_batchnorm": {}} if plan is None else plan)
    return vivace.attach(plan, model=model, optimizer=optimizer, loss=more.pop("loss", loss), **more)


def trained(plan, model=None, between=lambda session: None):
    torch.manual_seed(0)
    model = (model or Net()).to(training_device(inspect()))
    with opened(model, plan) as session:
        losses = []
        for batch in batches():
            losses.append(float(session.step(batch)))
            between(session)
    return losses, model


def assert_alike(mine, theirs, rough=1e-4):
    assert mine[0] == pytest.approx(theirs[0], rel=rough)
    ours, wanted = mine[1].state_dict(), theirs[1].state_dict()
    assert list(ours) == list(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(ours[key], value, rtol=rough, atol=10 * rough, msg=key)


def test_on_a_cpu_it_is_refused():
    with pytest.raises(Refused, match="it acts on cuda, and this job runs on cpu"):
        opened(Net())


@pytest.mark.usefixtures("acted_out")
def test_every_chain_is_found_and_the_model_trains_the_same():
    session = opened(Net())
    for batch in batches(1):
        session.step(batch)
    chains = list(session.build.notes["fused_chains"].values())
    assert len(chains) == 6
    assert sum(chain.adds for chain in chains) == 2
    assert sum(chain.activation == "silu" for chain in chains) == 1
    session.close()
    assert_alike(trained({"fused_batchnorm": {}}), trained({}))


@pytest.mark.usefixtures("acted_out")
@pytest.mark.parametrize(
    "others",
    [
        {"channels_last": {}, "bf16_autocast": {}},
        {"bf16_weights": {}},
        {"fp16_autocast": {}},
        {"checkpoint": {}},
        GRAPH,
    ],
)
def test_it_goes_with_others(others):
    model = Net()
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.momentum = 0.1  # an average over all batches reads their number, which a graph cannot
    mine = trained({"fused_batchnorm": {}, **others}, copy.deepcopy(model))
    rough = 0.05 if "16" in str(others) else 1e-3
    assert_alike(mine, trained(others, copy.deepcopy(model)), rough)


@pytest.mark.usefixtures("acted_out")
def test_eval_mode_and_calls_without_gradients_are_the_persons_own():
    torch.manual_seed(0)
    model = Net()
    pixels = batches(1)[0][0]
    with opened(model) as session:
        session.step(batches(1)[0])
        model.eval()
        seen = model(pixels)
        reference = copy.deepcopy(model)
        model.train()
    model.eval()
    assert torch.equal(seen, model(pixels))
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(reference(pixels), seen), "a copy must run on its own weights"
    assert {id(m) for m in reference.modules()}.isdisjoint({id(m) for m in model.modules()})


@pytest.mark.usefixtures("acted_out")
def test_a_copy_trains_on_its_own_weights():
    torch.manual_seed(0)
    model = Net()
    with opened(model):
        other = copy.deepcopy(model)
        nn.init.zeros_(other.head.weight)
        nn.init.ones_(other.head.bias)
        other.blocks[0].bn2.weight.data.zero_()
        assert (other(batches(1)[0][0]) == 1).all()
        assert not (model(batches(1)[0][0]) == 1).any()


@pytest.mark.usefixtures("acted_out")
def test_a_frozen_norm_and_hooks_that_come_later_are_respected():
    seen = []

    def freeze(session):
        session.build.model.blocks[0].bn1.eval()
        if not seen:
            session.build.model.blocks[1].relu.register_forward_hook(lambda *_: seen.append(1))

    torch.manual_seed(0)
    mine = trained({"fused_batchnorm": {}}, Net(), freeze)
    assert len(seen) == 6, "a hook on the ReLU of a chain fires whenever the ReLU would have run"
    seen.clear()
    torch.manual_seed(0)
    assert_alike(mine, trained({}, Net(), freeze))


@pytest.mark.usefixtures("acted_out")
def test_a_switch_of_the_module_is_followed():
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.double = nn.BatchNorm2d(3), False

        def forward(self, x):
            out = functional.relu(self.norm(x))
            return out * 2 if self.double else out

    model = nn.Sequential(Switched(), nn.Flatten(), nn.Linear(3 * 49, 4))
    with opened(model):
        pixels = batches(1)[0][0]
        once = model[0](pixels)
        model[0].double = True
        assert torch.equal(model[0](pixels), 2 * once)


@pytest.mark.usefixtures("acted_out")
def test_models_that_cannot_be_matched_are_refused_by_name():
    with pytest.raises(Refused, match="'1' is a SyncBatchNorm"):
        opened(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)))
    with pytest.raises(Refused, match="Sequential has no BatchNorm of images; it has LayerNorm"):
        opened(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(Refused, match="no BatchNorm of Sequential is followed by"):
        opened(nn.Sequential(nn.BatchNorm2d(3), nn.Tanh()))
    with pytest.raises(Refused, match="float64"):
        opened(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).double())


class Asks(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.norm, self.relu, self.seen, self.body = nn.BatchNorm2d(3), nn.ReLU(), [], body

    def forward(self, x):
        return self.body(self, x)


def read(self, x):
    return self.relu(self.norm(x)) if x.sum() > 0 else x


def keep(self, x):
    self.last = self.norm(x)
    return self.relu(self.last)


def collect(self, x):
    self.seen.append(self.norm(x))
    return self.relu(self.seen[-1])


def draw(self, x):
    return self.relu(self.norm(x)) if random.random() < 2 else x


def noise(self, x):
    return self.relu(self.norm(x)) + torch.randn(1)


def constant(self, x):
    return self.relu(self.norm(x)) * torch.tensor([2.0])


def without_gradients(self, x):
    found = self.relu(self.norm(x))
    with torch.no_grad():
        scale = found.abs().amax()
    return found / scale


def in_other_precision(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.relu(self.norm(x)) @ x


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers):
        return torch.round(numbers)

    @staticmethod
    def backward(ctx, slope):
        return slope


def with_an_own_backward(self, x):
    return StraightThrough.apply(self.relu(self.norm(x)))


def count(self, x):
    self.steps += 1
    return self.relu(self.norm(x))


def ask_a_buffer(self, x):
    return self.relu(self.norm(x)) if self.steps < 100 else x


def write_a_tensor(self, x):
    self.tensor.add_(1)
    return self.relu(self.norm(x))


CALLS, GENERATOR = {"of a forward": 0}, torch.Generator()


def draw_from_an_own_generator(self, x):
    return self.relu(self.norm(x)) * float(torch.rand(1, generator=GENERATOR) < 2)


def count_outside(self, x):
    CALLS["of a forward"] += 1
    return self.relu(self.norm(x))


def count_in_a_part(self, x):
    self.norm.calls = getattr(self.norm, "calls", 0) + 1
    return self.relu(self.norm(x))


def replace_weights_of_a_part(self, x):
    for weight in self.norm.parameters():
        weight.data = weight.data + 1
    return self.relu(self.norm(x))


def replace_a_weight_of_a_part(self, x):
    self.norm.weight.data = self.norm.weight.data + 1
    return self.relu(self.norm(x))


def write_weights_of_a_part(self, x):
    with torch.no_grad():
        for weight in self.norm.parameters():
            weight.add_(1)
    return self.relu(self.norm(x))


BODIES = [
    *(read, keep, collect, draw, noise, constant),
    *(without_gradients, in_other_precision, with_an_own_backward, count, ask_a_buffer, write_a_tensor),
    *(draw_from_an_own_generator, count_outside, count_in_a_part),
    *(replace_weights_of_a_part, replace_a_weight_of_a_part, write_weights_of_a_part),
]


@pytest.mark.parametrize("body", BODIES)
def test_forwards_that_a_trace_would_change_are_left_alone(body):
    owner = Asks(body)
    owner.register_buffer("steps", torch.zeros(()))
    owner.tensor = torch.zeros(3)
    before = dict(vars(owner))
    streams = torch.get_rng_state(), random.getstate()
    own = GENERATOR.get_state()
    with pytest.raises(Untraceable):
        chains_of(owner)
    assert vars(owner) == before
    assert owner.seen == []
    assert (float(owner.steps), owner.tensor.tolist()) == (0.0, [0.0] * 3)
    assert (owner.norm.weight.tolist(), owner.norm.bias.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert not hasattr(owner.norm, "calls")
    assert CALLS == {"of a forward": 0}
    assert torch.equal(GENERATOR.get_state(), own)
    assert StraightThrough.apply(torch.tensor(0.7)) == 1.0
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]


class Frozen(dict):
    """As some libraries keep a model's settings."""

    def clear(self):
        raise AssertionError("nobody changes it")

    update = clear


def test_what_a_module_keeps_in_a_mapping_of_its_own_kind_stays():
    owner = Asks(lambda self, x: self.relu(self.norm(x)))
    owner.settings, owner.plain = Frozen(width=3), {"width": 3}
    assert len(chains_of(owner)) == 1
    assert (owner.settings, owner.plain) == ({"width": 3}, {"width": 3})


def test_results_that_others_need_are_not_fused():
    def both(self, x):
        out = self.norm(x)
        return self.relu(out) + out

    def mutated(self, x):
        x += self.norm(x)
        return self.relu(x)

    def constant_added(self, x):
        return self.norm(x) + 1

    for body in (both, mutated, constant_added):
        assert chains_of(Asks(body)) == []


def test_changes_in_place_stay_in_place():
    def changes(self, x):
        x *= 2
        return self.relu(self.norm(x))

    owner, found = Asks(changes), {}
    install(owner, found)
    assert len(found) == 1
    x = torch.ones(2, 3, 2, 2)
    owner(x)
    assert (x == 2).all()


def test_questions_about_types_are_answered_by_the_real_arguments():
    layer = Dense()
    with pytest.raises(AsksForTypes):
        chains_of(layer)
    parts = [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)]
    assert signature_of((parts,)) == (2,)
    assert len(chains_of(layer, (2,))) == 1
    assert signature_of((torch.ones(1), None)) is None


@pytest.mark.usefixtures("acted_out")
def test_it_confirms_by_the_operators_that_ran():
    job = TINY_JOBS["cnn"]()
    plan = Plan([FusedBatchnorm()])
    with start(job, plan, inspect()) as session:
        seen = observe(session, list(job.data()))
    assert FusedBatchnorm().confirm(seen, seen) == "1 fused calls a step, of 1 BatchNorms: 1 BatchNorm + relu"
    with pytest.raises(Refused, match="changed nothing"):
        FusedBatchnorm().confirm(Observation({}, {}, 0, 0.0), seen)


@pytest.mark.slow
@pytest.mark.usefixtures("acted_out")
def test_it_is_compiled_with_the_model():
    assert check(Plan.from_dict({"fused_batchnorm": {}, "compile": {}}), "cnn") == ""


class Bottleneck(nn.Module):
    """A ResNet's, with a shortcut whose BatchNorm nothing follows but the addition."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.short = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.short(x))


def bottlenecks():
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    return nn.Sequential(nn.Conv2d(3, 16, 3), Bottleneck(), Bottleneck(), *head)


PRODUCTS = {"fused_batchnorm": {"products": True}}


@pytest.mark.usefixtures("acted_out")
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"conv_gemm": {}, "padded_stem": {}},
        {"channels_last": {}, "bf16_autocast": {}},
        {"bf16_weights": {}},
        {"checkpoint": {}},
        GRAPH,
    ],
)
def test_products_leave_statistics_beside_others(others):
    mine = trained({**PRODUCTS, **others}, bottlenecks())
    rough = 0.05 if "16" in str(others) else 1e-3
    assert_alike(mine, trained(others, bottlenecks()), rough)
    assert not any("forward" in vars(m) for m in mine[1].modules())


@pytest.mark.slow
@pytest.mark.usefixtures("acted_out")
def test_products_are_compiled_with_the_model():
    plan = {**PRODUCTS, "compile": {}}
    assert_alike(trained(plan, bottlenecks()), trained({}, bottlenecks()), 1e-3)


@pytest.mark.usefixtures("acted_out")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch 2.11's own
@pytest.mark.parametrize("plan", [{"fused_batchnorm": {}}, PRODUCTS])
def test_blocks_that_act_alone_stay_one_graph_to_the_compiler(plan):
    """Each break in a block is compiled anew for the next one: of ResNet-50's 16 more than torch allows."""
    with opened(bottlenecks(), plan) as session:
        told = torch._dynamo.explain(session.build.model)(batches(1)[0][0])
    assert (told.graph_count, told.graph_break_count) == (1, 0), told.break_reasons


@pytest.mark.usefixtures("acted_out")
def test_six_of_eight_statistics_come_from_products():
    data, model = batches(), bottlenecks()
    job = vivace.Job(lambda: model, lambda: data, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    with start(job, Plan.from_dict(PRODUCTS), inspect()) as session:
        seen = observe(session, data)
    assert seen.operators["vivace::statistics_mm"] == 6
    assert seen.operators["vivace::batch_norm_moments"] == 8
    sentence = FusedBatchnorm(products=True).confirm(seen, seen)
    assert sentence.startswith("6 fused calls a step, of 8 BatchNorms: ")
    assert "2 product + BatchNorm + addition of BatchNorm + relu" in sentence


def additions(model, plan, wrap=lambda session: None):
    """How many tensors of more than one place were added by autograd in a step."""
    with opened(model, plan) as session:
        wrap(session)
        seen = count_work(lambda: session.step(batches(1)[0]))
    return sum(k.name == "add" and k.phase == "backward" for k in seen.kernels)


@pytest.mark.usefixtures("acted_out")
@pytest.mark.parametrize("plan", [{"fused_batchnorm": {}}, PRODUCTS])
def test_kernels_add_the_gradients_of_what_two_read(plan):
    """But for the first block's input, which no BatchNorm gives; and where blocks are seen from outside."""
    assert additions(bottlenecks(), {}) == 2
    assert additions(bottlenecks(), plan) == 1

    def hook(session):
        session.build.model[2].register_forward_hook(lambda *_: None)

    assert additions(bottlenecks(), plan, hook) == 2
    assert additions(bottlenecks(), {**plan, "checkpoint": {}}) == 2


@pytest.mark.usefixtures("acted_out")
def test_forks_within_a_forward_and_what_changes_its_input():
    class Fork(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.second, self.head = second, nn.Linear(3, 4)

        def forward(self, x):
            x = functional.relu(self.norm(x))
            x = functional.relu(self.last(self.conv(x)) + x) + self.second(x).mean() * 0
            return self.head(x.mean((2, 3)))

    class Two(Fork):
        def forward(self, x):
            x = functional.relu(self.norm(x))
            x = functional.relu(self.last(self.second(x)) + x)
            return self.head(x.mean((2, 3)))

    plan = {"fused_batchnorm": {}}
    for build in (lambda: Two(nn.Conv2d(3, 3, 1)), lambda: Two(nn.ReLU6()), lambda: Fork(nn.Conv2d(3, 3, 1))):
        torch.manual_seed(0)
        model = build()
        assert_alike(trained(plan, copy.deepcopy(model)), trained({}, copy.deepcopy(model)))
    assert additions(Two(nn.Conv2d(3, 3, 1)), {}) == 1
    assert additions(Two(nn.Conv2d(3, 3, 1)), plan) == 0
    assert additions(Two(nn.ReLU6()), plan) == 1, "an activation may change what it reads"


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("center", torch.zeros(()))

    def forward(self, x):
        found = functional.relu(self.norm(x))
        self.center.mul_(0.9).add_(0.1 * found.detach().mean())
        return found - self.center


@pytest.mark.usefixtures("acted_out")
def test_what_a_forward_does_to_its_buffers_it_does_in_each_step_and_not_when_it_is_traced():
    model = nn.Sequential(Centred(), nn.Flatten(), nn.Linear(147, 4))
    with opened(copy.deepcopy(model)) as session:
        assert float(session.build.model[0].center) == 0.0
    mine = trained({"fused_batchnorm": {}}, copy.deepcopy(model))
    assert_alike(mine, trained({}, copy.deepcopy(model)))


@pytest.mark.usefixtures("acted_out")
def test_a_norm_with_a_weight_and_no_bias_is_left_alone():
    def model():
        torch.manual_seed(0)
        norms = [nn.BatchNorm2d(6), nn.BatchNorm2d(6)]
        norms[0].bias = None
        layers = [nn.Conv2d(3, 6, 3), norms[0], nn.ReLU(), nn.Conv2d(6, 6, 3), norms[1], nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(54, 4))

    assert_alike(trained({"fused_batchnorm": {}}, model()), trained({}, model()))
    with opened(model()) as session:
        session.step(batches(1)[0])
        assert len(session.build.notes["fused_chains"]) == 1


@pytest.mark.usefixtures("acted_out")
def test_a_shortcuts_norm_is_part_of_the_sum_until_somebody_looks():
    def freeze(session):
        session.build.model[1].short[1].eval()

    def hook(session):
        session.build.model[1].short[1].register_forward_hook(lambda *_: None)

    for between in (lambda session: None, freeze, hook):
        for plan in ({"fused_batchnorm": {}}, PRODUCTS):
            mine = trained(plan, bottlenecks(), between)
            assert_alike(mine, trained({}, bottlenecks(), between))


@pytest.mark.usefixtures("acted_out")
def test_products_that_others_see_stay_convolutions():
    seen = []

    def hook(session):
        if not seen:
            session.build.model[1].conv1.register_forward_hook(lambda *_: seen.append(1))

    assert_alike(trained(PRODUCTS, bottlenecks(), hook), trained({}, bottlenecks()))
    assert len(seen) == 3
    both = bottlenecks()
    both[1].bn1.forward = both[1].bn1.forward  # replaced by the person
    with opened(both, PRODUCTS) as session:
        session.step(batches(1)[0])
        assert len(session.build.notes["fused_chains"]) == 5
    with pytest.raises(Refused, match="no 1x1 convolution of Sequential has channels in eights"):
        opened(nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()), PRODUCTS)
