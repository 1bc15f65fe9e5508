"""Ranks on a Ray cluster of two nodes, both on this machine: one is killed, and all are asked to stop."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from vivace.errors import InputError

SCENE = Path(__file__).parent / "scenes" / "on_a_cluster.py"
DDP = "format = 1\n[techniques.ddp]\n"


@pytest.fixture
def command(ray_cluster, tmp_path):
    """``(*options) -> Popen`` of a training on the cluster, as a person types it."""
    (tmp_path / "ddp.toml").write_text(DDP)
    for scene in (SCENE, SCENE.with_name("tiny.py")):
        shutil.copy(scene, tmp_path)
    started = []

    def start(*options):
        words = [sys.executable, "-m", "vivace", "train", f"{tmp_path / SCENE.name}:job", "--json"]
        words += ["--plan", str(tmp_path / "ddp.toml"), "--out", str(tmp_path / "run")]
        words += ["--engine", "ray", "--address", ray_cluster.address, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, env=ray_cluster.environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.fault(6, 11)
@pytest.mark.slow
def test_a_killed_rank_and_a_stop_cost_no_bit(command, launch_ranks, tmp_path, digest, until):
    whole = launch_ranks("job", {"out": str(tmp_path / "whole")}, file=tmp_path / SCENE.name)
    assert [child.wait() for child in whole] == [0, 0]
    for name in ("dies", "holds"):
        (tmp_path / name).touch()
    first = command()
    until(lambda: first.poll() is not None or all((tmp_path / f"waits_{rank}").exists() for rank in (0, 1)))
    first.send_signal(signal.SIGTERM)
    output, errors = first.communicate(timeout=200)
    assert first.returncode == 143, errors
    stopped = json.loads(output)
    assert stopped["interrupted_by"] == "SIGTERM"
    assert stopped["steps"] in (4, 5)  # the ranks agree while they take one more

    (tmp_path / "holds").unlink()
    second = command("--resume", "--ranks", "2")
    output, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    found = json.loads(output)
    kept = stopped["steps"] + 5  # rank 1 died in the sixth step of the second command
    assert (found["resumed_from_step"], found["steps"]) == (kept, 15)
    assert found["notices"] == []
    assert not (tmp_path / "dies").exists()
    (told,) = [line for line in errors.splitlines() if "Ray begins the ranks again, 1 of 3" in line]
    assert "rank 1 (process" in told
    assert f"step_{kept} in" in told
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"engine": "slurm"}, "or with engine ray, not 'slurm'"),
        ({"ranks": 2}, "the number of ranks 2 is for a Ray cluster: give --engine ray"),
        ({"address": "auto"}, "the address 'auto' is for a Ray cluster"),
    ],
)
def test_what_no_cluster_can_do_is_one_sentence(tmp_path, asked, sentence):
    with pytest.raises(InputError, match=sentence):
        vivace.train(f"{SCENE}:job", out=tmp_path / "run", **asked)
    assert not (tmp_path / "run").exists()


def test_without_ray_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("vivace.live.on_ray", "vivace.processes.on_ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InputError, match=r"need Ray: pip install 'vivace\[ray\]'"):
        vivace.train(f"{SCENE}:job", out=tmp_path / "run", engine="ray")
    assert not (tmp_path / "run").exists()
