"""Models that put out something else in evaluation mode than their loss takes, as detectors do."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vivace
from vivace import Numerics, Stage
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs
from vivace.verifying.evaluation import Evaluation, checks_of
from vivace.verifying.life import held_out
from vivace.verifying.ruler import Ruler
from vivace.verifying.states import state_of

MACHINE = vivace.inspect().to_dict()


class Detector(nn.Module):
    """Losses in training, as many boxes as it finds in evaluation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        self.head = nn.Linear(8, 10)

    def forward(self, images, labels):
        scores = self.head(self.body(images).mean((2, 3)))
        if self.training:
            return {"classes": F.cross_entropy(scores, labels), "size": scores.square().mean()}
        return [{"boxes": score[score > 0.1]} for score in scores]


def detection():
    return dataclasses.replace(
        jobs.cnn(),
        model=Detector,
        loss=lambda model, batch: sum(model(*batch).values()),
        metric=None,
    )


def test_such_a_job_can_be_verified():
    ruler = Ruler(detection(), MACHINE)
    ruler.prepare(seconds=10)
    verdict = ruler.judge({"bf16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
    assert ruler.evaluation.way == (False, False)


def test_batchnorm_and_dropout_are_evaluated_there_too():
    job = detection()
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        batch = next(iter(job.data()))
        evaluation, state = Evaluation(job, batch), state_of(session)
        outputs = evaluation(session, state)
        model = session.build.model
        assert len(outputs) == 2  # the two losses
        torch.testing.assert_close(outputs, evaluation(session, state), rtol=0, atol=0)
        assert all(torch.equal(state.buffers[name], now) for name, now in state_of(session).buffers.items())
        state.buffers["body.1.running_var"] *= 4
        assert not torch.allclose(outputs, evaluation(session, state))
        assert all(module.training for module in model.modules())


def penalised(model, batch):
    """As in a Wasserstein GAN, or where a network must fulfil a differential equation."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + 0.1 * slopes.square().mean()


def test_a_loss_that_differentiates_by_itself_is_evaluated():
    job = dataclasses.replace(jobs.cnn(), loss=penalised)
    ruler = Ruler(job, MACHINE)
    ruler.prepare(seconds=10)
    verdict = ruler.judge({"fused_optimizer": {}})
    assert verdict["kept"], verdict["reason"]
    assert ruler.evaluation.way == (True, True)


PADDING = -100


class Padded(nn.Module):
    """A number for each of several places; `at_padding`: what it says of places that hold nothing."""

    def __init__(self, at_padding=0.0):
        super().__init__()
        self.head, self.at_padding = nn.Linear(3, 4), at_padding

    def forward(self, inputs, labels):
        return torch.where((labels == PADDING)[..., None], self.at_padding, self.head(inputs))


def padded(loss):
    inputs = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    labels = inputs.argmax(2).masked_fill(torch.arange(5) >= torch.arange(1, 9)[:, None], PADDING)
    return vivace.Job(
        model=Padded,
        data=lambda: [(inputs, labels)] * 8,
        loss=lambda model, batch: loss(model(*batch), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def test_what_no_loss_reads_of_the_outputs_is_not_compared():
    job = padded(lambda outputs, labels: F.cross_entropy(outputs.flatten(0, 1), labels.flatten()))
    ruler = Ruler(job, MACHINE)
    ruler.prepare(seconds=10)
    (unread,) = ruler.evaluation.unread
    (_, labels) = next(iter(job.data()))
    assert torch.equal(unread.view(8, 5, 4).all(2), labels == PADDING)
    state, model = state_of(ruler.session), ruler.session.build.model
    plain = ruler.evaluation(ruler.session, state)
    model.at_padding = 5.0
    other = ruler.evaluation(ruler.session, state)
    assert [check["kept"] for check in checks_of([other], [plain], 2.0**-16)] == [False]
    assert [check["kept"] for check in checks_of([other], [plain], 2.0**-16, "", [unread])] == [True]
    assert [check["kept"] for check in checks_of([plain * 1.1], [plain], 2.0**-16, "", [unread])] == [False]


def test_outputs_without_a_slope_count_where_the_loss_reads_them():
    """A hinge has no slope where a sample is right, and one if it were not."""
    job = padded(lambda outputs, labels: (1.0 - 99.0 * outputs).relu().mean())
    ruler = Ruler(job, MACHINE)
    ruler.prepare(seconds=10)
    assert ruler.evaluation.unread == [None]


def test_an_error_of_the_loss_itself_is_not_hidden():
    job = dataclasses.replace(jobs.cnn(), loss=lambda model, batch: model(batch[0]).no_such_name)
    with (
        start(jobs.cnn(), Plan(), Machine.from_dict(MACHINE)) as session,
        pytest.raises(AttributeError, match="no_such_name"),
    ):
        Evaluation(job, next(iter(job.data())))(session, state_of(session))


class Outputs(dict):
    """Like transformers' outputs: what is made of nothing holds nothing, and is false."""

    def __init__(self, found):
        super().__init__((key, value) for key, value in found.items() if value is not None)


def test_looking_at_outputs_does_not_replace_them():
    class Naming(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = jobs.cnn().model()

        def forward(self, inputs):
            return Outputs({"logits": self.inner(inputs)})

    job = dataclasses.replace(
        jobs.cnn(),
        model=Naming,
        loss=lambda model, batch: F.cross_entropy(model(batch[0])["logits"], batch[1]),
    )
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        batch = next(iter(job.data()))
        evaluation = Evaluation(job, batch)
        assert len(evaluation(session, state_of(session))) == len(batch[1]) * 4
        assert evaluation.way == (True, False)


def validated(validation=None):
    """Trained on batches of 16, validated on one of 15 and one of 5."""
    numbers = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(20, 3, 8, 8, generator=numbers), torch.arange(20) % 4
    data = torch.utils.data.TensorDataset(inputs, labels)
    validation = validation or (lambda: torch.utils.data.DataLoader(data, batch_size=15))
    return dataclasses.replace(jobs.cnn(), validation=validation)


def test_validation_data_are_looked_at_by_their_first_batch_and_their_odd_last_one():
    assert [len(labels) for _, labels in held_out(validated(), 0.0)] == [15, 5]
    assert held_out(jobs.cnn(), 60.0) == []
    sizes = [15, 15, 15, 5]
    endings = {"odd": sizes, "even": sizes[:3]}
    for name, expected in (("odd", [15, 5]), ("even", [15])):
        stream = validated(lambda name=name: (torch.zeros(size) for size in endings[name]))
        assert [len(batch) for batch in held_out(stream, 60.0)] == expected
        assert [len(batch) for batch in held_out(stream, 0.0)] == [15], "no time to reach the end"


def test_validation_data_that_the_loss_does_not_take_are_left_out():
    job = validated()
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        first, last = held_out(job, 0.0)
        evaluation, state = Evaluation(job, next(iter(job.data()))), state_of(session)
        evaluation.hold_out(session, [first[0], (first[0] * torch.inf, first[1]), last])
        assert [len(outputs) for outputs in evaluation.everywhere(session, state)] == [16 * 4, 5 * 4]
        assert [len(outputs) for outputs in evaluation.as_it_is(session)] == [16 * 4, 5 * 4]


def wrong_for(size):
    """Evaluates batches of one size otherwise."""

    def apply(build):
        plain = type(build.model).forward

        def forward(inputs):
            outputs = plain(build.model, inputs)
            return outputs if build.model.training or len(inputs) != size else outputs * 1.2

        build.model.forward = forward
        build.on_close(lambda: build.model.__dict__.pop("forward"))

    return apply


@pytest.fixture(scope="module")
def ruler():
    made = Ruler(validated(), MACHINE)
    made.prepare(seconds=4)
    return made


@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.ROUNDING])
@pytest.mark.parametrize(("size", "number"), [(15, 1), (5, 2)])
def test_a_plan_that_evaluates_validation_data_otherwise_is_caught(size, number, numerics, ruler, planted):
    verdict = ruler.judge(planted(wrong_for(size), Stage.MODEL, numerics))
    assert verdict["kept"] is False
    assert f"evaluation under the plan, validation batch {number}, " in verdict["reason"]


@pytest.mark.parametrize("name", ["bf16_autocast", "bf16_weights"])
def test_a_right_plan_evaluates_them_alike(name, ruler):
    verdict = ruler.judge({name: {}})
    assert verdict["kept"], verdict["reason"]
    assert sum("validation batch" in check["name"] for check in verdict["checks"]) == 2 * 4


def test_few_samples_that_are_all_but_the_same_are_held_against_the_spread_of_the_first():
    plain = [torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.tensor([3.0, 3.0001])]
    first, second = checks_of([plain[0], plain[1] + 1e-3], plain, 2.0**-8)
    assert first["value"] == 0.0
    assert second["value"] == pytest.approx(1e-3 / float(plain[0].std()), rel=1e-3)
    assert (second["kept"], second["limit"]) == (True, 2 * first["limit"])
    assert len(checks_of(plain, [plain[0], plain[1] * torch.nan], 2.0**-8)) == 1


def test_a_complex_output_is_seen_with_both_parts():
    class Spectrum(nn.Module):
        def forward(self, values):
            return torch.fft.fft(values)

    job = vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), Spectrum()),
        data=lambda: [torch.arange(8.0).view(2, 4)],
        loss=lambda model, batch: model(batch).abs().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        batch = session.place(torch.arange(8.0).view(2, 4))
        outputs = Evaluation(job, batch).everywhere(session, state_of(session))[0]
        (model,) = session.build.models
        assert torch.equal(outputs, torch.view_as_real(model(batch)).flatten())


