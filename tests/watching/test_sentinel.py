"""Defects that begin late are caught in the run; healthy plans are not; and watching changes no number."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import vivace
from vivace import Seam
from vivace.errors import PromiseBroken

pytestmark = pytest.mark.usefixtures("one_thread")


def slowly_from(number):
    """The first weight's gradient is lost: with momentum a tenth of its first wrong update."""

    def apply(build, count):
        def update(following):
            if count.steps >= number:
                build.model[0].weight.grad.zero_()
            following()

        build.wrap(Seam.UPDATE, update)

    return apply


def frozen_from(number):
    """Nothing is trained any more."""

    def apply(build, count):
        build.wrap(Seam.UPDATE, lambda following: following() if count.steps < number else None)

    return apply


def every(number):
    """Of so many steps one is left out."""

    def apply(build, count):
        build.wrap(Seam.UPDATE, lambda following: following() if count.steps % number else None)

    return apply


def spike_guard(build, count):
    """A gradient that is larger than usual is cut, as no job asked for."""
    norms = []

    def update(following):
        parameters = list(build.model.parameters())
        norm = float(torch.stack([p.grad.norm() for p in parameters]).norm())
        usual = sum(norms[-20:]) / max(1, len(norms[-20:]))
        norms.append(norm)
        if len(norms) > 20 and norm > 1.3 * usual:
            nn.utils.clip_grad_norm_(parameters, 0.5 * usual)
        following()

    build.wrap(Seam.UPDATE, update)


def decay_ends_with_an_epoch(build, count):
    def batches(following, loader):
        if count.steps:
            for group in build.optimizer.param_groups:
                group["weight_decay"] = 0.0
        return following(loader)

    build.wrap(Seam.BATCHES, batches)


def dropout_ends_with_an_evaluation(build, count):
    def validation(following, loader):
        for module in build.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return following(loader)

    build.wrap(Seam.VALIDATION, validation)


def other_shapes_in_evaluation_mode(build, count):
    """What is not of the usual size is run with BatchNorm's running statistics."""

    def forward(following, batch):
        norm = build.model[1]
        norm.eval() if len(batch[0]) != 16 else norm.train()
        try:
            return following(batch)
        finally:
            norm.train()

    build.wrap(Seam.FORWARD, forward)


