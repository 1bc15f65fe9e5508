"""Weights come from a run's checkpoints, as numbers alone, where their hashes hold."""

import dataclasses
import hashlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vivace.compressing.worker import Worker
from vivace.errors import CheckpointError, InputError, Refused
from vivace.job import load
from vivace.plan import Plan
from vivace.serving import making
from vivace.serving.calls import Flat
from vivace.serving.forms import BY_NAME
from vivace.serving.judge import Judge
from vivace.serving.maker import Maker
from vivace.serving.material import Material
from vivace.serving.planned import under_plan
from vivace.serving.trained import load_trained, run_of
from vivace.training.checkpoints import _digest
from vivace.training.training import train

SCENES = Path(__file__).parents[1] / "scenes"


@pytest.fixture
def run(trained, tmp_path):
    reference, folder = trained("job")
    shutil.copytree(folder, tmp_path / "run")
    return load(reference), tmp_path / "run"


def test_the_weights_of_the_run_and_where_they_come_from(run):
    job, folder = run
    model, facts = load_trained(job, folder)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    assert not model.training
    assert facts.step == 8
    file = next(folder.glob(f"checkpoints/step_{facts.step}/model.pt"))
    assert facts.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert facts.metric == json.loads((folder / "run.json").read_text())["metric"]


def test_what_a_run_drew_is_drawn_again(tmp_path):
    """Directions of the model that are no weights, and which samples are held out."""
    reference = f"{SCENES / 'served.py'}:drawing"
    done = train(reference, out=tmp_path / "run", seed=7)
    judge = Judge(load(reference), str(tmp_path / "run"), str(tmp_path))
    assert judge.record()["metric"] == pytest.approx(done.metric)
    assert judge.trained.seed == 7


def test_a_flipped_byte_is_not_loaded(run):
    job, folder = run
    for file in folder.glob("checkpoints/step_*/model.pt"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        load_trained(job, folder)


def test_an_older_checkpoint_is_not_taken_for_a_newer_one_that_is_damaged(run):
    job, folder = run
    shutil.copytree(folder / "checkpoints" / "step_8", folder / "checkpoints" / "step_9")
    file = folder / "checkpoints" / "step_9" / "model.pt"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"the newest checkpoint of '.*' cannot be trusted \(step_9: "):
        load_trained(job, folder)
    shutil.rmtree(file.parent)
    (folder / "run.json").write_text(json.dumps({**run_of(folder), "steps": 12}))
    assert load_trained(job, folder)[1].metric is None, "that is of other weights"


@pytest.mark.parametrize("text", ["no json", 100_000 * "["], ids=["text", "deep"])
def test_a_run_that_is_no_json_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run.json' is damaged: it is no JSON"):
        run_of(tmp_path)


def test_no_code_runs_from_a_strangers_run(run, tmp_path):
    job, folder = run
    planted = tmp_path / "planted"

    class Strange:
        def __reduce__(self):
            return (type(planted).touch, (planted,))

    for checkpoint in folder.glob("checkpoints/step_*"):
        file, manifest = checkpoint / "model.pt", checkpoint / "MANIFEST.json"
        file.write_bytes(pickle.dumps(Strange()))
        content = json.loads(manifest.read_text())
        del content["digest"]
        content["files"]["model.pt"] = {
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "bytes": file.stat().st_size,
        }
        manifest.write_text(json.dumps({**content, "digest": _digest(content)}))
    with pytest.raises(CheckpointError, match="more than numbers"):
        load_trained(job, folder)
    assert not planted.exists()


def test_a_run_of_another_job(run, trained):
    reference, _ = trained("mapping")
    with pytest.raises(CheckpointError, match=r"another job\?\).*: .*key\(s\)"):
        load_trained(load(reference), run[1])


def test_a_folder_without_a_run(tmp_path, run):
    with pytest.raises(InputError, match="no training that has ended"):
        load_trained(run[0], tmp_path)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
        self.last.weight = self.words.weight


def test_weights_that_are_tied_are_written_by_each_of_their_names(run, tmp_path):
    job, folder = run
    Judge(job, str(folder), str(tmp_path)).record()
    maker, model = Maker(job, str(folder), str(tmp_path), torch.get_num_threads()), Tied()
    maker.material.flat.model = model
    maker.weights(str(tmp_path / "weights.safetensors"))
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == model.state_dict().keys()
    Tied().load_state_dict(stored)


IMAGES = torch.linspace(-1.0, 2.0, 2 * 36).reshape(2, 1, 6, 6)


@pytest.mark.parametrize("own_step", [False, True])
def test_a_trained_model_runs_as_a_step_under_its_plan_does(run, own_step):
    job, folder = run
    flat = Flat(load_trained(job, folder)[0], ((IMAGES,), {})).eval()
    (plain,) = (tensor.detach() for tensor in flat(IMAGES))
    if own_step:
        job = dataclasses.replace(job, loss=None, step=lambda model, optimizer, batch: None)
    heard = []
    flat.model[0].register_forward_hook(lambda *given: heard.append(given[-1].dtype))
    serve = under_plan(job, Plan.from_dict({"bf16_autocast": {}, "channels_last": {}}), flat)
    with torch.no_grad():
        (found,) = serve(IMAGES)
    assert heard == [torch.bfloat16]
    assert found.dtype == torch.float32
    assert 0.0 < float((found - plain).abs().max()) < 0.1
    assert not flat.model.training


def test_a_plan_that_cannot_act_on_one_process_is_refused(run):
    job, folder = run
    flat = Flat(load_trained(job, folder)[0], ((IMAGES,), {})).eval()
    with pytest.raises(Refused):
        under_plan(job, Plan.from_dict({"ddp": {}}), flat)


def test_the_plan_of_the_run_is_what_is_timed(run, tmp_path, monkeypatch):
    job, folder = run
    monkeypatch.setitem(sys.modules, "theirs", object())  # no module, and has no names
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "plan": {"bf16_autocast": {}}}))
    Judge(job, str(folder), str(tmp_path)).record()
    worker = Worker(job, str(folder), str(tmp_path), torch.get_num_threads())
    heard = []
    worker.material.flat.model[0].register_forward_hook(lambda *given: heard.append(given[-1].dtype))
    worker.open("trained_plan", str(tmp_path), 4, 16)
    worker.warm(0.0)
    worker.block(3)
    assert set(heard) == {torch.bfloat16}
    times = worker.latencies()
    assert times["calls"] == 3
    assert times["p50"] <= times["p99"]
    assert 4 / times["p99"] <= times["samples_per_second"] <= 4 / min(worker._times)


def test_torch_compile_as_it_comes_freezes_nothing(monkeypatch):
    frozen, compiled = [], []
    monkeypatch.setattr(making, "freeze_weights", lambda: frozen.append(True))
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options))
    material = Material(Flat(torch.nn.Linear(2, 2), ((torch.ones(1, 2),), {})), None, None)
    making.in_process(BY_NAME["compiled_default"], material)
    assert (frozen, compiled) == ([], [{}])