class WithLoss(nn.Module):
    """A model that is never called: it has a method that gives the loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])


def _with_loss():
    return dataclasses.replace(jobs.mlp(), model=WithLoss, loss=lambda model, batch: model.loss(batch))


def test_a_model_that_the_loss_does_not_call_is_evaluated_by_what_it_calls(ruler_of, planted):
    def spoil_evaluation(build):
        hook = build.model.head.register_forward_hook(
            lambda module, _, output: None if module.training else 1.1 * output
        )
        build.on_close(hook.remove)

    ruler = ruler_of(_with_loss)
    verdict = ruler.judge({"fused_optimizer": {}})
    assert verdict["kept"], verdict["reason"]
    verdict = ruler.judge(planted(spoil_evaluation, Stage.MODEL))
    assert verdict["kept"] is False
    assert "evaluation under the plan" in verdict["reason"]


def test_outputs_that_are_no_numbers_in_the_plain_model_are_not_judged():
    plain = torch.tensor([1.0, torch.nan, 2.0])
    assert [check["kept"] for check in checks_of([plain], [plain], 2.0**-8)] == [None]
    assert [check["kept"] for check in checks_of([plain], [torch.ones(3)], 2.0**-8)] == [False]


class Gaps(nn.Module):
    """Puts out no number for the first sample in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x):
        if self.training:
            return self.net(x)
        return torch.cat([self.net(x[:1]) * torch.nan, self.net(x[1:])])


