"""What blocks read beside weights and buffers, when they run again in the backward pass."""

import dataclasses
import gc
import itertools
import random
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import vivace
from vivace.errors import Refused
from vivace.mechanisms import recompute
from vivace.mechanisms.beside import objects
from vivace.tensors.outside import as_it_is, is_persons

CHECKPOINT = {"checkpoint": {}}
BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def trained(make, plan):
    """Losses, weights and the model after three steps."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict(plan)
    with vivace.attach(
        plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).square().mean()
    ) as session:
        losses = [session.step(batch) for batch in BATCHES]
        assert not plan.techniques or sum(session.build.notes["released_bytes"].values()) > 0
    return [*losses, *model.state_dict().values()], model


def same(make, plan=CHECKPOINT):
    (found, mine), (wanted, theirs) = trained(make, plan), trained(make, {})
    assert all(bool(torch.isfinite(one).all()) for one in wanted)
    return all(map(torch.equal, found, wanted)), mine, theirs


def cooling(part, y):
    part.heat *= 0.5
    return y * part.heat


def carrying(part, y):
    y = y + part.state
    part.state = 0.5 * y.mean(0)
    return y


def listing(part, y):
    part.seen.append(1.0)
    return y * len(part.seen)


def drawing(part, y):
    return y * torch.rand(6, generator=part.stream)


def throwing(part, y):
    return y * part.dice.random()


def queueing(part, y):
    part.queue.append(float(len(part.queue)))
    return y * sum(part.queue)


def collecting(part, y):
    part.lengths.add(len(part.lengths))
    return y * len(part.lengths)


def tallying(part, y):
    part.tally["calls"].append(1.0)
    return y * len(part.tally["calls"])


def adding_up(part, y):
    part.counts["calls"] += 1
    return y * part.counts["calls"]


def filling(part, y):
    part.array[0] += 1
    return y * float(part.array[0])


def asking(part, y):
    return y * part.helper()


class Helper:
    """Keeps for a module what the module does not keep itself."""

    def __init__(self):
        self.calls, self.inner = 0, SimpleNamespace(seen=[])

    def __call__(self):
        self.calls += 1
        self.inner.seen.append(1.0)
        return self.calls + sum(self.inner.seen)


KEEPING = [cooling, carrying, listing, drawing, throwing]
KEEPING += [queueing, collecting, tallying, adding_up, filling, asking]


class Part(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.does, self.first, self.second = does, nn.Linear(6, 6), nn.Linear(6, 6)
        self.heat, self.state, self.seen = 1.0, torch.zeros(6), []
        self.stream, self.dice = torch.Generator().manual_seed(3), random.Random(3)
        self.queue, self.lengths, self.tally = deque([1.0], maxlen=3), set(), defaultdict(list)
        self.counts, self.array, self.helper = Counter(), numpy.zeros(1), Helper()

    def forward(self, x):
        return self.second(torch.tanh(self.does(self, torch.tanh(self.first(x)))))


class Twice(nn.Module):
    """Calls each of its blocks twice."""

    def __init__(self, does):
        super().__init__()
        self.parts = nn.ModuleList(Part(does) for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            part.state = part.state.detach()
        for part in (*self.parts, *self.parts):
            x = part(x)
        return x


@pytest.mark.parametrize("does", KEEPING)
@pytest.mark.parametrize("cheap", [[], ["*"]])
def test_attributes_are_as_the_first_time_and_move_once(does, cheap):
    equal, mine, theirs = same(lambda: Twice(does), {"checkpoint": {"cheap": cheap}})
    assert equal
    for part, other in zip(mine.parts, theirs.parts, strict=True):
        assert (part.heat, part.seen) == (other.heat, other.seen)
        assert (part.queue, part.queue.maxlen) == (other.queue, 3)
        assert (part.lengths, part.tally, part.counts) == (other.lengths, other.tally, other.counts)
        assert (part.array, part.helper.calls) == (other.array, other.helper.calls)
        assert part.helper.inner == other.helper.inner
        assert torch.equal(part.state, other.state)
        assert torch.equal(part.stream.get_state(), other.stream.get_state())
        assert part.dice.getstate() == other.dice.getstate()


class Encoder(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(6, 6), kept

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        self.kept["x"].append(x) if isinstance(self.kept, dict) else self.kept.append(x)
        return x


class Decoder(Encoder):
    def forward(self, x):
        kept = self.kept["x"].pop() if isinstance(self.kept, dict) else self.kept.pop()
        return torch.tanh(self.linear(torch.sigmoid(x * kept)))


class UNet(nn.Module):
    """Of parts that share what they keep."""

    def __init__(self, kept):
        super().__init__()
        self.down, self.middle, self.up = Encoder(kept), nn.Linear(6, 6), Decoder(kept)

    def forward(self, x):
        return self.up(torch.tanh(self.middle(self.down(x))))


@pytest.mark.parametrize("make", [deque, list, lambda: defaultdict(list)])
def test_a_container_that_two_modules_share_stays_one(make):
    equal, mine, _ = same(lambda: nn.Sequential(*(UNet(make()) for _ in range(6))))
    assert equal
    assert all(net.down.kept is net.up.kept for net in mine)


def test_a_container_may_hold_itself():
    class Tree(Part):
        def __init__(self, does):
            super().__init__(does)
            self.root = {"scale": torch.full((6,), 0.5), "children": []}
            self.root["children"].append({"parent": self.root, "calls": 0})

    def climbing(part, y):
        child = part.root["children"][0]
        child["calls"] += 1
        return y * child["parent"]["scale"] * child["parent"]["children"][0]["calls"]

    def make():
        model = Twice(climbing)
        model.parts = nn.ModuleList(Tree(climbing) for _ in range(2))
        return model

    equal, mine, _ = same(make)
    assert equal
    assert mine.parts[0].root["children"][0]["calls"] == 6


def test_what_a_helper_counts_between_the_forward_and_the_backward_pass():
    """The block has the object at hand, and does not read its tensor."""
    totals = []
    for plan in ({}, CHECKPOINT):
        torch.manual_seed(0)
        stats, model = SimpleNamespace(total=torch.zeros(())), Twice(cooling)
        for part in model.parts:
            part.stats = stats

        def loss(model, batch, stats=stats):
            value = model(batch).square().mean()
            stats.total += value.detach()
            return value

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with vivace.attach(
            vivace.Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss
        ) as session:
            for batch in BATCHES:
                session.step(batch)
        totals.append(stats.total)
    assert torch.equal(*totals)


@pytest.mark.parametrize("after", ["", "after the block"])
def test_a_helpers_tensor_that_a_block_reads_and_something_changes_in_place_is_refused(after):
    def adding(part, y):
        if not after:
            part.stats.total += 1
        return torch.tanh(y + part.stats.total)

    class Counted(Twice):
        def __init__(self):
            super().__init__(adding)
            self.stats = SimpleNamespace(total=torch.zeros(()))
            for part in self.parts:
                part.stats = self.stats

        def forward(self, x):
            x = super().forward(x)
            if after:
                self.stats.total += 1
            return x

    reason = "does not do the same" if after else "changes a tensor in place that is none of its buffers"
    with pytest.raises(Refused, match=reason):
        trained(Counted, CHECKPOINT)


def test_what_is_looked_at_for_objects_of_a_persons():
    """Neither what a library's objects hold, nor data sets and optimizers, and no number of plain lists."""
    found, library = Helper(), random.Random(3)
    library.inside = Helper()
    data = torch.utils.data.Subset([Helper()], [0])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.helper = Helper()
    things = [found, library, data, optimizer, *([n, (n, n)] for n in range(500))]
    assert {id(one) for one in objects(things, is_persons)} == {id(found), id(found.inner)}


