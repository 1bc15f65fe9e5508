from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import AnswerIsNo
from vivace.memory import costs
from vivace.memory.choosing import TooLittle, cheapest, choose, choosers
from vivace.memory.costs import measure
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics

pytestmark = pytest.mark.usefixtures("one_thread")


class Part(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, width)
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.body(x))


def job():
    widths = [32, 32, 128, 128, 32, 64]
    return vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), *(Part(16, w) for w in widths), nn.Linear(16, 3)),
        data=lambda: [(torch.ones(512, 8), torch.zeros(512, dtype=torch.long))] * 3,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(costs, "MOST", costs.FEWEST)


def test_blocks_are_measured_without_a_trace():
    batch = job().data()[0]
    with start(job(), Plan(), vivace.inspect()) as plain:
        plain.step(batch)
        stream = torch.get_rng_state()
    with start(job(), Plan(), vivace.inspect()) as session:
        parts = measure(session, batch, Numerics.ROUNDING)
    assert torch.equal(torch.get_rng_state(), stream)
    assert not any(p.grad is not None for p in session.build.model.parameters())
    for one, two in zip(session.build.model.parameters(), plain.build.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert [part.name for part in parts] == ["", "1", "", "2", "", "3", "", "4", "", "5", "", "6", ""]
    options = {part.name: part.options for part in parts}
    assert [o.name.word for o in options["1"]] == ["keep", "recompute", "cheap", "compress"]
    keep, recompute, cheap, compress = options["3"]
    assert recompute.held_bytes == 0 < cheap.held_bytes < keep.held_bytes
    assert 0 < compress.held_bytes < keep.held_bytes
    assert [(o.held_bytes, o.seconds) for o in options["1"]] == [
        (o.held_bytes, o.seconds) for o in options["2"]
    ]
    assert keep.held_bytes > 3 * options["1"][0].held_bytes
    # Gradients of the blocks that come later are there when a block's backward pass runs.
    weights = sum(p.numel() * 4 for p in job().model()[2].parameters())
    assert options["1"][0].working_bytes == options["2"][0].working_bytes + weights
    # What a block hands on is held whatever is decided.
    assert all(part.options[0].held_bytes == 512 * 16 * 4 for part in parts[2:-1:2])


class Neighbours(nn.Module):
    """Adds up the features of a graph's neighbours, by a sparse matrix that it holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.relu = nn.Linear(16, 16), nn.ReLU()
        self.register_buffer("adjacency", torch.eye(512).roll(1, 0).to_sparse())

    def forward(self, x):
        return self.relu(torch.sparse.mm(self.adjacency, self.layer(x)))


def test_blocks_that_hold_sparse_tensors_are_measured():
    blocks = job()
    graph = vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), *(Neighbours() for _ in range(3)), nn.Linear(16, 3)),
        data=blocks.data,
        loss=blocks.loss,
        optimizer=blocks.optimizer,
    )
    with start(graph, Plan(), vivace.inspect()) as session:
        parts = measure(session, graph.data()[0], Numerics.EXACT)
    assert [part.name for part in parts] == ["", "1", "", "2", "", "3", ""]
    assert all(part.options[0].held_bytes < 512 * 512 for part in parts)  # the matrix is held anyway


def test_blocks_that_call_themselves_are_measured():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu = nn.Linear(16, 16), nn.ReLU()

        def forward(self, x, depth=2):
            x = self.relu(self.layer(x))
            return self(x, depth - 1) if depth else x

    changed = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), *(Again() for _ in range(3)), nn.Linear(16, 3))
    }
    own = vivace.Job(**{**vars(job()), **changed})
    with start(own, Plan(), vivace.inspect()) as session:
        parts = measure(session, own.data()[0], Numerics.EXACT)
    assert [part.name for part in parts] == ["", "1", "", "2", "", "3", ""]
    assert len({part.options[0].held_bytes for part in parts[1::2]}) == 1


@pytest.mark.parametrize("plan", [{}, {"optimizer_in_backward": {}}, {"micro_batches": {"num": 2}}])
def test_the_blocks_own_runs_change_nothing(plan):
    """Beside the one step that is followed: weights, the optimizer's state, buffers, random streams."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16))

        def forward(self, x):
            return x + self.body(x)

    def state(measured):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), *(Normed() for _ in range(3)), nn.Linear(16, 3))
        changed = {"model": lambda: model}
        changed["optimizer"] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        own = vivace.Job(**{**vars(job()), **changed})
        with start(own, Plan.from_dict(plan), vivace.inspect()) as session:
            batch = own.data()[0]
            if measured:
                assert measure(session, batch, Numerics.ROUNDING)
            else:
                session.step(batch)
            moments = [state["momentum_buffer"] for state in session.optimizer.state.values()]
            facts = session.build.facts.to_dict()
            assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters()) or plan
        return [*model.state_dict().values(), *moments, torch.get_rng_state()], facts

    (found, facts), (wanted, wanted_facts) = state(True), state(False)
    assert all(map(torch.equal, found, wanted))
    assert facts == wanted_facts


