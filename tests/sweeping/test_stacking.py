"""Runs that are trained as one: each is the run that it would be alone, or it is refused with a reason."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from vivace.errors import JobError, Refused
from vivace.inspection import inspect
from vivace.job import JobFunction
from vivace.sweeping.stacking import child, choice, updates
from vivace.sweeping.stacking.child import StackedTrials
from vivace.sweeping.stacking.feeding import Feed
from vivace.sweeping.stacking.keeping import Keeper
from vivace.sweeping.stacking.proof import Proof, Tightest, prove
from vivace.sweeping.stacking.rows import Row, structure_of
from vivace.sweeping.stacking.stack import Stack
from vivace.sweeping.stacking.tables import in_order
from vivace.tensors.outside import MOST_NUMBERS
from vivace.training.training import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def opened():
    """``opened(function, *parameters, seeds=...)``: rows; what opening changed is undone in the end."""
    rows, machine = [], inspect()

    def build(function, *parameters, seeds=(0,) * 9):
        first = len(rows)
        for number, (one, seed) in enumerate(zip(parameters, seeds, strict=False)):
            rows.append(Row(number, one, JobFunction(function)(**one), machine, seed))
        return rows[first:]

    yield build
    for row in reversed(rows):
        row.close()


def structure(row):
    return structure_of(row.job, row.model, row.optimizer)


def stacked(rows):
    feed = Feed()
    for row in rows:
        feed.enter(row)
    return Stack(rows, feed)


@pytest.mark.parametrize(
    ("rule", "fixed", "at_once"),
    [
        ("SGD", {"decay": 0.01}, 3),
        ("SGD", {"optimizer": "plain", "schedule": "step"}, 1),
        ("Adam", {"optimizer": "adam", "decay": 0.01, "dropout": 0.3}, 3),
        ("Adam", {"optimizer": "adam", "decay": 0.01, "dropout": 0.3}, 2),
        ("AdamW", {"optimizer": "adamw", "decay": 0.01, "clip": 0.1}, 2),
        ("AdamW", {"optimizer": "groups", "decay": 0.1}, 3),
        ("Own", {"optimizer": "rmsprop", "clip": 0.1}, 2),
    ],
)
def test_each_row_is_the_run_that_train_makes_of_it(jobs, opened, tmp_path, rule, fixed, at_once):
    """To the end: other learning rates, weight decays, dropouts and seeds, all in one stack, of which
    `at_once` are computed at a time.
    """
    settings = [{**fixed, "lr": lr} for lr in (0.05, 0.1, 0.2)]
    settings[1]["dropout"] = 0.5
    seeds = [0, 1, 2]
    rows = opened(jobs.job, *settings, seeds=seeds)
    assert len({structure(row) for row in rows}) == 1
    stack = stacked(rows)
    assert type(stack.rule).__name__ == rule
    stack.at_once = at_once
    assert all(isinstance(found, Proof) for found in prove(stack, rows, Tightest()).values())
    for _ in range(3):
        for leaves in stack.feed.epoch(stack.rows):
            losses = stack.step(leaves)
            if fixed.get("schedule") == "step":
                for row in rows:
                    row.step_scheduler()
        for row in rows:
            row.metric = row.evaluation.metric()
            row.epoch += 1
    for number, (row, one, seed) in enumerate(zip(rows, settings, seeds, strict=True)):
        alone = train(jobs.job(**one), out=tmp_path / f"run{number}", seed=seed)
        assert float(losses[number]) == pytest.approx(alone.loss, rel=1e-3)
        assert row.metric == pytest.approx(alone.metric, abs=0.02)
        weights = torch.load(tmp_path / f"run{number}" / "model.pt", weights_only=True)
        for name, tensor in row.model.state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


def an_epoch(stack):
    """Train one of every row, as the child does."""
    for leaves in stack.feed.epoch(stack.rows):
        losses = stack.step(leaves)
        for row in stack.rows:
            row.steps += 1
    for row, loss in zip(stack.rows, losses.tolist(), strict=True):
        row.loss, row.metric = loss, row.evaluation.metric()
        row.step_scheduler()
        row.epoch += 1


@pytest.mark.parametrize("optimizer", ["sgd", "groups", "rmsprop"])
def test_a_row_goes_on_from_its_checkpoint_in_a_stack_or_alone(jobs, opened, tmp_path, optimizer):
    """In a stack to the last digit."""
    fixed = {"optimizer": optimizer, "decay": 0.1, "dropout": 0.3, "schedule": "epoch"}
    settings, folders = [{**fixed, "lr": lr} for lr in (0.05, 0.2)], [tmp_path / "0", tmp_path / "1"]
    stack = stacked(opened(jobs.job, *settings))
    prove(stack, stack.rows, Tightest())
    for folder in folders:
        folder.mkdir()
    keepers = [Keeper(row, folder) for row, folder in zip(stack.rows, folders, strict=True)]
    for epoch in range(3):
        an_epoch(stack)
        for slot, folder in enumerate(folders if epoch == 1 else ()):
            (folder / "metrics.jsonl").write_text("")
            keepers[slot].save(stack, slot)
    rows = opened(jobs.job, *settings)
    for row, folder in zip(rows, folders, strict=True):
        Keeper(row, folder)
    assert [(row.epoch, row.steps) for row in rows] == [(2, 12), (2, 12)]
    again = stacked(rows)
    found = prove(again, rows, Tightest())
    assert all(isinstance(one, Proof) for one in found.values()), found
    an_epoch(again)
    assert torch.equal(again.weights, stack.weights)
    assert [row.metric for row in again.rows] == [row.metric for row in stack.rows]
    alone = train(jobs.job(**settings[0]), out=folders[0], resume=True, seed=0)
    assert (alone.resumed_from_step, alone.epochs) == (12, 3)
    weights = torch.load(folders[0] / "model.pt", weights_only=True)
    for name, tensor in stack.rows[0].model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)
    (late,) = opened(jobs.job, settings[0])
    with pytest.raises(Refused, match="goes on alone"):
        Keeper(late, folders[0])


class Centred(torch.nn.Linear):
    """Keeps a mean that is in no state_dict."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x - self.mean)