def _with_gaps():
    return vivace.Job(
        model=Gaps,
        data=lambda: [torch.randn(6, 8, generator=torch.Generator().manual_seed(n)) for n in range(8)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def test_a_number_in_place_of_none_is_another_evaluation_bit_for_bit(ruler_of, planted):
    def untouched(build):
        """Promise what nothing breaks."""

    def filled(build):
        hook = build.model.register_forward_hook(lambda module, given, out: out.nan_to_num(0.5))
        build.on_close(hook.remove)

    def elsewhere(build):
        hook = build.model.register_forward_hook(lambda m, given, out: out if m.training else out.roll(1, 0))
        build.on_close(hook.remove)

    ruler = ruler_of(_with_gaps)
    verdict = ruler.judge(planted(untouched, Stage.MODEL, Numerics.EXACT))
    assert verdict["kept"], verdict["reason"]
    for spoiling in (filled, elsewhere):
        verdict = ruler.judge(planted(spoiling, Stage.MODEL, Numerics.EXACT))
        assert verdict["kept"] is False
        assert "evaluation under the plan" in verdict["reason"]


class NoNumberLater(nn.Linear):
    """Its training loses itself in the third step."""

    def __init__(self):
        super().__init__(8, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += self.training
        return super().forward(x) * (torch.nan if self.training and self.steps > 2 else 1.0)


def test_a_loss_that_is_no_number_later_is_told_and_proves_nothing(ruler_of, planted):
    def untouched(build):
        """Promise what nothing breaks."""

    ruler = ruler_of(_that_loses_itself)
    verdict = ruler.judge(planted(untouched, Stage.MODEL, Numerics.EXACT))
    assert verdict["kept"] is None
    assert "loss is NaN at step 2" in verdict["reason"]


def _that_loses_itself():
    return dataclasses.replace(_with_gaps(), model=NoNumberLater)


def _with_a_batch_without_samples():
    plain = jobs.mlp()
    batches = [*plain.data(), (torch.empty(0, 8), torch.empty(0, dtype=torch.int64))]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / max(1, len(batch[1]))

    return dataclasses.replace(plain, data=lambda: batches, loss=loss)


@pytest.mark.parametrize("plan", ["bf16_autocast", "micro_batches"])
def test_a_batch_without_samples_is_gone_through(plan, ruler_of):
    verdict = ruler_of(_with_a_batch_without_samples).judge({plan: {}})
    assert verdict["kept"], verdict["reason"]


def _right(model, batches):
    return sum(float((model(x).argmax(1) == y).double().mean()) for x, y in batches)


def _with_own_step():
    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return dataclasses.replace(jobs.mlp(), loss=None, step=step, metric=_right)


@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.ROUNDING])
def test_a_job_with_its_own_step_is_evaluated_by_its_metric(numerics, ruler_of, planted):
    def untouched(build):
        """Promise what nothing breaks."""

    def turned(build):
        (model,) = build.models
        hook = model.register_forward_hook(lambda m, given, out: out if m.training else out.roll(1, 1))
        build.on_close(hook.remove)

    def no_number(build):
        (model,) = build.models
        hook = model.register_forward_hook(lambda m, given, out: out if m.training else out.long() // 0)
        build.on_close(hook.remove)

    ruler = ruler_of(_with_own_step)
    verdict = ruler.judge(planted(untouched, Stage.MODEL, numerics))
    assert verdict["kept"], verdict["reason"]
    for spoiling in (turned, no_number):
        verdict = ruler.judge(planted(spoiling, Stage.MODEL, numerics))
        assert verdict["kept"] is False
        assert "metric of the same weights" in verdict["reason"]


@pytest.mark.parametrize("kind", ["equal", "random", "failing"])
def test_the_metric_of_an_own_step_runs_often_only_where_it_differs(kind, ruler_of, planted):
    calls = []

    def metric(model, batches):
        calls.append(model)
        if kind == "failing":
            raise ValueError("no labels")
        return _right(model, batches) + (len(calls) if kind == "random" else 0)

    def untouched(build):
        """Promise what nothing breaks."""

    ruler = ruler_of(lambda: dataclasses.replace(_with_own_step(), metric=metric))
    calls.clear()
    verdict = ruler.judge(planted(untouched, Stage.MODEL, Numerics.ROUNDING))
    assert verdict["kept"], verdict["reason"]
    assert len(calls) <= 3
    told = {"random": "it says otherwise each time", "failing": "it fails without any plan"}
    assert told.get(kind, "") in verdict["reason"]
    assert ("the metric was not compared" in verdict["reason"]) == (kind in told)