class Rectified(nn.Module):
    """Begins in place, and notes whether what it is given was rectified before."""

    seen: ClassVar[list[bool]] = []

    def __init__(self):
        super().__init__()
        self.first, self.then = nn.ReLU(inplace=True), nn.Linear(16, 16)

    def forward(self, x):
        self.seen.append(bool((x < 0).any()))
        return self.then(self.first(x))


def test_a_block_that_begins_in_place_is_measured_on_what_it_was_given():
    Rectified.seen = []
    own = vivace.Job(
        **{
            **vars(job()),
            "model": lambda: nn.Sequential(
                nn.Linear(8, 16), *(Rectified() for _ in range(3)), nn.Linear(16, 3)
            ),
            "data": lambda: [(torch.randn(512, 8), torch.zeros(512, dtype=torch.long))],
        }
    )
    with start(own, Plan(), vivace.inspect()) as session:
        parts = measure(session, own.data()[0], Numerics.ROUNDING)
    assert [part.options[0].name.word for part in parts if part.name] == ["keep"] * 3
    assert len(Rectified.seen) > 3 + costs.FEWEST
    assert all(Rectified.seen)


def test_the_plan_fits_and_the_smallest_is_named():
    loose = choose(job(), vivace.inspect(), 10**9)
    assert loose.plan == Plan()
    assert loose.peak_bytes == loose.kept_bytes
    budget = int(0.7 * loose.kept_bytes)
    tight = choose(job(), vivace.inspect(), budget)
    assert tight.peak_bytes <= budget
    assert "checkpoint" in tight.plan.names  # beside what else was measured to cost no time
    assert tight.plan.promise is Numerics.EXACT
    peaks = [peak for peak, _ in tight.curve]
    assert peaks == sorted(peaks)
    assert tight.curve[-1][1] == 0.0
    with pytest.raises(AnswerIsNo, match="the smallest measured is"):
        choose(job(), vivace.inspect(), 10_000)


def test_what_helps_beside_the_blocks_is_measured_in_its_own_terms():
    batches = job().data()
    found = list(choosers(job(), vivace.inspect(), batches, Numerics.ROUNDING, Plan()))
    names = [" ".join(chooser.base.names) for chooser in found]
    wanted = ["", "optimizer_in_backward", "bf16_autocast", "micro_batches", "micro_batches"]
    assert names == wanted  # and no channels_last, since there is no convolution
    whole, _, half, pieces, _ = ([o[0].held_bytes for o in c.options] for c in found)
    assert sum(half) < 0.8 * sum(whole)
    assert sum(pieces) == pytest.approx(sum(whole) / 2, rel=0.05)
    exact = choosers(job(), vivace.inspect(), batches, Numerics.EXACT, Plan())
    assert [chooser.base.names for chooser in exact] == [(), ("optimizer_in_backward",)]


def test_a_block_that_cannot_run_twice_is_kept():
    def model():
        built = job().model()
        built[3].body[1].register_forward_hook(lambda *_: None)
        return built

    hooked = vivace.Job(**{**vars(job()), "model": model})
    with start(hooked, Plan(), vivace.inspect()) as session:
        parts = measure(session, job().data()[0], Numerics.EXACT)
    names = {part.name: [option.name.word for option in part.options] for part in parts}
    assert names["3"] == ["keep"]
    assert names["4"] == ["keep", "recompute", "cheap"]
    kept = choose(hooked, vivace.inspect(), 10**9).kept_bytes
    assert (
        "3" not in choose(hooked, vivace.inspect(), int(0.85 * kept)).plan.to_dict()["checkpoint"]["blocks"]
    )


class Given:
    """A chooser of which it is known what it finds."""

    def __init__(self, found, step_seconds=0.1):
        self.found, self.step_seconds = found, step_seconds

    def choose(self, budget_bytes):
        if isinstance(self.found, Exception):
            raise self.found
        return SimpleNamespace(expected_seconds=self.found)


def test_what_is_found_stays_where_a_relief_fails_later():
    broken = Given(RuntimeError("a leaf that is changed in place"))
    assert cheapest([Given(0.3), broken, Given(0.2)], 10).expected_seconds == 0.2
    with pytest.raises(TooLittle):
        cheapest([Given(TooLittle("no", smallest_bytes=3)), broken], 10)
    with pytest.raises(RuntimeError):
        cheapest([broken, Given(0.2)], 10)