def half_of_a_batch_from(number):
    def plant(build, count):
        def place(following, batch):
            placed = following(batch)
            return placed if count.steps < number else [part[: len(part) // 2] for part in placed]

        build.wrap(Seam.PLACE, place)

    return plant


def other_labels_from(number):
    def plant(build, count):
        def place(following, batch):
            inputs, labels = following(batch)
            return [inputs, labels if count.steps < number else labels.roll(1)]

        build.wrap(Seam.PLACE, place)

    return plant


def stale_buffers_after_resume(build, count):
    """After a checkpoint is loaded BatchNorm's statistics stay what they were."""
    stale, taken = {}, [0]

    def step(following, batch):
        if count.steps and not taken[0]:  # the first step of this process is not the run's first
            stale.update({n: b.clone() for n, b in build.model.named_buffers() if "running" in n})
        taken[0] += 1
        loss = following(batch)
        for name, value in stale.items():
            build.model.get_buffer(name).copy_(value)
        return loss

    build.wrap(Seam.STEP, step)


@pytest.mark.parametrize(
    ("defect", "step", "sentence"),
    [
        (slowly_from(30), None, "step 30 was suspect already"),
        (frozen_from(30), 30, "envelopes off, most in the "),
        (every(50), 50, "envelopes off"),
        (spike_guard, None, "envelopes off"),
        (decay_ends_with_an_epoch, 5, "weight_decay of 0.weight is 0.0, and 0.001 in the job"),
        (dropout_ends_with_an_evaluation, 5, "p of 3 (Dropout) is 0.0, and 0.3 in the job"),
        (other_shapes_in_evaluation_mode, 4, ""),
        (half_of_a_batch_from(29), 30, "another batch than the job's data gave"),
        (other_labels_from(29), 30, "another batch than the job's data gave"),
    ],
)
def test_a_late_defect_stops_the_run(plant, watched, dropping, lines, tmp_path, defect, step, sentence):
    with pytest.raises(PromiseBroken, match="does not train the same model") as stopped:
        watched(dropping(epochs=20), plant(defect))
    assert sentence in str(stopped.value)
    found = lines(tmp_path / "run")
    assert found[-1]["watch_kept"] is False
    assert step in (None, found[-1]["step"])
    assert f"step {found[-1]['step']} does not" in str(stopped.value)
    assert stopped.value.exit_code == 1


def test_a_defect_that_a_resumed_run_brings(plant, watched, dropping):
    job, plan = dropping(epochs=5), plant(stale_buffers_after_resume)
    assert watched(job, plan, max_steps=6).watched["kept"]
    with pytest.raises(PromiseBroken, match=r"step 7 .* buffer 1.running_"):
        watched(job, plan, resume=True)


def test_a_stopped_run_goes_on_under_the_reference(plant, watched, dropping, digest, tmp_path):
    """The checkpoint is of the state before the broken step, so that what follows is the reference's run."""
    job, plan = dropping(epochs=10), plant(frozen_from(13))
    vivace.train(job, out=tmp_path / "wanted")
    with pytest.raises(PromiseBroken, match=r"step 13 .*step_12.*--on-broken fallback"):
        watched(job, plan)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_12" / "MANIFEST.json").read_text())
    assert (manifest["broken_step"], manifest["last_watched_step"]) == (13, 12)
    assert "envelopes off" in manifest["broken"]
    with pytest.raises(PromiseBroken, match="step 13 "):
        watched(job, plan, resume=True)
    run = watched(job, plan, resume=True, on_broken="fallback")
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "wanted" / "model.pt")
    assert "step 13 does not train the same model" in run.notices[-1]
    assert vivace.Plan.load(tmp_path / "run" / "plan.toml") == vivace.Plan()


def test_a_resumed_run_tells_what_all_of_its_processes_saw(watched, dropping, lines, tmp_path):
    job, plan = dropping(epochs=5), vivace.Plan.from_dict({"bf16_autocast": {}})
    first = watched(job, plan, max_steps=7).watched
    assert watched(job, plan, resume=True, max_steps=9, watch=0).watched is None
    run = watched(job, plan, resume=True)
    found = lines(tmp_path / "run")
    assert 0 < first["steps"] < len(found) == run.watched["steps"]
    assert run.watched["sentence"].startswith(f"watched {len(found)} steps: same model; worst ")
    assert run.watched["worst"] == max(line["watch_score"] for line in found)
    assert run.watched["between_steps"] > first["between_steps"] > 0
    assert run.watched["seconds"] > first["seconds"]
    told = run.to_dict()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["watched"] == told["watched"]
    shown = vivace.report(tmp_path / "run").read_text()
    assert f"Watched {len(found)} steps: the same model" in shown
    ended = watched(job, plan, resume=True)
    assert ended.watched["steps"] == len(found)


def test_a_broken_step_that_is_taken_again_counts_once(plant, watched, dropping, lines, tmp_path):
    job, plan = dropping(epochs=5), plant(frozen_from(13))
    with pytest.raises(PromiseBroken):
        watched(job, plan)
    with pytest.raises(PromiseBroken, match="the last watched step that trained the same model is 12"):
        watched(job, plan, resume=True)
    run = watched(job, plan, resume=True, on_broken="fallback")
    steps = [line["step"] for line in lines(tmp_path / "run")]
    assert steps.count(13) == 3
    assert run.watched["steps"] == len(set(steps))
    assert run.watched["broken_steps"] == [13]
    later = watched(job, None, resume=True)
    assert later.watched["broken_steps"] == [13]
    assert later.watched["sentence"].startswith(
        f"watched {len(set(steps))} steps: not the same model at 13; "
    )


def test_fallback_takes_the_broken_step_again(plant, watched, dropping, digest, tmp_path):
    job = dropping(epochs=10)
    vivace.train(job, out=tmp_path / "wanted")
    run = watched(job, plant(frozen_from(13)), on_broken="fallback")
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "wanted" / "model.pt")
    assert run.watched["broken_steps"] == [13]
    assert run.watched["kept"] is False
    assert "not the same model at 13" in run.watched["sentence"]


