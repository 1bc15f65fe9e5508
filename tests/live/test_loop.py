"""Loops that are led: what is recognised, adopted and taken back, and what is left alone."""

import collections
import copy
import dataclasses
import gc
import json
import logging
import math
import os
import random
import sys
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vivace.live import candidates, conductor, course, kept, spending
from vivace.live import loop as loop_module
from vivace.live.conductor import Conductor
from vivace.live.course import Course
from vivace.live.ending import tell
from vivace.live.errand import Errand
from vivace.live.hosted import Hosted
from vivace.live.kept import Kept, KeptCall
from vivace.live.loop import Loop
from vivace.live.proof import Proof
from vivace.machine import Device, Machine
from vivace.plan import Plan
from vivace.technique import Card, Numerics, Seam, Stage, Technique
from vivace.technique.registry import find


def same_weights(mine, theirs):
    pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Slow(nn.Module):
    """Takes long, by the tests' clock, unless something tells it not to."""

    in_a_hurry = False
    turned: ClassVar[type]

    def forward(self, inputs):
        if self.training:
            Slow.turned.current.now += 0.002 if Slow.in_a_hurry else 0.02
        return inputs


@dataclasses.dataclass(frozen=True)
class Hurry(Technique):
    """Makes `Slow` quick, and nothing else; with `wrong` also the model's outputs larger."""

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL, numerics=Numerics.ROUNDING, summary="", source="", unit_roundoff=2.0**-24
    )
    name: ClassVar[str] = "hurry"

    wrong: float = 0.0
    fails_after: int = 10**9

    def apply(self, build):
        calls = 0

        def quick(following, batch):
            nonlocal calls
            calls += 1
            if calls > self.fails_after:
                raise ValueError("an operator that this layout has no kernel for")
            Slow.in_a_hurry = True
            try:
                return following(batch) * (1 + self.wrong)
            finally:
                Slow.in_a_hurry = False

        build.wrap(Seam.STEP, quick)


def train(steps=60, slow=True, seed=0):
    """A perceptron that draws random numbers, with a clipped gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(Slow() if slow else nn.Identity(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    model.extend([nn.Dropout(0.2), nn.Linear(16, 3)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.fixture
def watched(tmp_path, monkeypatch, one_thread, turned):
    """``watched(train)`` trains under `run` in this process; returns what `train` returned, and the loop."""
    monkeypatch.setattr(spending, "PATIENCE", 1e-9)
    monkeypatch.setattr(spending, "PAYS", 0.0)
    monkeypatch.setattr(spending, "SHARE", 1e9)
    monkeypatch.setattr(loop_module, "SMALLEST_STEP_SECONDS", 0.0)
    monkeypatch.setattr(candidates, "FEWEST_FAULTS", 0)

    Slow.turned = turned

    def run(train, plan=None):
        loop = Loop(
            Errand(str(tmp_path), "runs/run", "python train.py", plan), turned.current.clock, tell=tell
        )
        loop.install()
        try:
            return train(), loop
        finally:
            loop.finish()

    return run


@pytest.fixture
def only(monkeypatch):
    """``only(technique, ...)``: nothing else is tried."""

    def choose(*techniques):
        monkeypatch.setattr(course, "additions", lambda *_: [[technique] for technique in techniques])

    return choose


def document(tmp_path):
    return json.loads((tmp_path / "run.json").read_text())


def test_what_is_faster_and_the_same_is_adopted_and_watched(
    watched, only, register, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(course, "WATCH_STEPS", 10)
    register(Hurry)
    only(Hurry())
    _, loop = watched(lambda: train(120))
    told = document(tmp_path)
    assert told["outcome"] == "faster"
    assert told["ratio"]["low"] > 1.0
    assert told["plan"] == {"hurry": {}}
    assert told["watched"] >= 2
    assert told["worst"] < 8.0
    assert not loop.problems
    assert (tmp_path / "plan.toml").is_file()
    said = capsys.readouterr().err
    assert "vivace: Same model: yes. Worst of" in said
    assert "vivace run --plan runs/run/plan.toml -- python train.py" in said


def test_a_training_of_short_epochs_is_timed_too(watched, only, register, tmp_path, monkeypatch):
    monkeypatch.setattr(course, "SEGMENT_SECONDS", 0.02)
    register(Hurry)
    only(Hurry())

    def train_epochs():
        torch.manual_seed(0)
        model = nn.Sequential(Slow(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
        for _ in range(30):
            for inputs, labels in DataLoader(data, batch_size=4):  # three steps a pass
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    watched(train_epochs)
    assert document(tmp_path)["outcome"] == "faster"


def test_a_wrong_candidate_never_acts(watched, only, register, tmp_path):
    register(Hurry)
    only(Hurry(wrong=0.01))
    mine, loop = watched(lambda: train(30))
    assert document(tmp_path)["outcome"] == "not_faster"
    assert loop.conductor.course.tried[0]["answer"] == "not_kept"
    assert same_weights(mine, train(30))
    assert not (tmp_path / "plan.toml").exists()


def test_a_plan_that_promises_equal_bits_and_changes_some_never_acts(watched, only, register, tmp_path):
    promised = dataclasses.replace(Hurry.card, numerics=Numerics.EXACT, unit_roundoff=0.0)
    technique = dataclasses.dataclass(frozen=True)(type("Promised", (Hurry,), {"card": promised}))
    register(technique)
    only(technique(wrong=2e-6))
    mine, loop = watched(lambda: train(30))
    (tried,) = loop.conductor.course.tried
    assert tried["verdict"]["reason"] == "it promises the same bits, and its step has others"
    assert same_weights(mine, train(30))


@pytest.mark.parametrize(
    ("off", "times", "kept"), [(1, 1.5, True), (2, 1.5, False), (3, 1.5, False), (1, math.nan, False)]
)
def test_what_one_rounding_turned_over_is_no_fault_and_what_each_does_is_one(
    watched, only, register, tmp_path, monkeypatch, off, times, kept
):
    """Of the plan's own step and two that only round otherwise so many have a gradient that is off."""
    replay, left = Proof.replay, [1] * off

    def replaying(self, plan, *arguments, **keywords):
        found = replay(self, plan, *arguments, **keywords)
        if plan.techniques and left:
            left.pop()
            found.outcome.gradients["1.weight"].mul_(times)
        return found

    monkeypatch.setattr(Proof, "replay", replaying)
    register(Hurry)
    only(Hurry())
    _, loop = watched(lambda: train(120))
    assert not left
    assert (loop.conductor.course.tried[0]["answer"] != "not_kept") is kept
    assert (document(tmp_path)["outcome"] == "faster") is kept


