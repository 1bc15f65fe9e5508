"""Scripts with settings of their own: what is theirs stays theirs, and the rest is tried."""

import contextlib
import copy
import gc
import signal
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vivace import words
from vivace.ledger import Ratio
from vivace.live import answering, candidates, course, ending, proof
from vivace.live.hosted import Hosted

STEPS = 150


def images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train_with(precision=contextlib.nullcontext, scaler=None, model_of=lambda model: model, steps=STEPS):
    """A loop over images; the loss in fp32, as AMP's own examples have it."""

    def train():
        model, optimizer = images()
        model = model_of(model)
        gradients = scaler() if scaler is not None else torch.amp.GradScaler("cpu", enabled=False)
        for step in range(steps):
            inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with precision():
                outputs = model(inputs)
            loss = F.cross_entropy(outputs.float(), torch.arange(6) % 4)
            gradients.scale(loss).backward()
            gradients.step(optimizer)
            gradients.update()
        return model, optimizer

    return train


def answers(watching):
    return {tuple(entry["plan"]): entry["answer"] for entry in watching.conductor.course.tried}


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def test_an_own_autocast_stays_and_the_rest_is_tried(led):
    watching, (_, optimizer), told = led(train_with(bf16), "fused_optimizer")
    found = answers(watching)
    assert found["bf16_autocast",] == "its precision is its own (autocast)"
    assert not any("bf16_autocast" in names and len(names) > 1 for names in found)
    assert any("channels_last" in names and answer == "not_faster" for names, answer in found.items())
    assert list(told["plan"]) == ["fused_optimizer"]
    assert told["worst"] <= proof.LIMIT
    assert not watching.problems
    assert not optimizer.param_groups[0]["fused"]  # given back


@pytest.mark.parametrize("precision", [contextlib.nullcontext, bf16])
def test_dropout_in_another_order_or_width_is_the_same_step(led, precision):
    """As in nn.TransformerEncoderLayer, whose attention's output is a transposed tensor."""

    class Dropped(nn.Module):
        def forward(self, inputs):
            return F.dropout(inputs.transpose(1, 2), 0.1).transpose(1, 2)

    dropped = lambda model: nn.Sequential(*model[:2], Dropped(), *model[2:])  # noqa: E731
    watching, _, told = led(train_with(precision, model_of=dropped), "channels_last")
    assert told["only_the_rest"] == ""
    assert any("channels_last" in plan for plan in answers(watching))
    assert "channels_last" in told["plan"], told["reason"]


def test_an_autocast_inside_of_the_model_is_its_own_too(led):
    class Inside(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            with bf16():
                return self.model(inputs).float()

    watching, _, _ = led(train_with(model_of=Inside))
    assert answers(watching)["bf16_autocast",] == "its precision is its own (autocast)"
    assert not watching.left_alone


@pytest.mark.parametrize("scale", [1024.0, 2.0**40])
def test_a_scaler_is_the_scripts_own(led, scale):
    """Also where it begins so high that its first steps are left out."""
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=scale)  # noqa: E731
    fp16 = lambda: torch.autocast("cpu", torch.float16)  # noqa: E731
    watching, _, told = led(train_with(fp16, scaler), "fused_optimizer")
    assert answers(watching)["bf16_autocast",] == "its precision is its own (autocast and GradScaler)"
    assert list(told["plan"]) == ["fused_optimizer"], told["reason"]
    assert not watching.problems


def test_a_plan_is_proven_on_unscaled_gradients(led, monkeypatch):
    """Scaled ones would make another update of what is no mere sign, as Adam's nearly is."""
    updates = []
    original = proof.Proof._outcome

    def noted(self, root, gradients, drawn):
        updates.append((self.kept.scale, float(next(iter(gradients.values())).norm())))
        return original(self, root, gradients, drawn)

    monkeypatch.setattr(proof.Proof, "_outcome", noted)
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=256.0)  # noqa: E731
    led(train_with(scaler=scaler, steps=40))
    assert {scale for scale, _ in updates} == {256.0}


def test_a_precision_that_changes_later_ends_it(led):
    steps = iter(range(10**6))
    late = lambda: bf16() if next(steps) > 60 else contextlib.nullcontext()  # noqa: E731
    _, _, told = led(train_with(late), "fused_optimizer")
    assert "changes its precision" in told["reason"]
    assert not told["plan"]


def test_an_own_memory_order_stays(led):
    ordered = lambda model: model.to(memory_format=torch.channels_last)  # noqa: E731
    watching, (model, _), told = led(train_with(model_of=ordered), "fused_optimizer")
    found = answers(watching)
    assert found["channels_last",] == "its memory order is its own (channels_last)"
    assert not any("channels_last" in names and len(names) > 1 for names in found)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert list(told["plan"]) == ["fused_optimizer"]


