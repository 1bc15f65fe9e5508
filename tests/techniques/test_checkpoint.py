import copy
import itertools
import random

import pytest
import torch
from torch import nn

import vivace
from vivace.ledger import Observation
from vivace.mechanisms import recompute
from vivace.observing.observe import observe
from vivace.technique import registry
from vivace.testing import TechniqueContract

from . import blocky

Checkpoint = registry.find("checkpoint")


@pytest.mark.usefixtures("one_thread")
class TestCheckpoint(TechniqueContract):
    technique = Checkpoint


@pytest.mark.parametrize(
    "settings",
    [{}, {"blocks": ["blocks.1", "blocks.3"]}, {"cheap": ["*"]}, {"cheap": ["blocks.2"]}],
    ids=["all", "two", "cheap", "mixed"],
)
@pytest.mark.parametrize(
    "beside", [{}, {"bf16_autocast": {}}, {"bf16_weights": {}}, {"micro_batches": {"num": 4}}]
)
def test_no_bit_differs(settings, beside):
    models = [copy.deepcopy(blocky.PLAIN) if "bf16_weights" in beside else None for _ in range(2)]
    seen, notes = blocky.course({**beside, "checkpoint": settings}, models[0])
    wanted, _ = blocky.course(beside, models[1])
    assert blocky.differing(seen, wanted) == []
    assert notes["recomputed_blocks"] == (2 if "blocks" in settings else 4)
    assert all(count > 0 for count in notes["released_bytes"].values())


def test_attention_is_kept_where_only_the_cheap_runs_again():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            kinds = [
                0.0,
                0.0,
                0.2,
                0.2,
            ]  # dropout, in the attention too: on a CPU that makes it plain operators
            layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for dropout in kinds]
            self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 5)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    torch.manual_seed(1)
    model = Net()
    batch = torch.randn(8, 6, 16), torch.randint(5, (8,))
    found, released = [], []
    for plan in ({}, {"checkpoint": {"cheap": ["*"]}}, {"checkpoint": {}}):
        with blocky.opened(plan, copy.deepcopy(model)) as session:
            torch.manual_seed(2)
            losses = [session.step(batch) for _ in range(3)]
            released.append(session.build.notes.get("released_bytes"))
        found.append({**session.model.state_dict(), "losses": torch.stack(losses)})
    assert blocky.differing(found[1], found[0]) == blocky.differing(found[2], found[0]) == []
    assert all(0 < released[1][name] < released[2][name] for name in released[2])
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensor = torch.ones(1)
    assert recompute._drops(attention, (tensor, tensor, tensor, 0.1), {})
    assert not recompute._drops(attention, (tensor, tensor, tensor), {})


def test_a_list_that_grows_after_a_block_has_read_it():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, before):
            return torch.tanh(self.linear(sum(before)))

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 5)

        def forward(self, x):
            seen = [x]
            for layer in self.layers:
                seen.append(layer(seen))
            return self.head(sum(seen))

    torch.manual_seed(1)
    model = Dense()
    batch, found = (torch.randn(8, 8), torch.randint(5, (8,))), []
    for plan in ({}, {"checkpoint": {}}):
        with blocky.opened(plan, copy.deepcopy(model)) as session:
            losses = [session.step(batch) for _ in range(3)]
            assert not plan or session.build.notes["recomputed_blocks"] == 4
        found.append({**session.model.state_dict(), "losses": torch.stack(losses)})
    assert blocky.differing(*found) == []


def test_names_of_cheap_blocks_must_be_recomputed_ones():
    with pytest.raises(vivace.Refused, match=r"^checkpoint: none of its blocks is called 'blocks.2'; they"):
        blocky.opened({"checkpoint": {"blocks": ["blocks.1"], "cheap": ["blocks.2"]}})


def test_the_peak_falls():
    peaks = {}
    for name, plan in (("kept", {}), ("recomputed", {"checkpoint": {}})):
        with blocky.opened(plan, blocky.Net(12)) as session:
            peaks[name] = observe(session, blocky.BATCHES).peak_bytes
    assert peaks["recomputed"] < 0.6 * peaks["kept"]