def test_a_model_that_fails_where_it_is_rounded_refuses_the_plan_alone(
    watched, only, register, tmp_path, monkeypatch
):
    replay = Proof.replay

    def replaying(self, plan, noise=None, **keywords):
        if noise is not None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return replay(self, plan, noise, **keywords)

    monkeypatch.setattr(Proof, "replay", replaying)
    register(Hurry)
    only(Hurry(wrong=0.01), Hurry())
    _, loop = watched(lambda: train(120))
    assert not loop.problems
    answers = {entry["plan"]["hurry"].get("wrong", 0.0): entry for entry in loop.conductor.course.tried}
    assert "the memory does not hold" in answers[0.01]["verdict"]["reason"]
    assert document(tmp_path)["outcome"] == "faster"


def test_a_given_plan_is_proven_before_it_acts(watched, register, tmp_path):
    register(Hurry)
    watched(lambda: train(100), plan={"hurry": {}})
    assert document(tmp_path)["outcome"] == "faster"
    mine, _ = watched(lambda: train(30), plan={"hurry": {"wrong": 0.01}})
    told = document(tmp_path)
    assert "the plan is not kept here" in told["reason"]
    assert same_weights(mine, train(30))


def test_a_given_plan_that_would_move_weights_is_told_what_to_write(watched, tmp_path):
    def convolves():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(3, (4,))).backward()
            optimizer.step()

    watched(convolves, plan={"channels_last": {}})
    assert "act on 'place': set weights = false" in document(tmp_path)["reason"]


def test_steps_under_a_plan_on_which_nothing_was_decided_are_counted(watched, register, tmp_path, capsys):
    register(Hurry)
    hurried = collections.Counter()

    class Counted(Slow):
        def forward(self, inputs):
            hurried[self] += Slow.in_a_hurry  # a copy is another
            return super().forward(inputs)

    def ends_early():
        model = nn.Sequential(Counted(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while hurried[model[0]] < 5:
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))).backward()
            optimizer.step()

    watched(ends_early, plan={"hurry": {}})
    told = document(tmp_path)
    assert (told["plan"], told["inexact_steps"], told["inexact"]) == ({}, 5, ["hurry"])
    said = " ".join(line.removeprefix("vivace: ") for line in capsys.readouterr().err.splitlines())
    assert "was not made faster: it ended before anything was decided" in said
    assert "Results may differ by rounding: 5 steps ran under hurry." in said
    assert "as it is:" not in said