def test_a_reason_that_several_share_is_told_once(led):
    _, _, told = led(train_with(model_of=compiled))
    first = " ".join(line.removeprefix(ending.PREFIX) for line in ending.said(told, "python train.py"))
    assert first.count("its model is compiled by torch.compile") == 1
    assert "fused_optimizer " in first


def compiled(model):
    return torch.compile(model, backend="eager")


def test_of_a_compiled_model_memory_and_update_are_tried(led):
    watching, (model, _), told = led(train_with(model_of=compiled), "fused_optimizer")
    found = answers(watching)
    reason = "its model is compiled by torch.compile"
    assert found["bf16_autocast",] == found["channels_last",] == reason
    assert list(told["plan"]) == ["fused_optimizer"]
    assert told["only_the_rest"] == reason
    assert not watching.problems
    assert isinstance(model, type(compiled(nn.Linear(1, 1))))


def test_a_model_that_is_compiled_while_it_is_led_is_let_go(led):
    def train():
        model, optimizer = images()
        for step in range(STEPS):
            if step == 40:
                model = compiled(model)
            optimizer.zero_grad()
            model(torch.ones(2, 3, 8, 8)).mean().backward()
            optimizer.step()

    watching, _, told = led(train, "bf16_autocast", "fused_optimizer")
    assert "compiled" in told["only_the_rest"] + told["reason"]
    assert "bf16_autocast" not in told["plan"]
    assert not watching.problems


def test_the_update_of_several_calls_a_step_may_be_fused(led):
    def train():
        model, optimizer = images()
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model(torch.ones(2, 3, 8, 8)) - model(torch.zeros(2, 3, 8, 8))).square().mean().backward()
            optimizer.step()

    _, _, told = led(train, "fused_optimizer")
    assert "calls its model 2 times" in told["only_the_rest"]
    assert list(told["plan"]) == ["fused_optimizer"]
    assert told["watched"] >= 1


def test_complex_numbers_are_compared_whole(led, monkeypatch):
    """As those of a Fourier layer: neither half is left out, nor said to be discarded."""
    replays = []
    original = proof.Proof.replay

    def noted(*arguments, **keywords):
        replays.append(original(*arguments, **keywords))
        return replays[-1]

    monkeypatch.setattr(proof.Proof, "replay", noted)

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 5, dtype=torch.cfloat))

        def forward(self, inputs):
            return torch.fft.rfft(inputs) * self.weight

    def train():
        model = Spectral()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.fft.irfft(model(torch.ones(2, 4, 8))).square().mean().backward()
            optimizer.step()

    watching, _, told = led(train)
    assert not watching.problems
    assert not told["only_the_rest"]
    assert [tuple(each.shape) for each in replays[0].each] == [(2, 2, 4, 5)]
    one, other = torch.ones(1, dtype=torch.cfloat), torch.tensor([1 + 1j])
    assert proof.apart({"weight": one}, {"weight": other}) == pytest.approx(0.5**0.5)


def test_why_a_script_of_several_models_is_left_is_said_whole(led, monkeypatch):
    def train():
        generator, first = images()
        critic = nn.Linear(4, 1)
        second = torch.optim.Adam(critic.parameters())
        for _ in range(STEPS):
            first.zero_grad()
            second.zero_grad()
            critic(generator(torch.ones(2, 3, 8, 8))).mean().backward()
            first.step()
            second.step()

    monkeypatch.setattr(candidates, "FEWEST_FAULTS", float("inf"))  # the allocator has nothing to act on
    _, _, told = led(train)
    assert told["reason"] == course.NOTHING_TO_TRY
    said = " ".join(line.removeprefix(ending.PREFIX) for line in ending.said(told, "python train.py"))
    assert "as they were: it trains several models, or calls parts of one (Linear, Sequential)." in said


def test_several_optimizers_keep_their_updates(led):
    def train():
        model, first = images()
        second = torch.optim.Adam(copy.deepcopy(model).parameters())
        for _ in range(STEPS):
            first.zero_grad()
            model(torch.ones(2, 3, 8, 8)).mean().backward()
            first.step()
            second.step()

    watching, _, told = led(train, "fused_optimizer")
    assert answers(watching)["fused_optimizer",] == "several optimizers update its weights"
    assert "fused_optimizer" not in told["plan"]


