"""What a checkpoint holds beside weights, and what no checkpoint could hold, told before anything is lost."""

import collections
import enum
import gc
import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import vivace
from vivace.errors import CheckpointError, JobError, SampleError
from vivace.job import load
from vivace.serving.trained import load_trained
from vivace.tensors.outside import alike
from vivace.training.beside import _given, _kept
from vivace.training.checkpoints import Checkpoints, Position, unstorable

THAWING = Path(__file__).parent / "scenes" / "thawing.py"
ROWS = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))


def linear():
    return torch.nn.Linear(2, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def square(model, batch):
    return model(batch[0]).pow(2).mean()


def job_of(model=linear, **fields):
    common = {"data": lambda: DataLoader(TensorDataset(ROWS), batch_size=4), "optimizer": sgd}
    return vivace.Job(**{"model": model, "loss": square, **common, **fields})


def whole_and_in_parts(job, folder, stops=(7, 13), **options):
    """The weights of a run, and of one that was stopped after these steps; with the notices of the latter."""
    vivace.train(job, out=folder / "whole", **options)
    for stop in stops:
        vivace.train(job, out=folder / "parts", max_steps=stop, resume=stop != stops[0], **options)
    run = vivace.train(job, out=folder / "parts", resume=True, **options)
    whole, parts = (torch.load(folder / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    return all(torch.equal(whole[name], parts[name]) for name in whole), run.notices


class Remembering(torch.nn.Module):
    """`change(self, outputs)` changes attributes in each step, and `number(self)` counts in the outputs."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.tau, self.calls, self.center = 1.0, numpy.int64(0), torch.zeros(1)
        self.history, self.recent = [], collections.deque(maxlen=3)
        self.of_class, self.table = {}, numpy.zeros(3, dtype=numpy.float32)
        self.held = collections.defaultdict(float)

    def forward(self, inputs):
        found = self.layer(inputs)
        if self.training:
            self.tau = numpy.maximum(self.tau * numpy.exp(-1e-2), 0.5)
            self.calls += numpy.int64(1)
            self.center = 0.9 * self.center + 0.1 * found.detach().mean()
            self.history.append(float(found.detach().mean()))
            self.recent.append(float(found.detach().mean()))
            self.of_class["seen"] = self.of_class.get("seen", 0) + 1
            self.table = self.table * numpy.float32(0.9) + numpy.float32(0.1)
            self.held["sum"] += float(self.tau)
        numbers = sum(self.recent) + len(self.history) + self.of_class.get("seen", 0) + self.table.sum()
        return found * float(self.tau) - self.center + 1e-3 * float(numbers + self.calls + self.held["sum"])


def test_attributes_of_modules_go_on_whatever_plain_kind_they_are_of(tmp_path):
    assert whole_and_in_parts(job_of(Remembering), tmp_path) == (True, ())


class Thawing(torch.nn.Module):
    """Trains its first layer from the fifth step on, and then leaves its normalization as it is."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        self.head, self.calls = torch.nn.Linear(4, 1), 0
        self.body[0].requires_grad_(False)

    def forward(self, inputs):
        self.calls += self.training
        if self.calls == 5:
            self.body[0].requires_grad_(True)
            self.body[1].eval()
        return self.head(self.body(inputs).relu())


def test_which_weights_are_trained_and_the_modes_of_modules_go_on(tmp_path):
    assert whole_and_in_parts(job_of(Thawing), tmp_path) == (True, ())


@pytest.mark.parametrize("name", ["thawing", "unfreezing", "extending"])
def test_what_a_schedule_sets_free_goes_on_in_new_groups_of_the_optimizer_too(tmp_path, name):
    assert whole_and_in_parts(load(f"{THAWING}:{name}"), tmp_path, (30, 50)) == (True, ())


@pytest.mark.parametrize("name", ["thawing", "unfreezing"])
def test_ranks_exchange_the_gradients_of_weights_that_a_schedule_sets_free(
    launch, launch_ranks, tmp_path, digest, name
):
    def trained(out, ranks=2, **arguments):
        arguments |= {"out": str(tmp_path / out)}
        several = {"file": THAWING, "num": ranks}
        children = (
            launch_ranks(name, arguments, **several) if ranks > 1 else [launch(name, arguments, THAWING)]
        )
        assert [child.wait() for child in children] == [0] * ranks, children[0].answer
        return children[0].answer

    notice = "the ranks exchange gradients of other weights from here on"
    assert trained("whole")["notices"] == [f"step 41: {notice}"]
    trained("parts", max_steps=30)
    trained("parts", resume=True, max_steps=50)
    assert trained("parts", resume=True)["notices"] == [f"step 51: {notice}"]
    assert digest(tmp_path / "parts" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
    trained("alone", ranks=1)
    trained("more", ranks=1, max_steps=50)
    trained("more", resume=True)
    alone = torch.load(tmp_path / "alone" / "model.pt")
    for other in ("whole", "more"):
        found = torch.load(tmp_path / other / "model.pt")
        assert all(torch.allclose(found[key], alone[key], rtol=1e-4, atol=1e-5) for key in alone)


class Banked(torch.nn.Module):
    """Makes a persistent buffer in its first forward, lets one grow, fills one, and empties one later."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("memory", torch.zeros(0, 2))
        self.register_buffer("filled", None)
        self.register_buffer("emptied", torch.ones(3))

    def forward(self, inputs):
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if self.training:
            self.calls += 1
            self.memory = torch.cat([self.memory, inputs[:1]])
            self.filled = inputs.detach().mean(0)
            self.emptied = None if self.calls > 5 else self.emptied
        missing = 0.0 if self.emptied is None else self.emptied.sum()
        return self.layer(inputs + self.filled + self.memory.mean(0)) + 0.01 * self.calls + missing


def test_persistent_buffers_that_training_makes_or_lets_grow_go_on(tmp_path):
    job = job_of(Banked)
    assert whole_and_in_parts(job, tmp_path) == (True, ())
    served, _ = load_trained(job, tmp_path / "parts")
    assert (len(served.memory), int(served.calls), served.emptied) == (20, 20, None)


class Growing(torch.nn.Module):
    """Makes another weight in a forward of its training."""

    first = 5

    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(2, 1), 0

    def forward(self, inputs):
        self.calls += self.training
        if self.calls == self.first:
            self.more = torch.nn.Linear(2, 1)
        return self.layer(inputs) + (self.more(inputs) if self.calls >= self.first else 0.0)


class GrowingAtOnce(Growing):
    first = 1


class GrowingAgain(Growing):
    """Makes it where it loads, too."""

    def _load_from_state_dict(self, state, prefix, *arguments):
        if f"{prefix}more.weight" in state:
            self.more = torch.nn.Linear(2, 1)
        super()._load_from_state_dict(state, prefix, *arguments)


def test_weights_that_training_makes_replace_no_checkpoint_that_can_be_taken_up(tmp_path):
    for model, kept in ((Growing, [4]), (GrowingAtOnce, [])):
        out = tmp_path / model.__name__
        with pytest.raises(
            CheckpointError,
            match=r"no run could go on from .* reshaped 'more\.weight' of .*(step_4 stays|do that)$",
        ):
            vivace.train(job_of(model), out=out, checkpoint_every_steps=4)
        assert [int(path.name[5:]) for path in (out / "checkpoints").glob("step_*")] == kept
    assert vivace.train(job_of(Growing), out=tmp_path / "Growing", resume=True, max_steps=4).steps == 4
    assert whole_and_in_parts(job_of(GrowingAgain), tmp_path)[0]


def test_a_group_of_what_the_model_does_not_hold_replaces_no_checkpoint(tmp_path):
    def loss(model, batch):
        if len(optimizers[-1].param_groups) == 1 and next(steps) == 5:
            optimizers[-1].add_param_group({"params": [torch.ones(1, requires_grad=True)]})
        return square(model, batch)

    def optimizer(model):
        optimizers.append(sgd(model))
        return optimizers[-1]

    optimizers, steps = [], itertools.count(1)
    with pytest.raises(CheckpointError, match="added to the optimizer holds what is no weight of the model"):
        vivace.train(job_of(optimizer=optimizer, loss=loss), out=tmp_path, checkpoint_every_steps=4)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_4"]


class Late(torch.nn.Module):
    """Its temperature is Python's number in the first checkpoints, and NumPy's afterwards."""

    def __init__(self):
        super().__init__()
        self.layer, self.tau, self.calls = torch.nn.Linear(2, 1), 1.0, 0

    def forward(self, inputs):
        if self.training:
            self.calls += 1
            self.tau = numpy.exp(-0.01 * self.calls) if self.calls > 7 else self.tau
        return self.layer(inputs) * float(self.tau)


def test_a_number_that_becomes_numpys_on_the_way_spoils_no_checkpoint(tmp_path):
    assert whole_and_in_parts(job_of(Late), tmp_path, stops=(10,), checkpoint_every_steps=2) == (True, ())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.integers(-9, 9).map(numpy.int32),
    st.floats(-9, 9, width=32).map(numpy.float32),
    st.booleans().map(numpy.bool_),
    st.lists(st.integers(-9, 9), max_size=4).map(lambda found: numpy.array(found, dtype=numpy.int16)),
    st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor),
)
KEYS = st.one_of(st.integers(-9, 9), st.text(max_size=3), st.tuples(st.integers(0, 3), st.booleans()))
THINGS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda found: collections.defaultdict(None, found)),
        st.dictionaries(KEYS, st.integers(0, 9), max_size=3).map(collections.Counter),
        st.lists(inner, max_size=3).map(lambda found: collections.deque(found, maxlen=5)),
        st.sets(st.integers(-9, 9), max_size=3),
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(THINGS)
def test_an_attribute_comes_back_from_a_file_as_it_was(thing):
    file = io.BytesIO()
    torch.save(_kept(thing), file)
    file.seek(0)
    found = _given(torch.load(file, weights_only=True), torch.device("cpu"))
    assert alike(found, thing)
    assert getattr(found, "maxlen", None) == getattr(thing, "maxlen", None)


class WarmingUp(torch.optim.SGD):
    """Counts its steps in an attribute, and sets its learning rate by that."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.taken, self.recent = 0, collections.deque(maxlen=2)

    def step(self, closure=None):
        self.taken += 1
        self.recent.append(self.taken)
        self.param_groups[0]["lr"] = 0.001 * sum(self.recent)
        return super().step(closure)


def test_what_an_optimizer_counts_in_attributes_goes_on(tmp_path):
    job = job_of(optimizer=lambda model: WarmingUp(model.parameters()))
    assert whole_and_in_parts(job, tmp_path) == (True, ())


NUMBERS = enum.IntEnum("NUMBERS", {f"n{number}": number for number in range(100)})


class Odd(torch.nn.Module):
    """Keeps a number of a class of its own, and one of Python's."""

    def __init__(self):
        super().__init__()
        self.layer, self.kind, self.calls = torch.nn.Linear(2, 1), NUMBERS(0), 0

    def forward(self, inputs):
        self.calls += 1
        self.kind = NUMBERS(self.calls)
        return self.layer(inputs)


def test_what_no_file_holds_is_left_out_of_the_checkpoint_and_the_run_goes_on(tmp_path):
    vivace.train(job_of(Odd), out=tmp_path, max_steps=5)
    state = torch.load(tmp_path / "checkpoints" / "step_5" / "state.pt", weights_only=True)
    assert [(key, value) for _, _, key, value in state["beside"]] == [("calls", 5)]


class Drawing(torch.nn.Module):
    """Keeps far more than a checkpoint holds in an attribute, a generator, and a table as it was built."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = torch.nn.Linear(2, 1), torch.Generator().manual_seed(1)
        self.queue, self.table = torch.zeros(150_000, 2), torch.ones(150_000, 2)

    def forward(self, inputs):
        if self.training:
            self.queue = torch.cat([inputs + torch.randn(inputs.shape, generator=self.own), self.queue[:-4]])
            self.activations = self.layer(self.queue)
        return self.layer(inputs + self.table[:1])


def test_what_a_checkpoint_does_not_hold_is_named_where_the_run_goes_on(tmp_path):
    vivace.train(job_of(Drawing), out=tmp_path, max_steps=5)
    (notice,) = vivace.train(job_of(Drawing), out=tmp_path, resume=True).notices
    assert notice.startswith("resumed, not bit-exact where steps read them: attributes that training had ")
    assert "begin anew ('own', 'queue'), as a checkpoint holds no generators" in notice


class Extra(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs):
        return self.layer(inputs)

    def get_extra_state(self):
        return {"mean": numpy.zeros(2)}

    def set_extra_state(self, state):
        assert state["mean"].shape == (2,)


class Shifting(torch.optim.SGD):
    """Keeps old gradients, as AdaShift does: in a state that begins with the first step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                old = self.state[weight].setdefault("old", collections.deque(maxlen=3))
                old.append(weight.grad.clone())
        return super().step(closure)


@pytest.mark.parametrize(
    ("fields", "told", "steps"),
    [
        (
            {"model": Extra},
            "the Job's model has a state that no checkpoint can hold ('mean' is a ndarray)",
            0,
        ),
        (
            {"optimizer": lambda model: Shifting(model.parameters(), lr=0.1)},
            "the Job's optimizer has a state that no checkpoint can hold ('old' is a deque)",
            1,
        ),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_told_at_once(tmp_path, fields, told, steps):
    seen = []
    job = job_of(**{"loss": lambda model, batch: seen.append(None) or square(model, batch), **fields})
    with pytest.raises(JobError, match=re.escape(told)):
        vivace.train(job, out=tmp_path / "run")
    assert len(seen) == steps


def test_a_checkpoint_that_could_not_be_read_back_replaces_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, {})
    state = {"optimizer": {}, "scheduler": None, "techniques": None, "streams": []}
    checkpoints.save(Position(step=1), {}, state)
    for model, more in (({"one": {numpy.float64(1.0)}}, {}), ({}, {"late": numpy.float64(1.0)})):
        with pytest.raises(
            CheckpointError, match=r"state at step 2 cannot be stored: \w+\.pt holds more"
        ) as told:
            checkpoints.save(Position(step=2), model, {**state, **more})
        assert "\x1b" not in str(told.value)
    assert [path.name for path in tmp_path.glob("step*")] == ["step_1"]
    assert checkpoints.newest().position.step == 1


@pytest.mark.parametrize("every", [1, 4])
def test_gradients_that_an_own_step_adds_up_go_on_after_a_stop(tmp_path, every):
    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(2, 1), 0

    def step(model, optimizer, batch):
        loss = model.layer(batch[0]).pow(2).mean()
        (loss / every).backward()
        model.calls += 1
        if model.calls % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    job = job_of(Counted, loss=None, step=step, epochs=1)
    assert whole_and_in_parts(job, tmp_path, stops=(6, 11)) == (True, ())
    vivace.train(job, out=tmp_path / "one", max_steps=6)
    state = torch.load(tmp_path / "one" / "checkpoints" / "step_6" / "state.pt", weights_only=True)
    assert [len(one) for one in state["gradients"]] == ([2] if every > 1 else [0])


class Wrapped(torch.optim.Optimizer):
    """Around another one, and without torch's own `__init__`."""

    def __init__(self, inner):
        self.inner, self.state = inner, inner.state
        self.zero_grad, self.load_state_dict = inner.zero_grad, inner.load_state_dict
        self.state_dict = inner.state_dict

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_step_of_ones_own_may_have_an_optimizer_that_never_calls_torchs_init(tmp_path):
    def step(model, optimizer, batch):
        loss = model(batch[0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def optimizer(model):
        return Wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    mine = optimizer(torch.nn.Linear(2, 1))
    job = job_of(lambda: torch.nn.Linear(2, 1), loss=None, step=step, optimizer=optimizer, epochs=1)
    assert whole_and_in_parts(job, tmp_path, stops=(6, 11)) == (True, ())
    mine.step()  # another object of the class is as before


def test_a_state_that_a_module_adds_in_its_own_way_may_grow(tmp_path):
    class Net(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.seen = []

        def forward(self, x):
            if self.training:
                self.seen.append(float(x.mean()))
            return super().forward(x)

        def get_extra_state(self):
            return torch.tensor(self.seen)

        def set_extra_state(self, state):
            self.seen = state.tolist()

    assert whole_and_in_parts(job_of(Net, epochs=1), tmp_path, stops=(6, 11)) == (True, ())


def test_a_job_with_a_loss_keeps_no_gradients(tmp_path):
    vivace.train(job_of(), out=tmp_path, max_steps=2)
    state = torch.load(tmp_path / "checkpoints" / "step_2" / "state.pt", weights_only=True)
    assert state["gradients"] == []


class Numbers(Dataset):
    """Every second pair of samples takes long, so that workers finish out of turn."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if (index // 2) % 2 == 0:
            time.sleep(0.02)
        return torch.tensor([float(index)])


def test_batches_of_a_loader_without_order_come_in_order_and_it_is_said(tmp_path):
    seen = []

    def loss(model, batch):
        seen.extend(int(number) for number in batch[:, 0])
        return model(batch / 40).pow(2).mean()

    def data():
        return DataLoader(Numbers(), batch_size=2, num_workers=2, in_order=False)

    job = job_of(lambda: torch.nn.Linear(1, 1), data=data, loss=loss)
    vivace.train(job, out=tmp_path, max_steps=9)
    run = vivace.train(job, out=tmp_path, resume=True)
    assert seen == list(range(40))
    assert [text for text in run.notices if "in_order=False" in text]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_of_a_run_stays_in_memory(tmp_path, workers):
    alive = []

    def model():
        alive.append(weakref.ref(made := linear()))
        return made

    def data():
        return DataLoader(TensorDataset(ROWS), batch_size=4, num_workers=workers)

    gc.collect()
    gc.disable()
    try:
        vivace.train(job_of(model, data=data), out=tmp_path)
    finally:
        gc.enable()
    assert [made() for made in alive] == [None] * len(alive)


class Sharded(IterableDataset):
    """Workers share it, each with a rest that fills no batch: torch's length is too long by one."""

    def __len__(self):
        return 10

    def __iter__(self):
        info = get_worker_info()
        yield from (torch.full((2,), float(n)) for n in range(info.id, 10, info.num_workers))


def test_what_torch_guesses_of_a_streams_length_is_no_missing_step(tmp_path):
    def data():
        return DataLoader(Sharded(), batch_size=4, num_workers=2, drop_last=True)

    run = vivace.train(job_of(data=data, loss=lambda model, batch: model(batch / 10).mean()), out=tmp_path)
    assert (run.steps, run.missing_steps, run.exit_code) == (2, 0, 0)


class Bad(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index >= 20:
            raise OSError("it is torn")
        return torch.ones(2)


def test_a_batch_after_the_last_step_is_not_asked_for(tmp_path):
    def data():
        return DataLoader(Bad(), batch_size=4)

    def stream():
        yield from [torch.ones(4, 2)] * 5
        raise OSError("it waits for ever")

    job = job_of(data=data, loss=lambda model, batch: model(batch).mean())
    assert vivace.train(job, out=tmp_path / "one", max_steps=5).steps == 5
    with pytest.raises(SampleError):
        vivace.train(job, out=tmp_path / "one", resume=True)
    job = job_of(data=stream, loss=lambda model, batch: model(batch).mean())
    assert vivace.train(job, out=tmp_path / "two", max_steps=5).steps == 5


@pytest.mark.parametrize(
    ("plan", "kind", "first"), [({}, "step", 15), ({"micro_batches": {"num": 2}}, "watch", 1)]
)
def test_a_listener_that_fails_costs_no_step(tmp_path, plan, kind, first):
    def listener(event):
        if event.kind == kind and event.payload["step"] >= first:
            raise ConnectionError("the tracker is gone")

    plan, parts = vivace.Plan.from_dict(plan), tmp_path / "parts"
    rates = torch.optim.lr_scheduler.LinearLR
    job = job_of(scheduler=lambda optimizer: rates(optimizer, total_iters=9), scheduler_every="step")
    with pytest.raises(ConnectionError, match="the tracker is gone") as failed:
        vivace.train(job, plan, out=parts, on_event=listener)
    assert "was kept" in failed.value.__notes__[0]
    last = max(int(path.name.removeprefix("step_")) for path in (parts / "checkpoints").glob("step_*"))
    assert last >= first
    assert vivace.train(job, plan, out=parts, resume=True).resumed_from_step == last
    vivace.train(job, plan, out=tmp_path / "whole")
    weights = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts")]
    assert torch.equal(weights[0]["weight"], weights[1]["weight"])


def test_a_warning_is_shown_once_however_often_a_schedule_steps(tmp_path):
    code = """
        import sys, warnings, torch, vivace
        def loss(model, batch):
            warnings.warn("look here")
            return model(batch).mean()
        job = vivace.Job(
            model=lambda: torch.nn.Linear(2, 1), data=lambda: [torch.ones(2, 2)] * 20, loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), scheduler_every="step",
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))
        vivace.train(job, out=sys.argv[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("look here") in (1, 2)  # before the first update of a schedule, and after it


OWN_FILE = """
import torch, vivace
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((2,), float(index))

def begun(worker): ...
def together(rows): return torch.stack(rows)

def data():
    return DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context={method!r},
                      collate_fn=together, worker_init_fn=begun)

job = vivace.Job(
    model=lambda: torch.nn.Linear(2, 1), data=data, validation=data,
    loss=lambda model, batch: model(batch).pow(2).mean(),
    metric=lambda model, batches: -float(sum(model(batch).sum() for batch in batches)),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_know_the_jobs_file(tmp_path, method):
    (tmp_path / "own file.py").write_text(OWN_FILE.format(method=method))
    command = [sys.executable, "-m", "vivace", "train", "own file.py:job", "--out", "run", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"steps": 2' in done.stdout
    assert not [name for name in os.environ if name.startswith("vivace_job_") and "own_file" in name]


def test_only_what_could_not_be_held_is_named():
    assert unstorable({"a": torch.ones(2), "b": [1, {"c": numpy.float32(1)}]}).startswith("'c' is a float32")
    assert unstorable({"a": torch.ones(2), "b": (1, "text", None)}) == ""


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware, with one list of groups for itself and the optimizer inside."""

    def __init__(self, parameters, base, **settings):
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    def step(self, closure):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        with torch.enable_grad():
            closure()
        for weight in weights:
            self.state[weight]["old"] = weight.detach().clone()
            weight.data.add_(weight.grad.sign(), alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            loss = closure()
        for weight in weights:
            weight.data = self.state[weight]["old"]
        self.base.step()
        return loss

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


class Around(torch.optim.Optimizer):
    """Steps by others, and has their groups, their state, both or neither."""

    def __init__(self, parameters, groups=True, state=False, kind=torch.optim.SGD, name="inner"):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        inner = kind(self.param_groups if groups else parameters, lr=0.1, momentum=0.9)
        self.name, self.state = name, inner.state if state else self.state
        setattr(self, name, [inner])

    def step(self, closure=None):
        getattr(self, self.name)[0].step()


class Walking(torch.optim.Optimizer):
    """Walks through what it has made of its groups and its state as it loaded them."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 0.1})
        self._prepare()

    def _prepare(self):
        self.walk = [(group, p, self.state[p]) for group in self.param_groups for p in group["params"]]

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._prepare()

    @torch.no_grad()
    def step(self, closure=None):
        for group, weight, state in self.walk:
            momentum = state.setdefault("momentum", torch.zeros_like(weight))
            weight.add_(momentum.mul_(0.9).add_(weight.grad), alpha=-group["lr"])


class Warming(torch.optim.SGD):
    """Warms up by a count of its own steps."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * min(self.count, 10)
        super().step(closure)


class Making(Around):
    """Makes the optimizer inside in its first step."""

    def __init__(self, parameters, momentum=0.9, shares=False):
        super().__init__(parameters, groups=False)
        self.inner, self.momentum, self.shares = [], momentum, shares

    def step(self, closure=None):
        if not self.inner:
            self.inner = [torch.optim.SGD(self.param_groups, lr=0.1, momentum=self.momentum)]
            self.inner[0].state = self.state if self.shares else self.inner[0].state
        super().step()


def by_closure(model, optimizer, batch):
    """A step of the first of several optimizers."""

    def closure():
        optimizer[0].zero_grad()
        loss = square(model, batch)
        loss.backward()
        return loss

    return optimizer[0].step(closure)


def listed(make):
    """A job's own step with the optimizers that `make` returns, and a schedule of the first."""
    return {"loss": None, "step": by_closure, "optimizer": lambda model: make(model.parameters())}


@pytest.mark.parametrize(
    "fields",
    [
        listed(lambda weights: [Sharp(weights, torch.optim.SGD, lr=0.1, momentum=0.9)]),
        listed(lambda weights: [one := Sharp(weights, torch.optim.Adam, lr=0.1), one.base]),
        listed(lambda weights: [torch.optim.LBFGS(weights, lr=0.1, max_iter=3, history_size=4)]),
        listed(lambda weights: [torch.optim.LBFGS(weights, max_iter=3, line_search_fn="strong_wolfe")]),
        {"optimizer": lambda model: Walking(model.parameters())},
        *(
            {"optimizer": lambda model, of=of: Around(model.parameters(), **of)}
            for of in (
                {},
                {"groups": False},
                {"state": True},
                {"groups": False, "state": True},
                {"kind": Warming},
            )
        ),
    ],
)
def test_what_an_optimizer_holds_goes_on_also_in_another_one_inside(tmp_path, fields):
    def schedule(optimizer):
        first = optimizer[0] if isinstance(optimizer, list) else optimizer
        return torch.optim.lr_scheduler.StepLR(first, 3, 0.8)

    same, notices = whole_and_in_parts(
        job_of(scheduler=schedule, scheduler_every="step", **fields), tmp_path, checkpoint_every_steps=4
    )
    assert same
    assert notices == ()


def test_an_optimizer_that_another_one_makes_in_a_step_begins_anew_and_is_named(tmp_path):
    same, notices = whole_and_in_parts(job_of(optimizer=lambda model: Making(model.parameters())), tmp_path)
    assert not same
    assert "begin anew ('optimizer.inner.0')" in notices[0]


@pytest.mark.parametrize("settings", [{"momentum": 0}, {"shares": True}])
def test_one_without_a_state_of_its_own_is_not_named(tmp_path, settings):
    job = job_of(optimizer=lambda model: Making(model.parameters(), **settings))
    assert whole_and_in_parts(job, tmp_path) == (True, ())


def test_one_that_had_another_name_begins_anew_and_is_named(tmp_path):
    vivace.train(job_of(optimizer=lambda model: Around(model.parameters())), out=tmp_path, max_steps=4)
    job = job_of(optimizer=lambda model: Around(model.parameters(), name="others"))
    run = vivace.train(job, out=tmp_path, resume=True, changed="ok")
    assert "begin anew ('optimizer.others.0')" in run.notices[0], run.notices