def test_a_plan_that_becomes_slower_is_taken_back(watched, only, register, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(course, "WATCH_STEPS", 10)
    monkeypatch.setattr(course, "WATCHED_PAIRS", 3)
    register(Hurry)
    only(Hurry())
    wall = conductor.Timing

    def slower(seconds, cpu):  # once it acts, its segments are timed as slow ones
        late = any(entry["answer"] == "faster" for entry in loops[-1].conductor.course.tried)
        acts = loops[-1].conductor._acting is not None
        return wall(1.0, 1.0) if late and acts else wall(seconds, cpu)

    loops = []
    original = Conductor.__init__

    def noted(self, loop, *others):
        loops.append(loop)
        loop.conductor = self
        original(self, loop, *others)

    monkeypatch.setattr(Conductor, "__init__", noted)
    monkeypatch.setattr(conductor, "Timing", slower)
    watched(lambda: train(400))
    told = document(tmp_path)
    assert told["outcome"] == "taken_back"
    assert "it became slower" in told["reason"]
    assert "taken back" in capsys.readouterr().err
    assert not (tmp_path / "plan.toml").exists()


def test_a_plan_whose_model_fails_later_is_dropped_and_the_step_goes_on(watched, only, register, tmp_path):
    register(Hurry)
    only(Hurry(fails_after=30))
    _, loop = watched(lambda: train(120))
    assert "failed under" in document(tmp_path)["reason"]
    assert loop.num_steps < 120
    assert loop.guard.off


class Drawing(nn.Module):
    """Draws from every stream; under a plan it fails then, from its 30th call on."""

    calls = 0

    def forward(self, inputs):
        noise = random.random() + numpy.random.rand() + torch.rand(())
        self.calls += 1
        if Slow.in_a_hurry and self.calls > 30:
            raise ValueError("an operator that this layout has no kernel for")
        return inputs * (1 + 0.1 * noise)


def test_a_call_that_fails_under_a_plan_is_taken_again_from_what_it_was(watched, only, register, tmp_path):
    """Random numbers, statistics and counters are those of the script alone."""
    register(Hurry)
    only(Hurry())

    def noisy():
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        model = nn.Sequential(Slow(), nn.Linear(8, 16), nn.BatchNorm1d(16), Drawing(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(120):
            optimizer.zero_grad()
            model(torch.randn(12, 8)).square().mean().backward()
            optimizer.step()
        return model

    mine, _ = watched(noisy)
    assert "failed under hurry" in document(tmp_path)["reason"]
    assert same_weights(mine, noisy())
    assert mine[3].calls == 120


class Strict(nn.Linear):
    """Refuses a batch, once, in words of its own."""

    def forward(self, inputs):
        if len(inputs) == 3:
            raise ValueError("three is no batch")
        return super().forward(inputs)


def test_what_a_model_raises_itself_is_as_it_was(watched, register):
    register(Hurry)

    def refused():
        model = nn.Sequential(Slow(), Strict(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        try:
            model(torch.randn(3, 4))
        except ValueError as error:
            return error

    error, loop = watched(refused, {"hurry": {}})
    assert not loop.left_alone
    assert str(error) == "three is no batch"
    assert error.__context__ is None


def test_nothing_changes_where_only_exact_plans_may_act(watched, tmp_path):
    def exact():
        torch.use_deterministic_algorithms(True)
        try:
            return train(1200, slow=False), torch.rand(1)  # as many as the longest comparison takes
        finally:
            torch.use_deterministic_algorithms(False)

    (mine, drawn), loop = watched(exact)
    theirs, other = exact()
    assert same_weights(mine, theirs)
    assert torch.equal(drawn, other)
    tried = {name for entry in loop.conductor.course.tried for name in entry["plan"]}
    assert tried - {"vectorized_dropout"} == {"host_allocator"}, (
        loop.left_alone,
        loop.problems,
        loop.conductor.course.reason,
    )


def test_the_scripts_own_objects_are_as_they_were(watched, register, only, tmp_path):
    register(Hurry)
    only(Hurry())
    before = (
        nn.Module.__call__,
        torch.autograd.backward,
        torch.compile,
        nn.Sequential.__dict__.get("__call__"),
    )
    model, _ = watched(lambda: train(60))
    after = nn.Module.__call__, torch.autograd.backward, torch.compile, nn.Sequential.__dict__.get("__call__")
    assert before == after
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(p.dtype == torch.float32 for p in model.parameters())


def adversarial():
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
            models[1](models[0](torch.randn(4, 4))).mean().backward()
            optimizer.step()
    return models[0]


def linear(step, optimizer=torch.optim.SGD, make=lambda: nn.Linear(4, 2), steps=8):
    torch.manual_seed(0)
    model = make()
    stepping = optimizer(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, stepping)
    return model


def autocasting(model, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 4)).float().mean()
    loss.backward()
    optimizer.step()


def penalized(model, optimizer):
    optimizer.zero_grad()
    inputs = torch.randn(4, 4, requires_grad=True)
    loss = model(inputs).square().mean()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().mean()).backward()
    optimizer.step()


def twice(model, optimizer):
    optimizer.zero_grad()
    (model(torch.randn(4, 4)) - model(torch.randn(4, 4))).square().mean().backward()
    optimizer.step()


def plain(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def scaling(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 4)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def hooked():
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: model and None)
    return model


class Printing(nn.Linear):
    stream = "stdout"

    def forward(self, inputs):
        print("forward", file=getattr(sys, self.stream))
        return super().forward(inputs)


class Complaining(Printing):
    stream = "stderr"


def regularized(model, optimizer):
    optimizer.zero_grad()
    (model(torch.randn(4, 4)).square().mean() + model.weight.square().sum()).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (adversarial, "several models"),
        (lambda: linear(penalized), "differentiates gradients"),
        (lambda: linear(twice), "calls its model"),
        (lambda: linear(plain, torch.optim.LBFGS), "LBFGS"),
        (lambda: linear(plain, make=hooked), "hooks"),
        (lambda: linear(plain, make=lambda: nn.DataParallel(nn.Linear(4, 2))), "DataParallel"),
        (lambda: linear(plain, make=lambda: torch.jit.script(nn.Linear(4, 2))), "RecursiveScriptModule"),
        (lambda: linear(plain, make=lambda: Printing(4, 2), steps=30), "prints"),
        (lambda: linear(plain, make=lambda: Complaining(4, 2), steps=30), "prints"),
        (lambda: linear(regularized, steps=30), "other gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
def test_what_cannot_be_led_is_left_alone_with_a_sentence(watched, train, reason, capfd):
    mine, loop = watched(train)
    printed = capfd.readouterr()
    assert reason in loop.rest + loop.left_alone
    assert not loop.problems
    theirs = train()
    assert same_weights(mine, theirs)
    alone = capfd.readouterr()
    assert alone.out == printed.out
    assert alone.err.count("forward") == printed.err.count("forward")


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_of_ranks_that_are_left_alone_the_first_says_it(watched, monkeypatch, capfd, tmp_path, rank, times):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(
        loop_module, "why_left_alone", lambda seen, together: "several processes train one model together"
    )
    watched(train)
    assert capfd.readouterr().err.count("left as it is") == times
    assert (tmp_path / "run.json").exists() == bool(times)


class Remembering(nn.Linear):
    """Its outputs hang on what came before, which it keeps outside of itself, and it logs."""

    calls: ClassVar[list[int]] = []
    number = 0

    def forward(self, inputs):
        self.calls.append(1)
        Remembering.number += 1
        REMEMBERED["calls"] = REMEMBERED.get("calls", 0) + 1
        logging.getLogger("remembering").warning("call %d", self.number)
        noise = torch.rand((), generator=STREAM) + float(OTHER_STREAM.random())
        counted = len(self.calls) + REMEMBERED["calls"] + self.number
        return super().forward(inputs) * (noise + counted / 1000)


REMEMBERED: dict[str, int] = {}
STREAM, OTHER_STREAM = torch.Generator(), numpy.random.default_rng(0)


def test_what_a_model_keeps_outside_of_itself_goes_on_as_alone(watched, only, register, caplog):
    """Steps are repeated on copies, and none is counted, drawn or logged twice."""
    register(Hurry)
    only(Hurry())

    def remembering():
        Remembering.calls.clear()
        REMEMBERED.clear()
        caplog.clear()
        Remembering.number = 0
        STREAM.manual_seed(0)
        OTHER_STREAM.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
        model = linear(plain, make=lambda: nn.Sequential(Slow(), Remembering(4, 2)), steps=200)
        return model, len(Remembering.calls), Remembering.number, dict(REMEMBERED), caplog.messages[:]

    (mine, *counted), loop = watched(remembering)
    assert not loop.rest
    assert any("verdict" in entry for entry in loop.conductor.course.tried)
    theirs, *alone = remembering()
    assert counted == alone
    assert same_weights(mine, theirs)


def test_hooks_that_a_script_adds_later_run_in_its_own_calls_alone(watched, only, register, tmp_path):
    register(Hurry)
    only(Hurry())

    def hooking():
        torch.manual_seed(0)
        model, heard = nn.Sequential(Slow(), nn.Linear(4, 2)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(300):
            if step == 200:
                model[1].register_forward_hook(lambda *_: heard.append(Slow.in_a_hurry))
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        return heard

    heard, _ = watched(hooking)
    assert heard == [False] * 100
    assert "hooks" in document(tmp_path)["reason"]


def test_an_evaluation_in_training_mode_is_not_taken_for_the_step(watched, only, register, tmp_path):
    """Nothing comes back to what it returned: another step is kept."""
    register(Hurry)
    only(Hurry())

    def sloppy():
        torch.manual_seed(0)
        model, inputs = nn.Sequential(Slow(), nn.Linear(4, 2)), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(300):
            if step > 3 and step % 3:
                model(inputs).square().mean().item()
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()

    _, loop = watched(sloppy)
    assert not loop.rest
    assert any("verdict" in entry for entry in document(tmp_path)["tried"])


class NoBatch(Exception):
    """Of a script's own."""


CALLS = []


class Choosy(nn.BatchNorm1d):
    kind: type[Exception] = NoBatch

    def forward(self, inputs):
        normed = super().forward(inputs)
        CALLS.append(1)
        if float(inputs.detach().mean()) > 0.15:
            raise self.kind("not this one")
        return normed


@pytest.mark.parametrize("kind", [NoBatch, ValueError, RuntimeError])
def test_an_error_of_the_scripts_own_is_no_fault_of_the_plan(
    watched, only, register, tmp_path, monkeypatch, kind
):
    """The call is not made again either: statistics and lists that it adds to would hold its batch twice."""
    monkeypatch.setattr(Choosy, "kind", kind)
    CALLS.clear()
    register(Hurry)
    only(Hurry())

    def choosing():
        torch.manual_seed(0)
        model, left_out = nn.Sequential(Slow(), nn.Linear(4, 4), Choosy(4)), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(150):
            try:
                model(torch.randn(4, 4)).square().mean().backward()
            except kind:
                left_out += 1
                continue
            optimizer.step()
        return model, left_out

    (model, left_out), _ = watched(choosing)
    assert len(CALLS) == 150
    assert left_out > 5
    assert int(model[2].num_batches_tracked) == 150
    assert document(tmp_path)["outcome"] == "faster"


@pytest.mark.parametrize("how", ["model", "in place", "function"])
def test_what_a_script_compiles_is_left_alone_at_once(watched, how):
    """Nothing is compiled once more because it was looked at."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled():
        torch.compiler.reset()
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(inputs):
            return model(inputs).square().mean()

        if how == "model":
            model = torch.compile(model, backend=backend)
        elif how == "in place":
            model.compile(backend=backend)
        else:
            loss_of = torch.compile(loss_of, backend=backend)
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(torch.randn(4, 4)).backward()
            optimizer.step()

    _, loop = watched(compiled)
    subject = "functions of its own are" if how == "function" else "its model is"
    assert loop.rest == f"{subject} compiled by torch.compile"
    assert len(graphs) == 1


class Closed(nn.Module):
    """Runs its parts through functions that hold them, directly or in a list."""

    def __init__(self, in_list):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 3)
        norm, out = self.norm, [self.out] if in_list else self.out
        self.inner = lambda inputs, norm=norm: (out[0] if in_list else out)(norm(inputs))

    def forward(self, inputs):
        return self.inner(inputs * self.scale)


@pytest.mark.parametrize("in_list", [True, False])
def test_a_model_whose_functions_hold_its_parts(watched, only, in_list):
    """Where a copy cannot use its own parts it runs the original's, which is as it was; then nothing acts."""
    only()

    def train_closed():
        torch.manual_seed(0)
        model = Closed(in_list)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(40):
            F.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))).backward()
            optimizer.step()
            if step % 4 == 3:  # gradients of the steps between add up
                optimizer.zero_grad()
        return model

    alone = train_closed()
    model, loop = watched(train_closed)
    assert same_weights(model, alone)
    left = "its copy leaves 'out.weight' to the original"
    assert loop.rest.startswith(left) if in_list else not loop.rest


PLANTED = [
    (loop_module.Seen, "called"),
    (loop_module.Seen, "ends_step"),
    (loop_module.Loop, "_look"),
    (Conductor, "__init__"),
    (Conductor, "called"),
    (Conductor, "updated"),
    (Conductor, "_act"),
    (Conductor, "_answer"),
    (Course, "__init__"),
    (Course, "_search"),
    (Course, "_compare"),
    (Course, "_note"),
    (Course, "_watch"),
    (Kept, "__init__"),
    (KeptCall, "returned"),
    (KeptCall, "end"),
    (Proof, "replay"),
    (Proof, "judge"),
    (Hosted, "__init__"),
    (Hosted, "close"),
]


@pytest.mark.parametrize(("owner", "name"), PLANTED, ids=[f"{o.__name__}.{n}" for o, n in PLANTED])
def test_a_fault_of_ours_does_not_reach_the_script(watched, only, register, monkeypatch, owner, name, capsys):
    called = []

    def fails(*_, **__):
        called.append(name)
        raise ZeroDivisionError("planted")

    register(Hurry)
    only()
    monkeypatch.setattr(course, "WATCH_STEPS", 5)
    plan = {"hurry": {}} if name in ("_watch", "_compare", "_note", "judge", "close") else None
    monkeypatch.setattr(owner, name, fails)
    mine, _ = watched(lambda: train(120 if plan else 40), plan)
    assert called
    said = capsys.readouterr().err
    assert "planted" in said or "vivace: This run was left as it is" in said
    if plan is None:
        assert same_weights(mine, train(40))


def test_a_forked_process_trains_as_it_is(watched):
    def forked():
        model = train(2, slow=False)
        child = os.fork()
        if not child:
            off = loop_here.guard.off and loop_here._finished
            os._exit(0 if off else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return model

    import vivace.live.loop as module

    holder = module.Loop.install
    loop_here = None

    def install(self):
        nonlocal loop_here
        loop_here = self
        holder(self)

    module.Loop.install = install
    try:
        watched(forked)
    finally:
        module.Loop.install = holder


def test_gradients_accumulated_over_batches_are_one_step(watched, only, register, tmp_path):
    register(Hurry)
    only(Hurry())

    def accumulate():
        torch.manual_seed(0)
        model = nn.Sequential(Slow(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(120):
            for _ in range(2):
                (model(torch.randn(4, 4)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    _, loop = watched(accumulate)
    assert document(tmp_path)["outcome"] == "faster"
    assert loop.num_steps == 120


class Autoencoder(nn.Module):
    """Returns what it is made of beside what it makes, and one tensor twice."""

    def __init__(self):
        super().__init__()
        self.slow, self.encoder, self.decoder = Slow(), nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, inputs):
        mean, logarithm = self.encoder(self.slow(inputs)).chunk(2, dim=1)
        made = self.decoder(mean + torch.randn_like(mean) * (logarithm / 2).exp())
        return {"made": made, "mean": mean, "logarithm": logarithm, "again": made}


def test_outputs_that_are_made_of_each_other_count_once(watched, only):
    only(*Plan.from_dict({"bf16_autocast": {}}).techniques)

    def encode():
        torch.manual_seed(0)
        model = Autoencoder()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(120):
            inputs = torch.randn(16, 8)
            found = model(inputs)
            spread = (found["mean"] ** 2 + found["logarithm"].exp() - found["logarithm"]).sum()
            optimizer.zero_grad()
            (F.mse_loss(found["made"], inputs, reduction="sum") + spread).backward()
            optimizer.step()
        return model

    _, loop = watched(encode)
    assert not loop.left_alone
    assert loop.conductor.course.tried[0]["verdict"]["kept"]


def test_evaluation_between_steps_runs_as_it_is(watched, only):
    """A plan that acts on the optimizer too is opened and closed around each evaluation."""
    only(*Plan.from_dict({"fused_optimizer": {}}).techniques)
    calls = []

    def evaluate():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))).backward()
            optimizer.step()
            if step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(1, 8))
                calls.append(optimizer.param_groups[0]["fused"])
                model.train()
        return model

    _, loop = watched(evaluate, plan={"fused_optimizer": {}})
    assert not loop.left_alone
    assert not loop.problems
    assert not any(calls)


HEARD: list[int] = []


@dataclasses.dataclass(frozen=True)
class Shifting(Technique):
    """Notes calls of the first part of a model while it acts."""

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL, numerics=Numerics.ROUNDING, summary="", source="", unit_roundoff=2.0**-24
    )
    name: ClassVar[str] = "shifting"

    def apply(self, build):
        first = build.models[0][0]

        def forward(inputs):
            HEARD.append(1)
            return type(first).forward(first, inputs)

        first.forward = forward
        build.on_close(lambda: vars(first).pop("forward"))
        build.wrap(Seam.STEP, lambda following, batch: following(batch))


def test_a_model_that_is_set_to_evaluation_mode_is_as_the_script_left_it(watched, register):
    """Before it is called: parts of it may be, or it may be traced, scripted or saved."""
    register(Shifting)

    def evaluating():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(60):
            model.train()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            if step % 10 == 9:
                before = len(HEARD)
                model[0].eval()
                model.eval()
                model[0](torch.randn(4, 4))
                assert len(HEARD) == before

    HEARD.clear()
    watched(evaluating, {"shifting": {}})
    assert HEARD


def test_nothing_is_copied_where_the_memory_does_not_hold_it(watched, monkeypatch):
    """Else the system ends the script, unasked."""
    monkeypatch.setattr(kept, "free_memory", lambda: 2**20)
    monkeypatch.setattr(copy, "deepcopy", None)
    mine, loop = watched(lambda: train(20, slow=False))
    assert loop.left_alone == "the memory does not hold its model a second time"
    assert not loop.problems
    assert same_weights(mine, train(20, slow=False))


def test_a_short_script_pays_nothing(watched, monkeypatch, tmp_path):
    monkeypatch.setattr(spending, "PATIENCE", 1e9)
    monkeypatch.setattr(spending, "SHARE", 0.01)
    mine, loop = watched(lambda: train(20, slow=False))
    reason = document(tmp_path)["reason"]
    assert reason.startswith("its steps took ")
    assert " in all, and a search begins where at least " in reason
    assert loop.conductor is None
    assert same_weights(mine, train(20, slow=False))


def test_a_script_of_one_step_is_not_told_that_it_took_no_time(watched, tmp_path):
    watched(lambda: train(1, slow=False))
    assert document(tmp_path)["reason"] == "it ended after 1 step, before a step was timed"


@pytest.mark.parametrize("begins", [False, True])
def test_a_script_that_trains_many_models_holds_one_at_a_time(watched, monkeypatch, begins):
    """Whether or not a search began with the first of them."""
    if not begins:
        monkeypatch.setattr(spending, "PATIENCE", 1e9)
        monkeypatch.setattr(spending, "SHARE", 0.01)
    models = []

    def folds():
        for seed in range(3):
            models.append(weakref.ref(train(20, slow=False, seed=seed)[1].weight))
        gc.collect()
        return [model() for model in models]

    held, loop = watched(folds)
    assert held == [None] * 3
    assert (loop.conductor is not None) == begins
    assert not loop.problems


def test_a_model_whose_update_alone_is_led_is_let_go_too(watched):
    def folds():
        first = linear(penalized, steps=20)
        held = weakref.ref(first.weight)
        del first
        linear(penalized, steps=conductor.MOST_INTERRUPTED + 20)
        gc.collect()
        return held()

    held, loop = watched(folds)
    assert held is None
    assert loop.left_alone == "another optimizer began to step"
    assert not loop.problems


def test_a_seam_that_the_loop_does_not_have_is_refused(watched, only):
    only(*Plan.from_dict({"micro_batches": {"num": 2}}).techniques)
    _, loop = watched(lambda: train(20, slow=False))
    answer = loop.conductor.course.tried[0]["answer"]
    assert "no seam" in answer or "own step" in answer


def test_units_for_bfloat16_are_those_of_the_models_device():
    """A model may be on the processor of a machine with a GPU."""
    gpu, own = Device("cuda", "a card", 1), Device("cpu", "a processor", 1, ("amx_bf16",))
    for devices, tried in (((gpu, own), True), ((gpu, dataclasses.replace(own, features=())), False)):
        groups = candidates.additions(nn.Linear(2, 2), Machine(devices, 2, {}, {}))
        assert any(one.name == "bf16_autocast" for group in groups for one in group) == tried


def names_of(root, *processors, own=(), differentiated=()):
    devices = tuple(Device("cpu", name, 1, features) for name, features in processors)
    groups = candidates.additions(root, Machine(devices, 2, {}, {}), own, differentiated)
    return [[one.name for one in group] for group in groups]


def test_depthwise_gradients_are_tried_alone_and_beside_what_is_tried_without_them():
    root = nn.Sequential(nn.Conv2d(4, 4, 5, groups=4), nn.Conv2d(4, 8, 1))
    processor = ("a processor", ("avx512_bf16",))
    plain = names_of(nn.Conv2d(4, 8, 1), processor)
    found = names_of(root, processor)
    assert [group for group in plain if group not in found] == []
    assert [group for group in found if group not in plain] == [
        ["depthwise_gradients"],
        ["bf16_autocast", "depthwise_gradients"],
        ["channels_last", "bf16_autocast", "depthwise_gradients"],
    ]
    assert names_of(root, ("a processor", ()))[1:4] == [
        ["channels_last"],
        ["depthwise_gradients"],
        ["channels_last", "depthwise_gradients"],
    ]


def test_wide_windows_are_filtered_in_channels_last_order_where_no_units_multiply_bfloat16():
    root, filtering = nn.Conv2d(32, 32, 3), ["channels_last", "winograd"]
    plain = ("a processor", ("avx512_bf16",))
    assert [group for group in names_of(root, plain) if "winograd" in group] == [filtering]
    assert filtering in names_of(root, ("a processor", ()))
    assert filtering not in names_of(root, ("a processor", ("avx512_bf16", "amx_bf16")))
    for other in (nn.Conv2d(31, 32, 3), nn.Conv2d(32, 32, 3, stride=2), copy.deepcopy(root).to("meta")):
        assert filtering not in names_of(other, plain)
    assert names_of(root, plain, own={"bf16_autocast": ""}) == [
        ["host_allocator"],
        ["channels_last"],
        ["fused_optimizer"],
    ]
    assert ["winograd"] in names_of(root, plain, own={"channels_last": ""})
    assert not any("winograd" in group for group in names_of(root, plain, own={"winograd": ""}))


@pytest.mark.parametrize(("faster", "first"), [(1.01, "channels_last"), (1.1, "winograd")])
def test_of_groups_that_are_about_as_fast_the_one_with_fewer_techniques_is_first(faster, first):
    layout, filtering = find("channels_last")(weights=False), find("winograd")()

    def on_copies(proof, plans, rounds):
        yield from ()
        return dict(zip(plans, (1.5, 1.5 * faster), strict=True)), {}

    steered = SimpleNamespace(own={}, loop=SimpleNamespace(num_steps=1), tried=[])
    steered._on_copies, steered._record = on_copies, lambda *given: None
    with pytest.raises(StopIteration) as ended:
        next(Course._ranked(steered, None, [[layout], [layout, filtering]], 1))
    assert ended.value.value[0][0][-1].name == first


@pytest.mark.parametrize(
    ("root", "tried"),
    [
        (nn.GRU(2, 2), True),
        (nn.Sequential(nn.Linear(2, 2), nn.RNN(2, 2)), True),
        (nn.LSTM(2, 2), False),
        (nn.GRUCell(2, 2), False),
    ],
)
def test_gates_in_one_pass_are_tried_where_the_model_on_a_processor_has_such_layers(root, tried):
    machine = Machine((Device("cuda", "a card", 1), Device("cpu", "a processor", 1)), 2, {}, {})
    for device, expected in (("cpu", tried), ("meta", False)):
        groups = candidates.additions(copy.deepcopy(root).to(device), machine)
        assert (["fused_recurrent"] in [[one.name for one in group] for group in groups]) == expected


@pytest.mark.parametrize(
    ("root", "tried"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_masks_are_drawn_in_blocks_where_a_layer_drops_on_no_processor_of_intels(root, tried):
    assert (["vectorized_dropout"] in names_of(root, ("AMD EPYC", ()))) == tried
    assert ["vectorized_dropout"] not in names_of(root, ("Intel(R) Xeon(R)", ()))


@pytest.mark.parametrize("name", sorted(candidates.ONE_BY_ONE))
def test_operators_are_computed_in_vectors_where_results_come_from_them_on_a_processor(name):
    root, processor = nn.Linear(2, 2), ("a processor", ())
    assert ["vectorized_operators"] in names_of(root, processor, differentiated={"AddmmBackward0", name})
    assert ["vectorized_operators"] not in names_of(root, processor, differentiated={"AddmmBackward0"})
    assert ["vectorized_operators"] not in names_of(root, processor)
    elsewhere = nn.Linear(2, 2, device="meta")
    assert ["vectorized_operators"] not in names_of(elsewhere, processor, differentiated={name})


OF_ONE_BY_ONE = {
    "WhereBackward0": lambda x: torch.where(x > 0, x, 0.0),
    "MaskedFillBackward0": lambda x: x.masked_fill(x > 0, 0.0),
    "IndexBackward0": lambda x: x[torch.tensor([0, 1, 0])],
    "PreluKernelBackward0": lambda x: F.prelu(x, torch.tensor([0.1])),
    "MaxPool2DWithIndicesBackward0": lambda x: F.max_pool2d(x[None, None], 2).sum() + x,
}


@pytest.mark.parametrize("name", sorted(candidates.ONE_BY_ONE))
def test_what_results_come_from_is_found_behind_other_operators(name):
    weight = nn.Parameter(torch.ones(2, 2))
    outputs = [(OF_ONE_BY_ONE[name](weight * 2) + 1).exp(), torch.ones(2)]
    found = kept.differentiated_in(outputs)
    assert found & candidates.ONE_BY_ONE == {name}
    assert found >= {"ExpBackward0", "MulBackward0"}


def test_of_results_without_gradients_nothing_is_found():
    assert kept.differentiated_in([]) == kept.differentiated_in([torch.ones(2)]) == frozenset()


def test_no_more_than_some_of_a_graph_is_looked_at(monkeypatch):
    monkeypatch.setattr(kept, "MOST_NODES", 50)
    weight = nn.Parameter(torch.ones(2))

    def behind(number):
        found = torch.where(weight > 0, weight, 0.0)
        for _ in range(number):
            found = found.exp()
        return kept.differentiated_in([found])

    assert "WhereBackward0" in behind(48)
    assert behind(60) == {"ExpBackward0"}


def test_a_call_that_is_kept_says_what_its_results_come_from():
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = KeptCall(model, [optimizer], (torch.ones(3, 2),), {})
    assert call.differentiated == frozenset()
    call.returned({"logits": model(torch.ones(3, 2))})
    call.end()
    assert call.differentiated >= {"PreluKernelBackward0", "AddmmBackward0"}
