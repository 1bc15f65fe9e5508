"""Scripts that keep, draw and write things of their own: copies of a step leave them as they are alone."""

import io
import os
import queue
import random
import sys
import threading
import time
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vivace.live import course
from vivace.plan import Plan
from vivace.tensors import outside

STEPS = 40


@pytest.fixture
def nothing_acts(led, monkeypatch):
    """``nothing_acts(train)``: a step is kept and copies of it run, and that is all."""
    monkeypatch.setattr(course, "additions", lambda *_: [])

    def run(train):
        seeded()
        alone = train()
        seeded()
        watching, result, _ = led(train)
        assert not watching.problems
        return watching, result, alone

    return run


@pytest.fixture
def tried(monkeypatch):
    """``tried(name)``: a technique that alone is tried."""

    def choose(name, **settings):
        found = list(Plan.from_dict({name: settings}).techniques)
        monkeypatch.setattr(course, "additions", lambda *_: [found])

    return choose


def seeded():
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def fit(model, batches=None, steps=STEPS, optimizer=torch.optim.SGD):
    """Train, and return all losses."""
    stepping, losses = optimizer(model.parameters(), lr=0.05), []
    if batches is None:
        batches = ((torch.randn(6, 8), torch.arange(6) % 3) for _ in range(steps))
    for inputs, labels in batches:
        stepping.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses


def pictures(model, loss_of, steps=STEPS):
    stepping = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        stepping.zero_grad()
        loss_of(model(torch.randn(4, 3, 8, 8))).backward()
        stepping.step()


def test_what_a_model_returns_can_still_be_viewed_in_another_shape(led, tried):
    """As a dice loss does; the maps inside of the model lie in channels-last order."""
    tried("channels_last", weights=False)
    strides = set()

    def train():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))

        def loss_of(outputs):
            strides.add(outputs.stride())
            return outputs.view(len(outputs), -1).square().mean()

        pictures(model, loss_of, 60)

    _, _, told = led(train, "channels_last")
    assert "channels_last" in told["plan"]
    assert len(strides) == 1


class Keeping(nn.Module):
    """Keeps what it last computed, or writes it into its batch."""

    def __init__(self, where):
        super().__init__()
        self.where, self.layers = where, nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.kept = []

    def forward(self, inputs, notes):
        maps = self.layers(inputs)
        if self.where == "attribute":
            self.last = maps.detach()
        elif self.where == "list":
            self.kept = [maps.detach()]
        else:
            notes["maps"] = maps.detach()
        return maps.mean((2, 3))


@pytest.mark.parametrize("where", ["attribute", "list", "batch"])
@pytest.mark.parametrize("name", ["bf16_autocast", "channels_last"])
def test_what_a_model_leaves_for_its_script_keeps_precision_and_order(led, tried, where, name):
    tried(name, **({"weights": False} if name == "channels_last" else {}))

    def train():
        model = Keeping(where)
        stepping = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(60):
            notes = {}
            stepping.zero_grad()
            model(torch.randn(4, 3, 8, 8), notes).square().mean().backward()
            stepping.step()
            found = {"attribute": lambda: model.last, "list": lambda: model.kept[0]}
            maps = found.get(where, lambda: notes["maps"])()  # noqa: B023
            maps.view(-1).numpy()

    watching, _, told = led(train, name)
    assert not told["plan"]
    assert "its model leaves" in watching.conductor.course.tried[-1]["verdict"]["reason"]


class Drawing(Sampler):
    """Draws its next batches to say how many they are."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        rows = list(range(24))
        random.shuffle(rows)
        yield from rows

    def __len__(self):
        return sum(1 for _ in self)


def test_a_sampler_of_the_scripts_own_is_not_asked_how_long_it_is(nothing_acts):
    def train():
        data, sampler = TensorDataset(torch.randn(24, 8), torch.arange(24) % 3), Drawing()
        loader, model = DataLoader(data, 4, sampler=sampler), perceptron()
        return [fit(model, loader) for _ in range(4)], sampler.passes, random.random()

    _, mine, theirs = nothing_acts(train)
    assert mine == theirs


ARRAY, LONG, SLOTS = numpy.zeros(2), [], None
ELSEWHERE = types.ModuleType("elsewhere")
TEACHER = nn.BatchNorm1d(8)


class Slotted:
    __slots__ = ("calls",)


class Sign(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, inputs):
        Sign.calls += 1
        return inputs.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        Counting.calls += 1
        return super().step(closure)


class Noting(nn.Module):
    """Notes each call in places outside of itself."""

    def __init__(self):
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs):
        ARRAY[0] += 1
        LONG.append(0)
        SLOTS.calls += 1
        ELSEWHERE.calls += ELSEWHERE.stream.integers(5)
        with torch.no_grad():
            inputs = TEACHER(inputs)
        return Sign.apply(self.layers(inputs))


def test_whatever_the_code_of_a_model_notes_holds_each_call_once(nothing_acts, monkeypatch):
    here = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "elsewhere", ELSEWHERE)

    def train():
        here.TEACHER, here.SLOTS = nn.BatchNorm1d(8), Slotted()
        ARRAY[:], LONG[:], SLOTS.calls = 0, [0] * 2 * outside.MOST_ENTRIES, 0
        ELSEWHERE.calls, ELSEWHERE.stream = 0, numpy.random.default_rng(0)
        Sign.calls = Counting.calls = 0
        losses = fit(Noting(), optimizer=Counting)
        noted = float(ARRAY[0]), len(LONG), SLOTS.calls, ELSEWHERE.calls, Sign.calls, Counting.calls
        return losses, noted, TEACHER.running_mean.tolist(), int(TEACHER.num_batches_tracked)

    _, mine, theirs = nothing_acts(train)
    assert mine == theirs


class Run:
    """As wandb's, whose `log` the module holds bound to a run."""

    def __init__(self):
        self.sent = []

    def log(self, data):
        self._log(data=data)

    def _log(self, data):
        self.sent.append(data)


