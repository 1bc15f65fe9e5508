"""Jobs as strangers write them, against the public surface only: tuned, verified, trained."""

import ast
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

import vivace
from vivace.inspection import inspect
from vivace.job import load
from vivace.plan import Plan
from vivace.technique import Stage, registry
from vivace.tensors.precision import autocasts_lstm
from vivace.testing import variants
from vivace.testing.contract import process_flags, training_device

FOLDER = Path(__file__).parent / "strangers"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
TUNED = ("dict_batches", "slow_loader", "gan")  # batches of their own, a slow loader, a step of its own
BUDGET_SECONDS = 6
DEVICE = training_device(inspect()).type
STEPS = 2

# What a technique cannot know before the model runs is the model's own exception, not a refusal.
OWN_FAULTS = {
    ("dict_batches", "bf16_weights"): "same dtype",  # the model calls .float() between its layers
    ("inner_checkpointing", "bf16_weights"): "same dtype",  # backward computes with the person's weights
    ("sparse_embedding", "bf16_weights"): "layout",
    ("ragged", "micro_batches"): "more than 1 value per channel",
}


def reference(name):
    """``file.py:name`` of a stranger's Job, or of the function that returns it."""
    path = FOLDER / f"{name}.py"
    defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    return f"{path}:{'make' if 'make' in defined else 'job'}"


def state_keys(built):
    if isinstance(built, torch.nn.Module):
        return set(built.state_dict())
    return {(key, name) for key, model in built.items() for name in model.state_dict()}


def saved_keys(saved):
    nested = {(key, name) for key, item in saved.items() if isinstance(item, dict) for name in item}
    return nested or set(saved)


def test_the_page_shows_a_strangers_average_of_weights():
    page = (Path(__file__).parents[1] / "docs" / "train.md").read_text(encoding="utf-8")
    (shown,) = (block for block in page.split("```python\n")[1:] if "class Averaged" in block)
    assert shown.partition("```")[0] in (FOLDER / "averaged_weights.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNED)
def test_tune_verify_train(name, tmp_path, hurried):
    result = vivace.tune(reference(name), budget=BUDGET_SECONDS, out=tmp_path / "tune")
    assert Plan.load(tmp_path / "tune" / "plan.toml") == result.plan
    assert all(trial.reason for trial in result.trials if trial.status != "measured")
    if len(result.plan):
        assert result.speedup.low > 1
        assert result.verdict.kept
    run = vivace.train(reference(name), result.plan, out=tmp_path / "train", max_steps=2)
    assert run.steps == 2
    assert math.isfinite(run.loss)
    saved = torch.load(tmp_path / "train" / "model.pt", weights_only=True)
    assert saved_keys(saved) == state_keys(load(reference(name)).model())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TUNED])
def test_training_resumes_bit_for_bit(name, tmp_path, one_thread):
    """Through the end of an epoch too: generators, closures, schedulers of both kinds, sparse gradients."""
    whole = vivace.train(reference(name), out=tmp_path / "whole", max_steps=9)
    vivace.train(reference(name), out=tmp_path / "parts", max_steps=4)
    parts = vivace.train(reference(name), out=tmp_path / "parts", max_steps=9, resume=True)
    assert parts.resumed_from_step == 4
    assert (parts.steps, parts.epochs, parts.loss) == (whole.steps, whole.epochs, whole.loss)
    one, other = (torch.load(tmp_path / run / "model.pt", weights_only=True) for run in ("whole", "parts"))
    assert saved_keys(one) == state_keys(load(reference(name)).model())
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "kept"),
    [
        ("lstm_language", {"loader_workers": {"num_workers": 1}}, True),
        ("gan", {"loader_workers": {"num_workers": 1}}, True),
        ("dict_batches", {"fused_optimizer": {}}, True),
        ("slow_loader", {"channels_last": {}}, True),
        ("frozen_part", {"bf16_weights": {}}, True),
        ("generator_batches", {"bf16_autocast": {}}, True),
        ("graph_batches", {"bf16_weights": {}}, True),
    ],
)
def test_verify(name, plan, kept):
    verdict = vivace.verify(reference(name), Plan.from_dict(plan))
    assert verdict.kept == kept, verdict.reason


def test_a_buffer_that_is_moved_once_a_piece_is_for_the_metric_to_judge():
    with pytest.raises(vivace.JobError, match="has no metric"):
        vivace.verify(reference("own_buffers"), Plan.from_dict({"micro_batches": {"num": 2}}))


def act(name, plan):
    """A few steps under a plan through the public `attach`; '' or the reason of a refusal."""
    torch.manual_seed(0)
    job = load(reference(name))
    built = job.model()
    models = [built] if isinstance(built, torch.nn.Module) else list(built.values())
    for model in models:
        model.to(training_device(inspect())).train()
    optimizer = job.optimizer(built)
    flags, keys = process_flags(), state_keys(built)
    form = (
        {"model": built, "optimizer": optimizer, "loss": job.loss, "on_gradients": job.on_gradients}
        if job.step is None
        else {"models": models, "step": lambda batch: job.step(built, optimizer, batch)}
    )
    try:
        with vivace.attach(plan, **form) as session:
            losses = [session.step(batch) for batch in islice(session.batches(job.data()), STEPS)]
    except vivace.Refused as refused:
        return str(refused)
    finally:
        assert process_flags() == flags
        assert state_keys(built) == keys
    assert all(math.isfinite(float(loss)) for loss in losses)
    assert all(value.dtype != torch.bfloat16 for model in models for value in model.state_dict().values())
    return ""


def techniques(compiled):
    """Vivace's own for this device; other tests plant techniques that crash."""
    own = [cls for cls in map(registry.find, registry.own_names()) if DEVICE in cls.card.devices]
    return [cls for cls in own if (cls.card.stage == Stage.COMPILE) == compiled]


@pytest.mark.parametrize("name", NAMES)
def test_every_technique_acts_or_refuses(name, one_thread):
    acted = set()
    for cls in techniques(compiled=False):
        plan = Plan([variants(cls)[-1 if cls.name == "cpu_threads" else 0]])
        try:
            reason = act(name, plan)
        except (RuntimeError, ValueError) as error:
            assert OWN_FAULTS.get((name, cls.name), "no fault is expected") in str(error)  # noqa: PT017
            continue
        if not reason:
            acted.add(cls.name)
        assert not reason or reason.startswith(f"{cls.name}: "), reason
    assert "host_allocator" in acted
    refuses = name == "double_precision" or (name == "lstm_language" and not autocasts_lstm())
    assert ("bf16_autocast" in acted) != refuses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dataclass_batches", "tied_weights", "own_buffers", "multi_output", "ragged"]
)
def test_compiled_jobs_train(name, one_thread):
    (cls,) = techniques(compiled=True)
    assert act(name, Plan([cls()])) == ""
