"""The ruler: correct plans are kept, planted defects are caught, and exact means bit for bit."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

import vivace
from vivace import Numerics, Seam, Stage
from vivace.errors import JobError
from vivace.plan import Plan
from vivace.testing import jobs
from vivace.verifying.ruler import Ruler

MACHINE = vivace.inspect().to_dict()
JOBS = {
    "mlp": jobs.mlp,
    "cnn": jobs.cnn,
    "transformer": jobs.transformer,
    "lstm": jobs.lstm,
}


def scale_loss(build):
    build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * 1.05)


def lose_momentum(build):
    build.wrap(Seam.UPDATE, lambda following: (build.optimizer.state.clear(), following())[1])


def freeze_a_layer(build):
    parameter = list(build.model.parameters())[2]
    build.wrap(Seam.FINISH, lambda following: (following(), setattr(parameter, "grad", None))[0])


def round_the_update(build):
    def update(following):
        following()
        with torch.no_grad():
            for parameter in build.model.parameters():
                parameter.copy_(parameter.bfloat16())

    build.wrap(Seam.UPDATE, update)


def slow_the_statistics(build):
    for module in build.model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            build.set_flag(module, "momentum", 0.01)


def drop_the_dropout(build):
    for module in build.model.modules():
        if isinstance(module, torch.nn.Dropout):
            build.set_flag(module, "p", 0.0)
        if isinstance(module, torch.nn.MultiheadAttention):
            build.set_flag(module, "dropout", 0.0)


def nothing(build):
    pass


@pytest.fixture
def claim(planted):
    return lambda function, numerics=Numerics.ROUNDING: planted(function, Stage.PRECISION, numerics)


@pytest.fixture(scope="module")
def rulers(ruler_of):
    return lambda name: ruler_of(JOBS[name])


DEFECTS = [
    ("mlp", scale_loss),
    ("mlp", lose_momentum),
    ("mlp", round_the_update),
    ("cnn", freeze_a_layer),
    ("cnn", slow_the_statistics),
    ("transformer", drop_the_dropout),
    ("transformer", round_the_update),
    ("lstm", lose_momentum),
    ("lstm", freeze_a_layer),
]


def shift_a_weight(build):
    with torch.no_grad():
        next(build.model.parameters()).add_(1.0)


@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.ROUNDING])
def test_weights_that_are_others_once_a_session_is_open_are_seen(rulers, claim, numerics):
    verdict = rulers("mlp").judge(claim(shift_a_weight, numerics))
    assert verdict["kept"] is False
    assert verdict["reason"].startswith("opening the session changes ")


def no_numbers_in_evaluation(build):
    hook = build.model.register_forward_hook(
        lambda module, _, output: None if module.training else output * torch.nan
    )
    build.on_close(hook.remove)


def test_an_evaluation_without_numbers_is_not_bit_identical(rulers, claim):
    verdict = rulers("mlp").judge(claim(no_numbers_in_evaluation, Numerics.EXACT))
    assert verdict["kept"] is False
    assert "evaluation under the plan" in verdict["reason"]


@pytest.mark.parametrize(("job", "defect"), DEFECTS, ids=[f"{j}-{d.__name__}" for j, d in DEFECTS])
def test_a_defect_that_claims_to_be_rounding_is_caught(job, defect, rulers, claim):
    verdict = rulers(job).judge(claim(defect))
    assert verdict["kept"] is False
    assert verdict["reason"]


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("mlp", "bf16_autocast"),
        ("transformer", "bf16_autocast"),
        ("cnn", "bf16_weights"),
        ("lstm", "bf16_weights"),
        ("cnn", "fused_optimizer"),
        ("lstm", "fused_optimizer"),
    ],
)
def test_correct_plans_are_kept(job, name, rulers):
    """Each on two jobs, and every job under one of them; more jobs and plans are in test_defects.py."""
    verdict = rulers(job).judge({name: {}})
    assert verdict["kept"], verdict["reason"]
    assert verdict["num_checks"] > 20
    assert verdict["curves"]["low"][0] <= verdict["curves"]["plan"][0] <= verdict["curves"]["high"][0]


def test_gradients_that_are_rounded_once_are_kept(rulers, claim):
    """As they travel between ranks: of a small layer one gradient may be all, and rounds by a whole unit."""

    def round_the_gradients(build):
        def finish(following):
            following()
            for parameter in build.model.parameters():
                parameter.grad.copy_(parameter.grad.bfloat16())

        build.wrap(Seam.FINISH, finish)

    for job in ("mlp", "cnn"):
        verdict = rulers(job).judge(claim(round_the_gradients))
        assert verdict["kept"], verdict["reason"]


def test_averages_in_too_few_bits_stand_still_and_are_caught(rulers, claim):
    """Adam's second moments move by a thousandth a step: less than bfloat16 can tell apart."""

    def halve_the_averages(build):
        def update(following):
            following()
            for kept in build.optimizer.state.values():
                kept["exp_avg_sq"].copy_(kept["exp_avg_sq"].bfloat16())

        build.wrap(Seam.UPDATE, update)

    verdict = rulers("mlp").judge(claim(halve_the_averages))
    broken = {c["name"]: c["score"] for c in verdict["checks"] if not c["kept"]}
    assert broken["dictated averages of exp_avg_sq of 0.weight, from step 0"] > 80