def test_what_is_in_no_state_dict_goes_on_from_a_rows_checkpoint(jobs, opened, tmp_path):
    def job(lr):
        return dataclasses.replace(jobs.job(lr), model=Centred)

    settings, folders = [{"lr": 0.05}, {"lr": 0.2}], [tmp_path / "0", tmp_path / "1"]
    stack = stacked(opened(job, *settings))
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
    keepers = [Keeper(row, folder) for row, folder in zip(stack.rows, folders, strict=True)]
    an_epoch(stack)
    for slot, keeper in enumerate(keepers):
        keeper.save(stack, slot)
    an_epoch(stack)
    rows = opened(job, *settings)
    for row, folder in zip(rows, folders, strict=True):
        Keeper(row, folder)
    again = stacked(rows)
    an_epoch(again)
    assert again.buffers["model.mean"].abs().max() > 0
    assert torch.equal(again.buffers["model.mean"], stack.buffers["model.mean"])
    assert torch.equal(again.weights, stack.weights)
    train(job(**settings[0]), out=folders[0], resume=True, max_steps=12)
    weights = torch.load(folders[0] / "model.pt", weights_only=True)
    torch.testing.assert_close(stack.rows[0].model.weight.data, weights["weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("best", "written"), [(-math.inf, 2), (2.0, 0)])
def test_weights_are_written_where_they_may_be_the_best(jobs, monkeypatch, tmp_path, best, written):
    """A metric of 2 no accuracy reaches."""
    monkeypatch.setattr(child, "ask_parent", lambda _: {"prune": [], "join": [], "best": best})
    known = dataclasses.asdict(child.Decision(True, rows=2, at_once=2))
    rows = [
        {"number": n, "parameters": {"lr": lr}, "out": str(tmp_path / str(n)), "seed": 0}
        for n, lr in enumerate((0.05, 0.2))
    ]
    found = StackedTrials(JobFunction(jobs.job), 1).train(rows, known, best)
    assert found["refused"] == found["failed"] == {}
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == 2
    assert len(list(tmp_path.glob("*/model.pt"))) == written


def test_buffers_and_masks_are_each_rows_own(jobs, opened):
    rows = opened(jobs.convolutions, *[{"lr": lr, "dropout": p} for lr, p in ((0.1, 0.0), (0.2, 0.5))])
    stack = stacked(rows)
    found = prove(stack, rows, Tightest())
    assert all(isinstance(one, Proof) for one in found.values()), found
    for leaves in stack.feed.epoch(stack.rows):
        stack.step(leaves)
    means = [row.model[1].running_mean for row in rows]
    assert not torch.equal(*means)
    assert [int(row.model[1].num_batches_tracked) for row in rows] == [4, 4]


@pytest.mark.parametrize(
    ("defect", "quantity"),
    [
        ("rate", "scale"),
        ("decay", "envelopes off"),
        ("momentum", "scale"),
        ("mask", "random numbers"),
        ("loss", "loss"),
    ],
)
def test_a_row_that_is_another_model_is_refused(jobs, opened, monkeypatch, defect, quantity):
    """Defects are planted into the stack; the proof must find each in the very first steps, also where it
    knows the envelopes of rows that were right.
    """
    settings = [{"lr": lr, "decay": 0.05, "dropout": 0.2} for lr in (0.1, 0.2)]
    rows, known = opened(jobs.job, *settings), Tightest()
    stack = stacked(rows)
    assert all(isinstance(one, Proof) for one in prove(stack, rows, known).values())
    assert known.num > 0
    if defect == "rate":
        plain = updates.Rule.column
        monkeypatch.setattr(
            updates.Rule, "column", lambda s, r, n: plain(s, r, n) * (1.1 if n == "lr" else 1.0)
        )
    elif defect == "decay":
        plain = updates.Rule.any
        monkeypatch.setattr(updates.Rule, "any", lambda s, name: name != "weight_decay" and plain(s, name))
    elif defect == "momentum":
        monkeypatch.setitem(stack.rule.state, "momentum_buffer", torch.zeros_like(stack.weights))
        monkeypatch.setattr(
            updates.SGD,
            "update",
            lambda s, r, w, g: w.addcmul_(g, s.column(r, "lr").expand_as(w), value=-1.0),
        )
    elif defect == "mask":
        rows[1].generator.manual_seed(5)
    else:
        stack._loss.loss = lambda model, batch: jobs.loss(model, batch) * 1.01
    found = prove(stack, rows, known)
    wrong = [str(one) for one in found.values() if isinstance(one, Refused)]
    assert wrong, found
    assert any(quantity in text for text in wrong)


def test_a_proof_leaves_the_stack_as_it_was(jobs, opened):
    rows = opened(jobs.job, *[{"lr": lr, "dropout": 0.5} for lr in (0.1, 0.2)])
    stack = stacked(rows)
    for leaves in itertools.islice(stack.feed.epoch(stack.rows), 3):
        stack.step(leaves)
    before = stack.saved()
    prove(stack, rows, Tightest())
    ratio, seconds = choice.measured(stack)
    assert 0 < ratio.low <= ratio.estimate <= ratio.high
    assert seconds > 0
    after = stack.saved()
    assert torch.equal(before.weights, after.weights)
    assert torch.equal(before.state["momentum_buffer"], after.state["momentum_buffer"])
    assert before.steps == after.steps
    assert all(torch.equal(a, b) for a, b in zip(before.generators, after.generators, strict=True))


def test_rows_leave_and_others_take_their_places(jobs, opened):
    """A row that stays is not touched by those that come and go; one that comes begins at its beginning."""
    rows = opened(jobs.job, *[{"lr": lr, "optimizer": "adam"} for lr in (0.1, 0.2, 0.3)])
    late, later = opened(jobs.job, *[{"lr": 0.2, "optimizer": "adam"}] * 2)
    late.number, later.number = 7, 8
    whole = copy.deepcopy([row.model.state_dict() for row in rows])
    stack = stacked(rows)
    epoch = list(stack.feed.epoch(stack.rows))
    for leaves in epoch:
        stack.step(leaves)
    first = [row.model.state_dict()["0.weight"].clone() for row in rows]
    assert not torch.equal(first[1], whole[1]["0.weight"])
    stack.feed.enter(late)
    stack.feed.enter(later)
    stack.replace({0: late})
    stack.remove([2])
    stack.add([later])
    assert [row.number for row in stack.rows] == [7, 1, 8]
    assert torch.equal(rows[0].model.state_dict()["0.weight"], first[0])
    assert all(isinstance(one, Proof) for one in prove(stack, [late, later], Tightest()).values())
    assert torch.equal(rows[1].model.state_dict()["0.weight"], first[1])
    for leaves in stack.feed.epoch(stack.rows):
        stack.step(leaves)
    # Both have now been trained as row 1 was in its first epoch: equal parameters, equal seed.
    for row in (late, later):
        torch.testing.assert_close(row.model.state_dict()["0.weight"], first[1], rtol=1e-4, atol=1e-5)


def test_what_draws_otherwise_is_refused(jobs, opened):
    rows = opened(jobs.restless, {"lr": 0.1}, {"lr": 0.2})
    with pytest.raises(Refused, match="torch cannot compute the runs as one"):
        prove(stacked(rows), rows, Tightest())
    rows = opened(jobs.convolutions, {"noise": True}, {"noise": True, "lr": 0.2})
    found = prove(stacked(rows), rows, Tightest())
    assert {str(one) for one in found.values()} == {"the step draws from Python's or NumPy's random numbers"}


class Annealed(torch.nn.Linear):
    """Its output fades in over many steps, which it counts."""

    def __init__(self):
        super().__init__(6, 3)
        self.steps, self.last = 0, None

    def forward(self, x):
        if self.training:
            self.steps += 1
        self.last = super().forward(x)
        return self.last * min(1.0, 0.1 + self.steps / 1e9)


def test_steps_that_count_in_python_are_refused(jobs, opened):
    """So slowly that the first steps are those of the run alone; a note of the last step is no count."""

    def in_model(lr=0.1):
        return dataclasses.replace(jobs.job(lr), model=Annealed)

    def in_loss(lr=0.1):
        seen = []

        def loss(model, batch):
            seen.append(1)
            return jobs.loss(model, batch) * (1 + len(seen) / 1e9)

        return dataclasses.replace(jobs.job(lr), loss=loss)

    def in_large(lr=0.1):
        average = torch.zeros(MOST_NUMBERS + 1)

        def loss(model, batch):
            average.data.add_(1e-9)
            return jobs.loss(model, batch) * (1 + average[0])

        return dataclasses.replace(jobs.job(lr), loss=loss)

    def noted(lr=0.1):
        note = {}

        def loss(model, batch):
            note["outputs"] = model(batch[0])
            return torch.nn.functional.cross_entropy(note["outputs"], batch[1])

        return dataclasses.replace(jobs.job(lr), loss=loss)

    found = {}
    for function in (in_model, in_loss, in_large, noted):
        rows = opened(function, {}, {"lr": 0.2})
        found[function.__name__] = [str(one) for one in prove(stacked(rows), rows, Tightest()).values()]
    counted = "its steps count in Python (%s), where a stack has one place for all runs"
    assert found["in_model"] == [counted % "steps"] * 2
    assert found["in_loss"] == found["in_large"] == [counted % "what its functions hold"] * 2
    assert all(text.startswith("Proof(") for text in found["noted"])


def test_structures_differ_where_rows_may_not_share_a_stack(jobs, opened):
    plain, wide, clipped, dropped, other = opened(
        jobs.job, {}, {"width": 9}, {"clip": 1.0}, {"dropout": 0.4, "lr": 0.3}, {"optimizer": "adam"}
    )
    assert structure(plain) == structure(dropped)
    assert len({structure(row) for row in (plain, wide, clipped, other)}) == 4


def test_a_run_of_which_a_stack_would_leave_something_out_is_refused(jobs, opened):
    """Also where the first steps would not show it."""

    def hooked(model):
        found = torch.optim.SGD(model.parameters(), lr=0.1)
        found.register_step_post_hook(lambda *_: None)  # such as an average of the weights
        return found

    def beside(model):
        return torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(3))], lr=0.1)

    frozen = {"optimizer": lambda model: torch.optim.SGD([*model.parameters(), torch.zeros(3)], lr=0.1)}
    changes = {
        "its optimizer has hooks": {"optimizer": hooked},
        "its optimizer also trains weights that are not the model's": frozen,
        "the job has on_trained": {"on_trained": lambda model, folder: None},
    }
    for reason, change in changes.items():
        with pytest.raises(Refused, match=reason):
            opened(lambda change=change: dataclasses.replace(jobs.job(), **change), {})
    falling = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}
    wrong = {"give it mode='max'": falling, "1 tensor that the model does not hold": {"optimizer": beside}}
    for reason, change in wrong.items():  # as `train` says of the run alone
        with pytest.raises(JobError, match=reason):
            opened(lambda change=change: dataclasses.replace(jobs.job(), **change), {})