def test_a_fallback_is_known_to_a_run_that_goes_on_from_its_very_checkpoint(plant, watched, dropping):
    def kill(event):
        if event.kind == "checkpoint":
            raise KeyboardInterrupt

    job = dropping(epochs=5)
    with pytest.raises(KeyboardInterrupt):
        watched(job, plant(frozen_from(13)), on_broken="fallback", on_event=kill)
    run = watched(job, None, resume=True)
    assert (run.resumed_from_step, run.plan) == (12, {})
    assert run.watched["broken_steps"] == [13]


def test_who_asks_for_it_goes_on(plant, watched, dropping, digest, tmp_path):
    job, plan = dropping(epochs=6), plant(frozen_from(13))
    run = watched(job, plan, on_broken="ignore")
    vivace.train(job, plan, out=tmp_path / "unwatched", watch=0)
    assert run.steps == 24
    assert run.watched["broken_steps"][0] == 13
    assert [text for text in run.notices if "as you asked" in text]
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "unwatched" / "model.pt")


HEALTHY = [
    ("mlp", "bf16_autocast"),
    ("mlp", "fused_optimizer"),
    ("mlp", "bf16_weights"),
    ("mlp", "optimizer_in_backward"),
    ("mlp", "fp16_autocast"),
    ("cnn", "channels_last"),
    ("cnn", "bf16_autocast channels_last fused_optimizer"),
    ("cnn", "checkpoint"),
    ("lstm", "bf16_weights"),
    ("transformer", "micro_batches"),
    ("transformer", "bf16_autocast fused_optimizer"),
    ("transformer", "bf16_weights"),
    ("transformer", "checkpoint"),
    ("dictionaries", "bf16_autocast"),
]


@pytest.mark.parametrize(("name", "plan"), HEALTHY)
def test_a_healthy_plan_is_kept_and_watching_changes_no_number(watched, tiny, digest, tmp_path, name, plan):
    job, plan = tiny(name, epochs=5), vivace.Plan.from_dict({technique: {} for technique in plan.split()})
    run = watched(job, plan)
    assert run.watched["steps"] >= 15, run.watched["sentence"]
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["not_watched"] == ""
    plain = watched(job, plan, out="plain", watch=0)
    assert plain.watched is None
    assert run.loss == plain.loss
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")


def test_an_optimizer_of_a_part_of_the_model_is_watched_as_another_one(watched, tiny, digest, tmp_path):
    """The gradients of what it does not update are of one step, too."""

    def half(model):
        return torch.optim.SGD(list(model.parameters())[-2:], lr=0.05)

    job, plan = tiny("mlp", epochs=3, optimizer=half), vivace.Plan.from_dict({"bf16_autocast": {}})
    run = watched(job, plan)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 3, run.watched["sentence"]
    watched(job, plan, out="plain", watch=0)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")