def test_exact_is_bit_for_bit(rulers, claim):
    kept = rulers("mlp").judge(claim(nothing, Numerics.EXACT))
    assert kept["kept"]
    assert kept["promise"] == "exact"

    def last_bit(build):
        build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * (1 + 2.0**-22))

    broken = rulers("mlp").judge(claim(last_bit, Numerics.EXACT))
    assert broken["kept"] is False
    assert "bit-identical" in broken["reason"]


def test_means_over_seeds_are_compared_where_random_streams_differ(rulers, claim):
    def draw_more(build):
        build.wrap(Seam.FORWARD, lambda following, batch: (torch.rand(3), following(batch))[1])

    ruler = rulers("transformer")
    verdict = ruler.judge(claim(draw_more))
    assert verdict["kept"], verdict["reason"]
    assert "random streams differ" in verdict["reason"]

    def draw_more_and_scale(build):
        draw_more(build)
        scale_loss(build)

    assert ruler.judge(claim(draw_more_and_scale))["kept"] is False


@pytest.mark.parametrize("crowd", [True, False])
def test_beside_others_a_plan_is_verified_on_one_thread_and_that_is_said(tmp_path, monkeypatch, crowd):
    monkeypatch.setattr("vivace.training.crew.crowded", lambda: crowd)
    monkeypatch.setenv("THREADS_SEEN", str(tmp_path / "seen"))
    heard, plan = [], vivace.Plan.from_dict({"fused_optimizer": {}})
    job = f"{Path(__file__).parents[1] / 'scenes' / 'two_threads.py'}:job"
    verdict = vivace.verify(job, plan, budget=5, on_event=heard.append)
    assert verdict.kept, verdict.reason
    assert set((tmp_path / "seen").read_text(encoding="utf-8").split()) == {"1" if crowd else "2"}
    said = [event.payload["text"] for event in heard if event.kind == "notice"]
    assert [text for text in said if "on one thread" in text] == said[:crowd]


def test_an_own_step_is_verified_too(ruler_of):
    assert ruler_of(jobs.gan).judge({"bf16_autocast": {}})["kept"]


class Lookahead(torch.optim.Optimizer):
    """As the usual published one: around another, without torch's own `__init__`."""

    def __init__(self, inner):
        self.inner, self.state, self.num_steps = inner, inner.state, 0
        self.slow = [weight.detach().clone() for group in inner.param_groups for weight in group["params"]]

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.slow, self.num_steps = [weight.clone() for weight in state["slow"]], state["num_steps"]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            fast = [weight for group in self.param_groups for weight in group["params"]]
            for slow, weight in zip(self.slow, fast, strict=True):
                slow.lerp_(weight.detach(), 0.5)
                weight.data.copy_(slow)
        return loss


def looking_ahead():
    return dataclasses.replace(jobs.mlp(), optimizer=lambda model: Lookahead(jobs.mlp().optimizer(model)))