@pytest.mark.parametrize("setting", ["amsgrad", "decoupled_weight_decay"])
def test_who_follows_is_updated_as_those_who_are_there_or_refused(jobs, tmp_path, setting):
    """In the first steps Adam's largest squared gradient is the last one: a proof sees no difference."""

    def job(lr: float = 0.01, on: bool = False):
        return dataclasses.replace(
            jobs.job(),
            optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=lr, weight_decay=1e-5, **{setting: on}),
        )

    def told(number, **parameters):
        return {"number": number, "parameters": parameters, "out": str(tmp_path / str(number)), "seed": 0}

    stacked = StackedTrials(JobFunction(job), 1)
    rows = stacked._opened([told(1), told(2, lr=0.02)])
    stacked.stack = Stack(rows, stacked.feed)
    rows += stacked._opened([told(3, lr=0.03), told(4, on=True)])
    for row in rows:
        row.close()
    assert [row.number for row in rows] == [1, 2, 3]
    assert stacked.refused == {4: "its optimizer is set to another kind of update than those of the others"}


def test_an_adam_whose_decay_is_adamws_is_updated_as_adamw(jobs, opened):
    def job(lr):
        return dataclasses.replace(
            jobs.job(),
            optimizer=lambda m: torch.optim.Adam(
                m.parameters(), lr, weight_decay=0.1, decoupled_weight_decay=True
            ),
        )

    rows = opened(job, {"lr": 0.01}, {"lr": 0.02})
    stack = stacked(rows)
    assert type(stack.rule) is updates.AdamW
    assert all(isinstance(one, Proof) for one in prove(stack, rows, Tightest()).values())


