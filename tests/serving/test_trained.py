"""Weights come from a run's checkpoints, as numbers alone, where their hashes hold."""

import hashlib
import json
import pickle
import shutil

import pytest
import torch

from vivace.errors import CheckpointError, InputError
from vivace.job import load
from vivace.serving.trained import load_trained
from vivace.training.checkpoints import _digest


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


def test_a_flipped_byte_is_not_loaded(run):
    job, folder = run
    for file in folder.glob("checkpoints/step_*/model.pt"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        load_trained(job, folder)


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
    with pytest.raises(CheckpointError, match="another job"):
        load_trained(load(reference), run[1])


def test_a_folder_without_a_run(tmp_path, run):
    with pytest.raises(InputError, match="no training that has ended"):
        load_trained(run[0], tmp_path)