OUTSIDE = torch.Generator()


@pytest.mark.parametrize("cheap", [[], ["*"]])
def test_noise_of_a_generator_that_is_no_blocks_own_is_refused(cheap):
    def drawing_outside(part, y):
        return y * torch.rand(6, generator=OUTSIDE)

    OUTSIDE.manual_seed(5)
    with pytest.raises(Refused, match="does not do the same when it runs again"):
        trained(lambda: Twice(drawing_outside), {"checkpoint": {"cheap": cheap}})


def test_what_a_kernel_leaves_unwritten_is_not_compared():
    """A recurrent layer's workspace, of which some bytes are never written."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 6)

        def forward(self, x):
            return self.out(torch.tanh(self.layer(x[:, None].expand(-1, 5, -1))[0])[:, -1])

    assert same(lambda: nn.Sequential(*(Recurrent() for _ in range(3))))[0]


def test_what_blocks_keep_of_a_step_does_not_keep_the_step_before():
    class Keeping(Part):
        def forward(self, x):
            self.extra = self.second(x).exp()  # which no loss reads, so that its graph stays
            return super().forward(x)

    model, alive = Twice(cooling), []
    model.parts = nn.ModuleList(Keeping(cooling) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"checkpoint": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()) as session:
        for batch in BATCHES * 2:
            session.step(batch)
            gc.collect()
            alive.append(sum(type(one) is recompute._Frame for one in gc.get_objects()))
    assert len(set(alive[1:])) == 1


def test_what_a_model_sets_between_the_calls_of_a_block():
    class Scaled(Twice):
        def forward(self, x):
            for heat in (1.0, 0.5, 2.0):
                for part in self.parts:
                    part.heat = heat
                    x = part(x)
            return x

    assert same(lambda: Scaled(lambda part, y: y * part.heat))[0]


def test_evaluation_mode_before_the_backward_pass():
    gradients = []
    for plan in ({}, {"checkpoint": {}}):
        torch.manual_seed(0)
        model = Twice(lambda part, y: nn.functional.dropout(y, 0.5, part.training))

        def step(batch, model=model):
            loss = model(batch).square().mean()
            model.eval()
            loss.backward()
            model.train()
            return loss.detach()

        with vivace.attach(vivace.Plan.from_dict(plan), step=step, models=[model]) as session:
            session.step(BATCHES[0])
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@dataclasses.dataclass
class Stream:
    x: torch.Tensor


MADE = {
    "a dataclass": Stream,
    "an object": lambda x: SimpleNamespace(x=x),
    "an object in an object": lambda x: SimpleNamespace(inner=[SimpleNamespace(x=x)], x=x),
    "nested dictionaries": lambda x: {"of": {"x": x}},
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_block_is_given_may_be_written_by_it_or_after_it(make, inside):
    def read(given):
        return given["of"]["x"] if isinstance(given, dict) else getattr(given, "inner", [given])[0].x

    def write(given, x):
        if isinstance(given, dict):
            given["of"]["x"] = x
        else:
            getattr(given, "inner", [given])[0].x = x

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, given):
            y = torch.tanh(self.second(torch.tanh(self.first(read(given)))))
            if inside:
                write(given, y)
            return y

    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Reading() for _ in range(3))

        def forward(self, x):
            given = make(x)
            for part in self.parts:
                y = part(given)
                if not inside:
                    write(given, y)
            return read(given)

    assert same(Passing)[0]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.total = nn.Linear(6, 6), torch.zeros(())

    def forward(self, x):
        self.total += 1
        return torch.tanh(self.linear(x)) * self.total


def test_a_tensor_that_is_no_buffer_and_changed_in_place_is_refused():
    with pytest.raises(vivace.Refused) as refused:
        same(lambda: nn.Sequential(*(nn.Sequential(Counting(), nn.Tanh()) for _ in range(2))))
    assert str(refused.value) == "checkpoint: '0' changes a tensor in place that is none of its buffers"


@pytest.mark.parametrize("way", ["in place", "its data in place", "other data"])
def test_weights_that_a_block_writes_itself_are_refused(way):
    def shrunk(part, y):
        weight = part.first.weight
        with torch.no_grad():
            if way == "other data":
                weight.data = weight.data.clone()
            else:
                (weight if way == "in place" else weight.data).mul_(0.9)
        return y

    with pytest.raises(
        vivace.Refused, match=r"^checkpoint: 'parts.0' changes its weights in its forward pass$"
    ):
        trained(lambda: Twice(shrunk), CHECKPOINT)


def test_a_block_may_catch_what_it_calls():
    class Careful(Part):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:
                return x

    def make():
        model = Twice(cooling)
        model.parts = nn.ModuleList(Careful(lambda part, y: torch.tanh(y)) for _ in range(3))
        return model

    assert same(make)[0]


class Again(nn.Module):
    """A block that calls itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, depth=2):
        y = torch.tanh(self.first(x))
        if depth:
            y = self(y, depth - 1)
        return torch.tanh(self.second(torch.tanh(y)))