def test_unequal_batches_are_refused(jobs, opened):
    rows = opened(jobs.job, {"batch": 16}, {"batch": 24})
    feed = Feed()
    feed.enter(rows[0])
    with pytest.raises(Refused, match="batches are built otherwise"):
        feed.enter(rows[1])


class Told(TensorDataset):
    """Data that are told the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


class PassesOn(Subset):
    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)


@pytest.mark.parametrize("wrapped", [False, True])
def test_runs_that_would_tell_each_others_data_their_epoch_are_refused(jobs, opened, wrapped):
    def job(own):
        data = Told(*jobs.table(48).tensors) if own else common
        data = PassesOn(data, range(48)) if wrapped else data
        return dataclasses.replace(jobs.job(), data=lambda: DataLoader(data, batch_size=16))

    common, feed = Told(*jobs.table(48).tensors), Feed()
    first, second, third = opened(job, {"own": False}, {"own": True}, {"own": False})
    second.number, third.number = 1, 2
    feed.enter(first)
    feed.enter(second)
    with pytest.raises(Refused, match=r"its Told is told the epoch \(set_epoch\), and all runs hold"):
        feed.enter(third)
    feed.leave(first)
    feed.enter(third)


@pytest.mark.parametrize("counts", [(96, 80), (80, 96), (96, 64)])
def test_a_run_of_more_batches_is_refused(jobs, opened, counts):
    def job(count):
        data = Subset(jobs.table(96), range(count))
        return dataclasses.replace(jobs.job(), data=lambda: DataLoader(data, batch_size=16, shuffle=True))

    rows, feed = opened(job, *({"count": count} for count in counts)), Feed()
    for row in rows:
        feed.enter(row)
    with pytest.raises(Refused, match="unequal numbers of batches"):
        list(feed.epoch(rows))


def test_a_loader_of_any_kind_feeds_the_same(jobs, opened, monkeypatch):
    """The look-up in a table gives what the rows' own loaders give; rows of a seed share an epoch's order."""
    rows = opened(jobs.job, *[{}] * 4, seeds=[3, 4, 3, 3])
    rows[3].epoch = 1
    quick = stacked(rows)
    looked_up = list(quick.feed.epoch(rows))
    orders = [quick.feed._order_of(row) for row in rows]
    assert orders[0] is orders[2]
    assert len({id(order) for order in orders}) == 3
    monkeypatch.setattr("vivace.sweeping.stacking.feeding.table_of", lambda loader: None)
    feed = Feed()
    for row in rows:
        feed.enter(row)
    loaded = list(feed.epoch(rows))
    assert len(looked_up) == len(loaded) == 6
    for mine, theirs in zip(looked_up, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_is_measured_faster_is_computed_at_a_time(jobs, opened, monkeypatch):
    stack = stacked(opened(jobs.job, *({"lr": 0.01 * number, "dropout": 0.3} for number in range(1, 10))))
    before, costs = stack.saved(), {9: 3.0, 5: 2.0, 3: 1.0, 2: 0.5}
    computed = []

    def seconds(stack):
        while True:
            computed.append(stack.at_once)
            stack.step(next(iter(stack.feed.epoch(stack.rows))))
            yield costs[stack.at_once]

    monkeypatch.setattr(choice, "_fused", seconds)
    assert choice.rows_at_once(stack) == stack.at_once == 5  # half of it would be fewer than 4
    assert set(computed) == {9, 5}
    after = stack.saved()
    assert torch.equal(after.weights, before.weights)
    assert all(torch.equal(a, b) for a, b in zip(after.generators, before.generators, strict=True))
    costs[5] = 4.0
    stack.at_once = 9
    assert choice.rows_at_once(stack) == 9


def test_long_steps_are_not_worth_measuring():
    assert choice.too_large(0.2)
    assert not choice.too_large(0.001)


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_metric_sees_is_what_its_loader_gives(drop_last):
    table = TensorDataset(torch.randn(50, 3), torch.arange(50))
    loader = DataLoader(table, batch_size=16, drop_last=drop_last)
    for looked_up, loaded in zip(in_order(loader), loader, strict=True):
        assert type(looked_up) is type(loaded)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(looked_up, loaded, strict=True))
        looked_up[0].zero_()  # a metric may write in its batch
    assert table.tensors[0].abs().min() > 0
    assert in_order(DataLoader(table, batch_size=16, shuffle=True)) is None
    split = BatchSampler(SubsetRandomSampler([3, 9, 15, 2, 7, 4]), 2, drop_last=False)
    assert in_order(DataLoader(table, batch_sampler=split)) is None
    assert in_order(DataLoader(table, batch_sampler=BatchSampler([0, 2, 4], 2, drop_last=False))) is None
    turned = TensorDataset(torch.randn(6, 4, 3).permute(0, 2, 1))
    (batch,) = next(iter(in_order(DataLoader(turned, batch_size=4))))
    assert batch.is_contiguous()
    assert torch.equal(batch, turned.tensors[0][:4])
    assert in_order(DataLoader(table, batch_size=16, collate_fn=list)) is None
    assert in_order(list(loader)) is None


class Forgets:
    """A schedule that empties the momentum."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_schedule_that_empties_the_momentum_does_so_in_a_stack(jobs, opened, tmp_path):
    def job(lr):
        return dataclasses.replace(jobs.job(lr), scheduler=Forgets)

    rows = opened(job, {"lr": 0.05}, {"lr": 0.1})
    stack = stacked(rows)
    for _ in range(3):
        an_epoch(stack)
    alone = [train(job(lr), out=tmp_path / str(lr)).loss for lr in (0.05, 0.1)]
    assert [row.loss for row in rows] == pytest.approx(alone, rel=1e-3)