def test_random_masks_in_another_order_are_the_same_model(watched, dropping, digest, tmp_path):
    """Dropout over pieces of a batch, and on channels-last pictures, which draws in the order of memory."""
    pictures = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    job = dropping(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.Dropout(0.3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        data=lambda: [(pictures[i : i + 16], torch.arange(16) % 4) for i in (0, 16, 32)],
        metric=None,
        epochs=5,
    )
    plan = vivace.Plan.from_dict({"channels_last": {}, "micro_batches": {"num": 4}, "bf16_autocast": {}})
    run = watched(job, plan)
    assert run.watched["steps"] >= 10, run.watched["sentence"]
    assert run.watched["kept"] is True, run.watched["sentence"]
    watched(job, plan, out="plain", watch=0)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")


def test_dropout_that_is_left_out_is_found(plant, watched, dropping, monkeypatch):
    def silent(build, count):
        def forward(following, batch):
            with monkeypatch.context() as patch:
                if count.steps == 6:
                    patch.setattr(nn.functional, "dropout", lambda input, *_: input)
                return following(batch)

        build.wrap(Seam.FORWARD, forward)

    with pytest.raises(PromiseBroken, match=r"step 7 .* draws no random numbers where the job draws some"):
        watched(dropping(epochs=5), plant(silent))


@pytest.mark.slow
def test_compiled_plans(watched, tiny, digest, tmp_path):
    """They are watched, but for random numbers, which compiled code draws as it will."""
    plan = vivace.Plan.from_dict({"compile": {}, "bf16_autocast": {}})
    run = watched(tiny("cnn", epochs=3), plan)
    assert run.watched["steps"] >= 8, run.watched["sentence"]
    assert run.watched["kept"] is True, run.watched["sentence"]
    watched(tiny("cnn", epochs=3), plan, out="plain", watch=0)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")
    drawing = watched(tiny("transformer", epochs=1), vivace.Plan.from_dict({"compile": {}}), out="drawing")
    assert drawing.watched["sentence"].startswith("not watched: the random numbers that compiled code or a")


def test_a_loss_scale_that_has_to_fall_first_leaves_no_short_run_unwatched(watched, tiny):
    """The first steps are skipped; the first one that is taken is watched, whatever watching may cost."""
    plan = vivace.Plan.from_dict({"fp16_autocast": {"initial_scale": 2.0**24}})
    run = watched(tiny("mlp", epochs=10), plan, watch=1e-9)
    assert run.watched["steps"] == 1, run.watched["sentence"]
    short = watched(tiny("mlp", epochs=1), plan, out="short", watch=1e-9, max_steps=2)
    assert short.watched["sentence"] == (
        "not watched: the loss scale skipped the steps that were to be watched"
    )


def test_shadows_that_are_not_finite_are_named_and_the_job_is_not_said_to_diverge(watched, dropping):
    """Two equal products differ once they are rounded at random, and then nothing is a number."""

    def loss(model, batch):
        first, again = model[0](batch[0]), model[0](batch[0])
        undone = torch.where((first - again).detach() < 0, torch.nan, 0.0).sum()
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1.0 + undone)

    run = watched(dropping(epochs=2, loss=loss), vivace.Plan.from_dict({"bf16_autocast": {}}))
    assert run.loss is not None
    assert run.watched["kept"] is None
    assert run.watched["sentence"] == (
        "not watched: it cannot be judged: a shadow, the job rounded at random, is not finite"
    )


def test_a_run_that_had_ended_says_that_no_step_was_left(watched, tiny):
    plan = vivace.Plan.from_dict({"bf16_autocast": {}})
    watched(tiny("mlp", epochs=1), plan, watch=0)
    again = watched(tiny("mlp", epochs=1), plan, resume=True)
    assert again.watched["sentence"] == "not watched: no step was left to take"


def test_a_short_run_says_what_its_first_step_cost(watched, tiny):
    plan = vivace.Plan.from_dict({"bf16_autocast": {}})
    short = watched(tiny("mlp", epochs=1), plan, watch=1e-9)
    assert short.watched["sentence"].endswith(" %, all of that for the first step")
    assert "first step" not in watched(tiny("mlp", epochs=1), plan, out="dear").watched["sentence"]


def test_what_torch_imports_for_any_training_is_no_cost_of_watching():
    """In a new process, for here it was imported long ago."""
    code = """
import sys, vivace
from vivace.testing.jobs import TINY_JOBS
from vivace.watching import sentinel
before = "torch._dynamo" in sys.modules
sentinel.Twin = lambda *_: print(before, "torch._dynamo" in sys.modules)
plan = vivace.Plan.from_dict({"bf16_autocast": {}})
sentinel.Sentinel(TINY_JOBS["mlp"](), plan, vivace.inspect(), seed=0, ranks=1, on_broken="stop", share=0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_run_that_ends_before_a_suspicion_is_confirmed_is_not_decided(plant, watched, dropping):
    def scale(build, count):
        build.wrap(Seam.FORWARD, lambda following, batch: 1.02 * following(batch))

    seen = watched(dropping(epochs=5), plant(scale), max_steps=3).watched
    assert (seen["steps"], seen["kept"]) == (3, None)
    assert "watched 3 steps: not decided: step 3 was off" in seen["sentence"]


def test_steps_of_which_every_second_is_off_are_no_rare_event(plant, watched, dropping):
    taken = []

    def shorter(build, count):
        def update(following):
            taken.append(1)
            factor = 1.0 if len(taken) % 2 else 0.95
            for group in build.optimizer.param_groups:
                group["lr"] *= factor
            following()
            for group in build.optimizer.param_groups:
                group["lr"] /= factor

        build.wrap(Seam.UPDATE, update)

    def model():
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    with pytest.raises(PromiseBroken, match="was suspect already"):
        watched(dropping(model=model, metric=None, epochs=5), plant(shorter))
    assert len(taken) > 4