def test_what_a_model_sends_to_wandb_is_sent_once(nothing_acts, monkeypatch):
    wandb, runs = types.ModuleType("wandb"), types.ModuleType("wandb.sdk.wandb_run")
    runs.Run = Run
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", runs)

    class Sending(nn.Linear):
        def forward(self, inputs):
            wandb.log({"mean": 0.0})
            return super().forward(inputs)

    def train():
        run = Run()
        wandb.log = run.log
        fit(Sending(8, 3))
        return len(run.sent)

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs == STEPS
    assert not watching.rest


BACKBONE = nn.Linear(8, 8)


class Head(nn.Module):
    """Uses weights that are no part of it."""

    def __init__(self):
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs):
        return self.layers(BACKBONE(inputs))


def test_weights_beside_a_model_get_no_gradients_of_copies(nothing_acts):
    here = sys.modules[__name__]

    def train():
        here.BACKBONE = nn.Linear(8, 8)
        model, found = Head(), []
        stepping = torch.optim.SGD([*model.parameters(), *BACKBONE.parameters()], lr=0.05)
        for _ in range(STEPS):
            model(torch.randn(6, 8)).square().mean().backward()
            stepping.step()
            found.append(BACKBONE.weight.grad.sum().item())
            stepping.zero_grad()
        return found

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert watching.rest == "its model uses weights that are no part of it"