def test_hooks_of_a_block_and_backwards_of_custom_functions_run_once():
    model, calls = copy.deepcopy(blocky.ORIGINAL), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[0].body[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model.blocks[0].body[0].weight.register_hook(lambda gradient: calls.append("gradient"))
    blocky.Square.passes.update(forward=0, backward=0)
    with blocky.opened({"checkpoint": {}}, model) as session:
        session.step(blocky.BATCHES[0])
    assert sorted(calls) == ["backward", "forward", "gradient"]
    assert blocky.Square.passes == {"forward": 8, "backward": 4}


def test_a_forward_hook_inside_of_a_block_is_refused_and_outside_is_not():
    model = copy.deepcopy(blocky.ORIGINAL)
    model.stem.register_forward_hook(lambda *_: None)
    with blocky.opened({"checkpoint": {}}, model) as session:
        session.step(blocky.BATCHES[0])
    model.blocks[1].body[2].register_forward_hook(lambda *_: None)
    with (
        blocky.opened({"checkpoint": {}}, model) as session,
        pytest.raises(vivace.Refused, match=r"^checkpoint: the ReLU inside of 'blocks.1' has a forward hook"),
    ):
        session.step(blocky.BATCHES[0])


class Changed(blocky.Block):
    """A block whose forward does something that a second pass would not repeat."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, itertools.count(1)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, *, scale=1.0):
        call = next(self.calls)
        if self.kind == "python":
            return super().forward(x) * random.random()
        if self.kind == "in place":
            return super().forward(x.add_(1.0))
        if self.kind == f"writes in call {call}":
            self.total += 1
        if self.kind == "counts" and call % 2:
            return super().forward(torch.tanh(x))
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("python", "'blocks.2' draws random numbers from Python or NumPy itself"),
        ("in place", "'blocks.2' changes its input in place"),
        ("counts", "'blocks.2' does not do the same when it runs again"),
        ("writes in call 2", "'blocks.2' does not do the same when it runs again"),
        ("writes in call 3", "'blocks.2' writes a buffer that it did not write in its first pass"),
    ],
)
def test_what_a_second_pass_would_not_repeat_is_refused_by_name(kind, reason):
    model = copy.deepcopy(blocky.ORIGINAL)
    model.blocks = nn.ModuleList([*model.blocks[:2], Changed(kind), Changed(""), *model.blocks[2:]])
    plan = {"checkpoint": {"blocks": ["blocks.2", "blocks.3"]}}
    with blocky.opened(plan, model) as session, pytest.raises(vivace.Refused) as refused:
        list(map(session.step, blocky.BATCHES))
    assert str(refused.value) == f"checkpoint: {reason}"


def test_gradients_of_gradients_are_refused_by_name():
    with (
        blocky.opened({"checkpoint": {}}, loss=blocky.penalised) as session,
        pytest.raises(vivace.Refused, match="gradients of gradients"),
    ):
        session.step(blocky.BATCHES[0])


def test_plain_gradients_inside_of_the_loss_are_right():
    def attacked(model, batch):
        images = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(blocky.loss(model, (images, batch[1])), images)
        return blocky.loss(model, (batch[0] + 0.1 * slope.sign(), batch[1]))

    seen, _ = blocky.course({"checkpoint": {}}, loss=attacked)
    wanted, _ = blocky.course({}, loss=attacked)
    assert blocky.differing(seen, wanted) == []


class OwnNorm(nn.Module):
    """By a kernel that does not raise the version of the buffers that it writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


def test_a_batch_norm_of_ones_own_whose_first_pass_was_in_evaluation_mode_moves_once():
    def attacked(model, batch):
        images = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(blocky.loss(model.eval(), (images, batch[1])), images)
        return blocky.loss(model.train(), (batch[0] + 0.1 * slope.sign(), batch[1]))

    model = copy.deepcopy(blocky.PLAIN)
    for block in model.blocks:
        block.body[1] = OwnNorm()
    seen, _ = blocky.course({"checkpoint": {}}, copy.deepcopy(model), loss=attacked)
    wanted, _ = blocky.course({}, model, loss=attacked)
    assert blocky.differing(seen, wanted) == []


@pytest.mark.parametrize("early", [False, True])
def test_an_own_step_may_not_update_weights_before_the_backward_pass(early):
    model = copy.deepcopy(blocky.ORIGINAL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = blocky.loss(model, batch)
        if early:
            with torch.no_grad():
                model.blocks[0].body[0].weight.mul_(0.9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    plan = vivace.Plan.from_dict({"checkpoint": {}})
    with vivace.attach(plan, step=step, models=[model]) as session:
        if early:
            with pytest.raises(vivace.Refused, match=r"'blocks.0' is changed in place before its backward"):
                session.step(blocky.BATCHES[0])
        else:
            session.step(blocky.BATCHES[0])


def test_a_graph_that_is_kept_serves_twice():
    model = copy.deepcopy(blocky.ORIGINAL)
    gradients = []
    for plan in ({}, {"checkpoint": {}}):
        twin = copy.deepcopy(model)

        def step(batch, twin=twin):
            torch.manual_seed(3)
            loss = blocky.loss(twin, batch)
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.detach()

        with vivace.attach(vivace.Plan.from_dict(plan), step=step, models=[twin]) as session:
            session.step(blocky.BATCHES[0])
        gradients.append({name: p.grad for name, p in twin.named_parameters()})
    assert blocky.differing(*gradients) == []


class Neighbours(torch.nn.Module):
    """Adds up the features of a graph's neighbours, by a sparse matrix that it holds or is given."""

    def __init__(self, held):
        super().__init__()
        self.layer, self.relu = torch.nn.Linear(8, 8), torch.nn.ReLU()
        self.register_buffer("held", held)

    def forward(self, x, given):
        return self.relu(torch.sparse.mm(given if self.held is None else self.held, self.layer(x)))


class Graph(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Neighbours(held) for _ in range(3))

    def forward(self, x, given):
        for block in self.blocks:
            x = block(x, given)
        return x


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "plan", [{"checkpoint": {}}, {"checkpoint": {"cheap": ["*"]}}, {"compress_activations": {}}]
)
def test_sparse_tensors_are_kept_as_they_are(plan, held):
    """They have no storage of their own."""
    torch.manual_seed(0)
    adjacency, x = torch.eye(6).roll(1, 0).to_sparse(), torch.randn(6, 8)
    original = Graph(adjacency if held else None)
    losses = []
    for each in ({}, plan):
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model, batch):
            return model(batch, adjacency).square().mean()

        plan_of = vivace.Plan.from_dict(each)
        with vivace.attach(plan_of, model=model, optimizer=optimizer, loss=loss) as session:
            losses.append([float(session.step(x)) for _ in range(3)])
    assert losses[1] == (losses[0] if "checkpoint" in plan else pytest.approx(losses[0], rel=0.02))


def test_confirmation_names_blocks_and_bytes():
    seen = Observation(
        {}, {}, 0, 0.0, notes={"recomputed_blocks": 2, "released_bytes": {"a": 2**20, "b": 2**19}}
    )
    assert Checkpoint().confirm(seen, seen) == (
        "2 blocks run again in the backward pass instead of keeping 1.50 MiB"
    )
    with pytest.raises(vivace.Refused, match="changed nothing"):
        Checkpoint().confirm(Observation({}, {}, 0, 0.0, notes={"recomputed_blocks": 2}), seen)


@pytest.mark.parametrize(
    "plan", [{"checkpoint": {}}, {"checkpoint": {"cheap": ("*",)}}], ids=["whole", "cheap"]
)
def test_numbers_lists_and_modes_of_modules_are_those_of_the_first_pass(plan):
    """A temperature that falls with each call, notes, and a mode that is left before the backward pass."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)
            self.temperature, self.calls, self.noted = 1.0, 0, []

        def forward(self, x):
            self.temperature *= 0.5
            self.calls += 1
            self.noted.append(self.calls)
            return x + torch.tanh(self.drop(self.inner(x)) * self.temperature)

    original = torch.nn.Sequential(*(Block() for _ in range(6)))

    def loss(model, batch):
        model.eval()
        found = model(batch)
        model.train()
        return found.square().mean()

    weights = []
    for each in ({}, plan):
        model = copy.deepcopy(original)
        with blocky.opened(each, model, loss=loss) as session:
            for _ in range(2):
                session.step(torch.ones(4, 8))
        assert [(b.temperature, b.calls, b.noted) for b in model] == [(0.25, 2, [1, 2])] * 6
        assert model.training
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))