@pytest.mark.parametrize("cheap", [[], ["*"]])
def test_a_block_that_calls_itself(cheap):
    make = lambda: nn.Sequential(Again(), Again())  # noqa: E731
    assert same(make, {"checkpoint": {"cheap": cheap}})[0]


class Complex(nn.Module):
    """Saves a tensor and its conjugate, which lie in one memory, and returns the first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.complex64)
        self.norm = nn.Identity()

    def forward(self, x):
        y = self.linear(x)
        return y, y.conj() * torch.ones(6, dtype=torch.complex64).requires_grad_() + (y.conj() * y) * 1j


def test_conjugates_are_no_copies_of_what_is_returned():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Complex() for _ in range(2))

        def forward(self, x):
            x = torch.complex(x, x.flip(0))
            for part in self.parts:
                x, other = part(x)
                x = x + 0.1 * other
            return torch.view_as_real(x)

    assert same(Net)[0]


def test_a_kept_product_that_is_changed_in_place_after_the_block():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

        def forward(self, x):
            y = self.first(x)
            return y, self.second(torch.sigmoid(torch.sigmoid(y)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Gated() for _ in range(2))

        def forward(self, x):
            for part in self.parts:
                y, z = part(x)
                y.mul_(3)
                x = y + z
            return x

    assert same(Net, {"checkpoint": {"cheap": ["*"]}})[0]


def test_copies_of_what_cannot_be_seen_are_not_made():
    counter, cell = itertools.count(), SimpleNamespace(x=1)
    found = as_it_is([counter, {"a": (cell, [2])}])
    assert found[0] is counter
    assert found[1]["a"][0] is cell
    assert found == [counter, {"a": (cell, [2])}]