def test_an_optimizer_that_never_calls_torchs_own_init_is_one_like_others(claim):
    ruler = Ruler(looking_ahead(), MACHINE)
    ruler.prepare(seconds=2.0)
    verdict = ruler.judge({})
    assert verdict["kept"], verdict["reason"]
    verdict = ruler.judge({"bf16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
    assert ruler.judge(claim(freeze_a_layer))["kept"] is False


def test_other_batches_are_caught_though_everything_else_is_exact(rulers, planted):
    def repeat_the_first(build):
        build.wrap(Seam.BATCHES, lambda following, loader: [next(iter(following(loader)))] * 3)

    verdict = rulers("mlp").judge(planted(repeat_the_first, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"] is False
    assert "other batches" in verdict["reason"]
    assert rulers("mlp").judge({"loader_workers": {"num_workers": 1}})["kept"]


def test_a_step_that_brings_its_own_loss_is_not_the_job(rulers, claim):
    def step_alone(build):
        def step(batch):
            loss = torch.nn.functional.cross_entropy(build.model(batch[0]), batch[1])
            loss.backward()
            build.optimizer.step()
            build.optimizer.zero_grad()
            return loss.detach()

        build.replace(Seam.STEP, step)

    verdict = rulers("mlp").judge(claim(step_alone))
    assert verdict["kept"] is False
    assert "never evaluates the job's loss" in verdict["reason"]


def test_a_loss_scale_settles_before_it_is_judged():
    """A scale that starts too high skips steps until it fits: part of the technique, not of its rounding."""
    ruler = Ruler(jobs.cnn(), MACHINE)
    ruler.prepare(seconds=2.0)
    verdict = ruler.judge({"fp16_autocast": {"initial_scale": 2.0**23}})
    assert verdict["kept"], verdict["reason"]


def test_a_job_that_does_not_repeat_itself_cannot_be_judged_by_bits():
    """As on a GPU whose kernels add up in any order: equal within rounding is then all that can be asked."""
    source = random.SystemRandom()  # which nobody can put back

    def loss(model, batch):
        noise = 1.0 + 1e-6 * source.random()
        return torch.nn.functional.cross_entropy(model(batch[0]) * noise, batch[1])

    ruler = Ruler(dataclasses.replace(jobs.mlp(), loss=loss), MACHINE)
    ruler.prepare(seconds=2.0)
    verdict = ruler.judge({})
    assert verdict["kept"], verdict["reason"]
    assert "does not repeat itself" in verdict["reason"]
    assert verdict["num_checks"] > 1


def test_a_job_that_cannot_run_is_told_so_whatever_the_plan():
    """The last batch of an epoch has one sample, and BatchNorm no statistics of it."""
    inputs = torch.randn(33, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    job = dataclasses.replace(
        jobs.mlp(),
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)),
        data=lambda: torch.utils.data.DataLoader(data, batch_size=16),
    )
    with pytest.raises(vivace.JobError, match=r"^the job cannot run as it is, before any plan: .*1, 4\]"):
        vivace.verify(job, Plan.from_dict({"bf16_autocast": {}}))


def test_a_plan_that_feeds_another_number_beside_the_tensors_is_broken(planted):
    def heavier(build):
        def feed(following, batches):
            return ({**batch, "weight": 2.0} for batch in following(batches))

        build.wrap(Seam.BATCHES, feed)

    plain = jobs.mlp()
    batches = [{"pair": batch, "weight": 1.0} for batch in plain.data()]
    job = dataclasses.replace(
        plain,
        data=lambda: batches,
        loss=lambda model, batch: batch["weight"] * plain.loss(model, batch["pair"]),
    )
    ruler = Ruler(job, MACHINE)
    ruler.prepare()
    verdict = ruler.judge(planted(heavier, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"] is False
    assert "feeds other batches" in verdict["reason"]


def never_updating(model, optimizer, batch):
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("own_step", [False, True])
def test_where_the_job_itself_moves_no_weight_nothing_is_known(own_step, claim):
    plain = jobs.mlp()
    own = {"loss": None, "step": never_updating} if own_step else {}
    rate = 0.1 if own_step else 0.0
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=rate)  # noqa: E731
    ruler = Ruler(dataclasses.replace(plain, optimizer=optimizer, **own), MACHINE)
    ruler.prepare(seconds=2.0)
    for plan in ({"bf16_autocast": {}}, claim(nothing, Numerics.EXACT)):
        verdict = ruler.judge(plan)
        assert verdict["kept"] is None
        assert verdict["reason"].startswith("the job's own steps left every weight where it was")
    if not own_step:
        assert ruler.judge(claim(shift_a_weight))["kept"] is False


class WithUnused(torch.nn.Module):
    """A layer of it has no part in the loss, so that it has no gradient and is never updated."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = jobs.mlp().model(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x)


def none_becomes_zero(build):
    def finish(following):
        following()
        for parameter in build.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    build.wrap(Seam.FINISH, finish)


@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.ROUNDING])
def test_what_has_no_gradient_may_not_be_decayed(numerics, claim):
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    ruler = Ruler(dataclasses.replace(jobs.mlp(), model=WithUnused, optimizer=optimizer), MACHINE)
    ruler.prepare(seconds=5.0)
    assert ruler.judge({"bf16_autocast": {}})["kept"]
    verdict = ruler.judge(claim(none_becomes_zero, numerics))
    assert verdict["kept"] is False
    assert "unused." in verdict["reason"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_job_whose_models_share_weights_is_refused(whole):
    plain = jobs.mlp()
    kept = plain.model()
    model = (lambda: kept) if whole else (lambda: torch.nn.Sequential(kept, torch.nn.Identity()))
    ruler = Ruler(dataclasses.replace(plain, model=model), MACHINE)
    with pytest.raises(JobError, match=r"^the Job's model\(\) gives the same weights each time it is called"):
        ruler.prepare(seconds=2.0)


def test_models_may_share_what_is_not_trained():
    plain = jobs.mlp()
    teacher = plain.model().requires_grad_(False)

    def model():
        student = WithUnused()
        student.unused = teacher
        return student

    ruler = Ruler(dataclasses.replace(plain, model=model), MACHINE)
    ruler.prepare(seconds=2.0)
    verdict = ruler.judge({"bf16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