def test_of_several_optimizers_of_one_model_its_calls_are_led(led):
    """As where matrices and vectors are updated by different rules."""

    def train():
        model, _ = images()
        matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-3)
        for step in range(STEPS):
            inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(inputs), torch.arange(6) % 4)
            for optimizer in (matrices, vectors):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (matrices, vectors):
                optimizer.step()

    watching, _, told = led(train, "bf16_autocast")
    assert "bf16_autocast" in told["plan"], told
    assert told["watched"] >= 1
    assert answers(watching)["fused_optimizer",] == "several optimizers update its weights"
    assert not told["only_the_rest"]


def test_of_a_plan_that_was_given_the_ratio_is_told(led):
    _, _, told = led(train_with(), plan={"fused_optimizer": {}})
    assert "was not faster than the run as it is" in told["reason"]
    assert answering.came_of(told) == [("fused_optimizer", words.ratio(Ratio(**told["tried"][0]["wall"])))]


def test_a_plan_for_calls_that_cannot_be_led_is_refused(led):
    _, _, told = led(train_with(model_of=compiled), plan={"bf16_autocast": {}})
    assert "it cannot act on 'step'" in told["reason"]
    assert not told["plan"]


def test_a_wrong_update_never_acts(led, monkeypatch):
    """A plan that steps otherwise is seen where the update alone is kept."""
    original = Hosted.__init__

    def wrong(self, plan, root, optimizer, machine, **keywords):
        original(self, plan, root, optimizer, machine, **keywords)
        if "fused_optimizer" in plan.names:
            for group in optimizer.param_groups:
                group["lr"] *= 1.02

    monkeypatch.setattr(Hosted, "__init__", wrong)
    watching, _, told = led(train_with(model_of=compiled), "fused_optimizer")
    assert answers(watching)["fused_optimizer",] == "not_kept"
    assert not told["plan"]


def decay_lost(optimizer):
    """In its last group, as a fused implementation may forget it."""
    for group in optimizer.param_groups[-1:]:
        group["weight_decay"] = 0.0


def larger_by_a_hook(optimizer):
    optimizer.register_step_pre_hook(lambda own, *_: [group.update(lr=1.05e-3) for group in own.param_groups])


@pytest.mark.parametrize("fault", [decay_lost, larger_by_a_hook])
def test_a_wrong_update_does_not_hide_behind_the_rounding_of_products(led, monkeypatch, fault):
    original = Hosted.__init__

    def wrong(self, plan, root, optimizer, machine, **keywords):
        original(self, plan, root, optimizer, machine, **keywords)
        if "fused_optimizer" in plan.names:
            fault(optimizer)

    def train():
        model, _ = images()
        optimizer = torch.optim.AdamW([*model.parameters()][:2], lr=1e-3)
        optimizer.add_param_group({"params": [*model.parameters()][2:], "weight_decay": 0.05})
        for step in range(STEPS):
            inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), torch.arange(6) % 4).backward()
            optimizer.step()

    plan = {"bf16_autocast": {}, "fused_optimizer": {}}
    _, _, told = led(train, *plan, plan=plan)
    assert told["outcome"] == "faster"
    monkeypatch.setattr(Hosted, "__init__", wrong)
    _, _, told = led(train, *plan, plan=plan)
    assert "the plan is not kept here" in told["reason"]


@pytest.mark.parametrize("named", [False, True])
def test_the_update_of_a_closure_may_be_fused(led, named):
    """As Lightning steps: what is kept begins when the closure has computed the gradients."""

    def train():
        model, optimizer = images()
        model = compiled(model)

        def loss():
            optimizer.zero_grad()
            value = model(torch.ones(2, 3, 8, 8)).mean()
            value.backward()
            return value

        for _ in range(STEPS):
            optimizer.step(closure=loss) if named else optimizer.step(loss)

    watching, _, told = led(train, "fused_optimizer")
    assert list(told["plan"]) == ["fused_optimizer"]
    assert told["watched"] >= 1
    assert not watching.problems


def test_training_in_a_thread_is_left_alone_and_said(led):
    def train():
        thread = threading.Thread(target=train_with(steps=8))
        thread.start()
        thread.join()

    _, _, told = led(train)
    assert told["outcome"] == "nothing_seen"
    assert told["reason"] == "its optimizer steps in a thread beside the main one"