class Thaws:
    """A schedule that trains the first layer, too, from its eighth step on."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        if self.steps == 8:
            for weight in self.optimizer.param_groups[0]["params"]:
                weight.requires_grad_(True)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize(("every", "epochs", "kept"), [("epoch", 9, 7), ("step", 3, 1)])
def test_a_run_whose_schedule_thaws_a_part_leaves_the_stack(jobs, tmp_path, monkeypatch, every, epochs, kept):
    """Before the parent hears of an epoch in which that happened."""

    def job(lr):
        def model():
            found = plain.model()
            found[0].requires_grad_(False)
            return found

        plain = jobs.job(lr, epochs=epochs)
        return dataclasses.replace(plain, model=model, scheduler=Thaws, scheduler_every=every)

    heard = []
    answer = {"prune": [], "join": [], "best": math.inf}
    monkeypatch.setattr(child, "ask_parent", lambda question: heard.append(question) or answer)
    trials = [
        {"number": n, "parameters": {"lr": 0.1 * n}, "out": str(tmp_path / f"trial_{n}"), "seed": 0}
        for n in (1, 2)
    ]
    known = dataclasses.asdict(child.Decision(True, rows=2, at_once=2))
    found = StackedTrials(JobFunction(job), 1).train(trials, known)
    assert [[one["epoch"] for one in question["rows"]] for question in heard] == [
        *([epoch] * 2 for epoch in range(1, kept + 1)),
        [],
    ]
    assert heard[0]["rows"][0]["of_epochs"] == epochs
    reason = "the job changes which weights are trained while it trains, which a stack would not follow"
    assert heard[-1]["refused"] == dict.fromkeys(("1", "2"), reason)
    assert (found["decision"]["fused"], found["decision"]["reason"]) == (False, reason)


def test_what_torch_cannot_compute_as_one_is_decided_not_failed(jobs, tmp_path):
    trials = [
        {"number": number, "parameters": {"lr": lr}, "out": str(tmp_path / f"trial_{number}"), "seed": 0}
        for number, lr in enumerate((0.1, 0.2))
    ]
    child = StackedTrials(JobFunction(jobs.restless), 1)
    found = child.train(trials)
    for row in child.stack.rows:
        row.close()
    assert not found["decision"]["fused"]
    assert found["decision"]["reason"].startswith("torch cannot compute the runs as one")
    assert found["failed"] == {}


def test_a_run_for_which_the_memory_is_too_full_is_run_alone(jobs, tmp_path):
    """That it lacks is no fault of its own: the others are open in the same process."""

    def full(lr):
        if lr == 0.2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return jobs.job(lr=lr)

    child = StackedTrials(JobFunction(full), 1)
    rows = child._opened(
        [
            {"number": n, "parameters": {"lr": 0.1 * n}, "out": str(tmp_path / f"trial_{n}"), "seed": 0}
            for n in (1, 2)
        ]
    )
    rows[0].close()
    assert child.failed == {}
    assert "out of memory" in child.refused[2]


def test_a_later_stack_of_a_shape_is_proven_and_not_timed_again(jobs, tmp_path, monkeypatch):
    trials = [
        {"number": n, "parameters": {"lr": 0.1 * n}, "out": str(tmp_path / f"trial_{n}"), "seed": 0}
        for n in range(1, 5)
    ]
    child = StackedTrials(JobFunction(jobs.job), 1)
    first = child._decided(child._opened(trials[:2]), None)
    monkeypatch.setattr("vivace.sweeping.stacking.child.measured", None)
    monkeypatch.setattr("vivace.sweeping.stacking.child.rows_at_once", None)
    again = StackedTrials(JobFunction(jobs.job), 1)
    known = {**dataclasses.asdict(first), "fused": True, "at_once": 1}
    decision = again._decided(again._opened(trials[2:]), known)
    for row in (*child.stack.rows, *again.stack.rows):
        row.close()
    assert decision.fused
    assert (decision.rows, decision.at_once, again.stack.at_once) == (2, 1, 1)
    assert decision.ratio == first.ratio
    assert again.proofs


def test_loaders_with_workers_of_their_own_are_as_many_as_the_cores_serve(jobs, tmp_path):
    """Each run reads by its own: 32 runs of four workers would be 128 processes."""

    def job(lr=0.1):
        data = list(jobs.table(48))
        return dataclasses.replace(jobs.job(lr), data=lambda: DataLoader(data, batch_size=16, num_workers=1))

    trials = [
        {"number": n, "parameters": {"lr": 0.1 * n}, "out": str(tmp_path / str(n)), "seed": 0}
        for n in (1, 2, 3)
    ]
    stacked = StackedTrials(JobFunction(job), 1)
    stacked.machine = dataclasses.replace(stacked.machine, num_cores=1)
    rows = stacked._opened(trials)
    decision = stacked._decided(rows, None)
    for row in rows:
        row.close()
    assert not decision.fused
    assert set(stacked.refused) == {2, 3}
    assert decision.reason == "the cores have room for the loaders, of 1 worker each, of 1 run at once"
    assert choice.most_rows(rows[0], 2, 8)[0] == 4