class Holding(nn.Module):
    """Calls its own parts through a function in a container."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm, self.calls = perceptron(), nn.BatchNorm1d(8, affine=False), 0
        self.before = {"norm": lambda inputs: self.normed(inputs)}

    def normed(self, inputs):
        self.calls += 1
        return self.norm(inputs)

    def forward(self, inputs):
        return self.layers(self.before["norm"](inputs))


def test_no_copy_runs_the_scripts_own_parts(led, tried):
    tried("fused_optimizer")

    def train():
        seeded()
        model = Holding()
        fit(model)
        return model.calls, int(model.norm.num_batches_tracked), model.norm.running_mean.tolist()

    alone = train()
    watching, mine, _ = led(train)
    assert not watching.problems
    assert mine == alone
    assert "leaves 'norm.running_mean' to the original" in watching.rest


class Single(nn.Linear):
    """There is one of it."""

    def __deepcopy__(self, memo):
        return self


class Ending(nn.Linear):
    ended = 0

    def __del__(self):
        Ending.ended += 1


@pytest.mark.parametrize(("kind", "why"), [(Single, "shares weights"), (Ending, "__del__")])
def test_a_model_of_which_a_copy_is_none_is_not_copied(nothing_acts, kind, why):
    def train():
        Ending.ended = 0
        model = nn.Sequential(kind(8, 3))
        losses, grads = fit(model), model[0].weight.grad.tolist()
        return losses, grads, Ending.ended

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert why in watching.rest


def test_hooks_of_every_module_hear_of_no_copy(nothing_acts):
    def train():
        heard = []
        handle = nn.modules.module.register_module_forward_hook(lambda *_: heard.append(1))
        losses = fit(perceptron())
        handle.remove()
        return losses, len(heard)

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert "hooks" in watching.rest


class Adapted(nn.Module):
    """Frozen but for an adapter, and checkpointed: what the embedding returns must ask for gradients."""

    def __init__(self):
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.requires_grad_(False)
        self.adapter, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def layer(self, states):
        return (self.frozen(states) + self.adapter(states)).tanh()

    def forward(self, tokens):
        return self.head(checkpoint(self.layer, self.embedding(tokens), use_reentrant=True).mean(1))


def test_a_hook_that_reaches_only_what_it_is_given_may_run_in_copies(nothing_acts):
    def asks_for_gradients(module, inputs, outputs):
        outputs.requires_grad_(True)

    def train():
        model = Adapted()
        model.embedding.register_forward_hook(asks_for_gradients)
        batches = [(torch.randint(9, (6, 5)), torch.arange(6) % 3) for _ in range(STEPS)]
        return fit(model, batches), model.adapter.weight.tolist()

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert not watching.rest


def keeping(heard):
    return lambda *_: heard.append(1)


@pytest.mark.parametrize(
    "hook",
    [
        lambda *_: os.getpid() and None,
        lambda *_, heard=[]: heard.append(1),
        lambda module, _, outputs: module.register_buffer("heard", outputs.detach(), persistent=False),
        lambda *given: given[0].register_buffer("heard", given[2].detach(), persistent=False),
        lambda *_: [lambda: os.getpid() and None][0](),
        keeping([]),
        types.MethodType(lambda *_: None, []),
    ],
)
def test_hooks_that_may_reach_more_run_in_no_copy(nothing_acts, hook):
    def train():
        model = perceptron()
        model[0].register_forward_hook(hook)
        return fit(model)

    assert "hooks" in nothing_acts(train)[0].rest


def test_what_sees_every_operator_sees_none_of_copies(nothing_acts):
    def train():
        with FlopCounterMode(display=False) as counter:
            fit(perceptron())
        return counter.get_total_flops()

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert "that would see copies" in watching.left_alone


FILE = io.StringIO()


QUEUE = torch.zeros(outside.MOST_NUMBERS + 1)


class Writing(nn.Module):
    def __init__(self, path=None):
        super().__init__()
        self.path, self.layers = path, perceptron()

    def forward(self, inputs):
        if self.path == "":
            QUEUE[0] += 1
            return self.layers(inputs)
        if self.path is None:
            FILE.write("a line\n")
        else:
            with open(self.path, "a") as file:
                file.write("a line\n")
        return self.layers(inputs)


def test_no_copy_writes_what_is_too_large_to_be_put_back(nothing_acts):
    def train():
        QUEUE.zero_()
        return fit(Writing("")), QUEUE[0].item()

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert "large tensor" in watching.rest


@pytest.mark.parametrize("is_open", [True, False])
def test_no_copy_writes_a_file(nothing_acts, tmp_path, is_open):
    here = sys.modules[__name__]

    def train():
        here.FILE = io.StringIO()
        path = tmp_path / "notes.txt"
        path.write_text("")
        losses = fit(Writing(None if is_open else path))
        return losses, FILE.getvalue() + path.read_text()

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert "file" in watching.rest


@pytest.mark.parametrize("draw", [numpy.random.rand, random.random, lambda: torch.rand(()).item()])
def test_what_another_thread_draws_is_drawn_once(nothing_acts, draw):
    """Such as one that makes batches: while copies run it goes on."""

    def train():
        go, made, once = threading.Semaphore(0), queue.Queue(), threading.Event()

        def make():
            for _ in range(STEPS):
                go.acquire()
                made.put(draw())

        class Model(nn.Linear):
            def forward(self, inputs):
                if self is not model and not once.is_set():
                    once.set()
                elif self is not model:
                    before = made.qsize()
                    go.release()
                    while thread.is_alive() and made.qsize() == before:
                        time.sleep(1e-4)
                return super().forward(inputs)

        thread = threading.Thread(target=make)
        thread.start()
        model, found = Model(8, 3), []
        stepping = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(STEPS):
            if made.empty():
                go.release()
            found.append(made.get())
            stepping.zero_grad()
            model(torch.full((4, 8), found[-1])).square().mean().backward()
            stepping.step()
        thread.join()
        return found

    watching, mine, theirs = nothing_acts(train)
    assert mine == theirs
    assert not watching.rest


def test_a_training_that_begins_anew_early_is_led(led):
    """As after a search for a learning rate, or with the next fold."""

    def train():
        fit(perceptron(), steps=2)
        fit(perceptron(), steps=4)
        fit(perceptron(), steps=300, optimizer=torch.optim.Adam)

    watching, _, told = led(train, "fused_optimizer")
    assert list(told["plan"]) == ["fused_optimizer"]
    assert watching.num_steps > 200


def test_a_forked_process_updates_as_the_script_says(led):
    def train():
        model, codes = perceptron(), []
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(200):
            if optimizer.param_groups[0]["fused"] and not codes:
                child = os.fork()
                if not child:
                    os._exit(optimizer.param_groups[0]["fused"] is not None)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
        return codes

    watching, codes, _ = led(train, "fused_optimizer", plan={"fused_optimizer": {}})
    assert not watching.problems
    assert codes == [0]


def test_what_a_script_calls_between_its_steps_is_torchs_own(led):
    """Such as the log_softmax of a teacher in half precision."""

    def train():
        model, kinds = perceptron(), set()

        def batches():
            for _ in range(100):
                yield torch.randn(6, 8), torch.arange(6) % 3
                kinds.add(F.log_softmax(torch.zeros(2, 3, dtype=torch.bfloat16), -1).dtype)

        fit(model, batches())
        return kinds

    _, kinds, told = led(train, "bf16_autocast", plan={"bf16_autocast": {}})
    assert list(told["plan"]) == ["bf16_autocast"]
    assert kinds == {torch.bfloat16}