class Preempted(Exception):
    pass


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("in_a_copy", [False, True])
def test_what_a_handler_of_a_signal_raises_is_the_scripts(led, in_a_copy, restores):
    """Also where it comes while a plan acts on the model's call, or a copy of it runs: none may hide it; and
    where it first takes itself away, so that a second signal ends the process.
    """
    counted = threading.local()  # what a dict holds is put back when a copy has run
    counted.raised = counted.caught = 0

    def preempted(number, *_):
        if restores:
            signal.signal(number, signal.SIG_DFL)
        raise Preempted

    class Interrupted(nn.Sequential):
        def forward(self, inputs):
            own, acts = self is counted.model, torch.is_autocast_enabled("cpu")
            if not counted.raised and (not own if in_a_copy else own and acts):
                counted.raised += 1
                signal.raise_signal(signal.SIGUSR1)
            return super().forward(inputs)

    def train():
        inner, optimizer = images()
        counted.model = model = Interrupted(*inner)
        for _ in range(STEPS):
            try:
                optimizer.zero_grad()
                model(torch.ones(2, 3, 8, 8)).square().mean().backward()
                optimizer.step()
            except Preempted:
                counted.caught += 1

    before = signal.signal(signal.SIGUSR1, preempted)
    try:
        watching, _, told = led(train, "bf16_autocast")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert counted.raised == counted.caught == 1
    assert not watching.problems
    assert bool(told["plan"]) is not in_a_copy


def test_what_a_handler_of_a_signal_prints_is_no_print_of_the_model(led, capsys):
    """Nor what another thread prints while a copy of the model runs."""
    seen = threading.local()  # which no copy puts back
    seen.copy = None

    class Interrupted(nn.Sequential):
        def forward(self, inputs):
            if self is not seen.original and seen.copy is None:
                seen.copy = self
                signal.raise_signal(signal.SIGUSR1)
                thread = threading.Thread(target=print, args=("from a thread",))
                thread.start()
                thread.join()
            return super().forward(inputs)

    def train():
        inner, optimizer = images()
        model = seen.original = Interrupted(*inner)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()

    before = signal.signal(signal.SIGUSR1, lambda *_: print("got it"))
    try:
        _, _, told = led(train)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert capsys.readouterr().out == "got it\nfrom a thread\n"
    assert "prints" not in told["only_the_rest"] + told["reason"]


class Decayed:
    """An optimizer that is none of torch's."""

    def __init__(self, weights):
        self.weights = list(weights)

    @torch.no_grad()
    def step(self):
        for weight in self.weights:
            weight.data.add_(weight.grad, alpha=-0.01).mul_(0.999)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


def decayed(steps=STEPS, calls=1, model_of=lambda model: model):
    model = model_of(images()[0])
    optimizer = Decayed(model.parameters())
    for step in range(steps):
        inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        sum(F.cross_entropy(model(inputs), torch.arange(6) % 4) for _ in range(calls)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_an_optimizer_that_is_none_of_torchs_goes_on_as_it_is_and_the_call_is_led(led):
    backward = torch.autograd.backward
    loop, model, document = led(decayed, "channels_last")
    assert torch.autograd.backward is backward
    assert document["plan"]["channels_last"] == {"weights": False}
    assert "fused_optimizer" not in document["plan"]
    assert document["steps"] > STEPS - 5
    (fused,) = (one for one in document["tried"] if "fused_optimizer" in one["plan"])
    assert fused["answer"] == "no optimizer of torch's updates its weights"
    assert not loop.problems
    for mine, theirs in zip(model.parameters(), decayed().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-3)  # bfloat16 was timed, too


def test_of_such_a_loop_nothing_is_left_where_its_model_cannot_be_led(led):
    loop, _, document = led(lambda: decayed(calls=2), "channels_last")
    assert "2 times for 1 backward pass" in loop.left_alone
    assert document["outcome"] == "left_alone"
    assert document["reason"] == loop.left_alone
    assert not loop.problems


def test_gradients_that_are_accumulated_first_are_no_update(led):
    def train():
        model, optimizer = images()
        for step in range(STEPS):
            model(torch.ones(2, 3, 8, 8)).square().mean().backward()
            if step % 10 == 9:
                optimizer.step()
                optimizer.zero_grad()

    loop, _, document = led(train)
    assert document["steps"] == STEPS // 10
    assert all(isinstance(one, torch.optim.Adam) for one in loop.seen.optimizers.values())


def test_models_that_such_a_script_trains_one_after_the_other_are_held_no_longer_than_it_does(led):
    held = []

    def train():
        for _ in range(3):
            held.append(weakref.ref(decayed(steps=6)))
            gc.collect()
        return decayed()

    loop, _, document = led(train, "channels_last")
    assert not loop.problems
    assert all(one() is None for one in held)
    assert "channels_last" in document["plan"]


def test_another_models_steps_are_none_of_the_first_ones(led):
    first = images()[0]

    def train():
        decayed(model_of=lambda _: first)
        return decayed(steps=250)

    loop, _, _ = led(train, "channels_last")
    assert "another optimizer began to step" in loop.left_alone
    assert not loop.problems
