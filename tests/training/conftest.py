"""Trainings in child processes of the fork server."""

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import runpy
import signal
import time
from pathlib import Path

import pytest
import torch

SCENES = Path(__file__).parent / "scenes"
TINY = SCENES / "tiny.py"


@dataclasses.dataclass
class Child:
    process: multiprocessing.Process
    answer_path: Path

    def wait(self, seconds=60):
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the child hangs"
        return self.process.exitcode

    @property
    def answer(self):
        return json.loads(self.answer_path.read_text())


@pytest.fixture
def launch(start_scene, tmp_path, record_property):
    """``(job, **scene) -> Child``: train in a child process, see scenes/child.py."""
    numbers = itertools.count()
    children = []

    def start(job="job", arguments=None, file=TINY, **scene):
        answer = tmp_path / f"answer_{next(numbers)}.json"
        scene |= {"job": f"{file}:{job}", "arguments": arguments or {}, "answer": str(answer)}
        children.append(start_scene(SCENES / "child.py", SCENE=scene))
        return Child(children[-1], answer)

    yield start
    record_property("kills", sum(child.exitcode == -signal.SIGKILL for child in children))
    for child in children:
        if child.is_alive():
            child.kill()
            child.join()


@pytest.fixture
def train_in_child(launch):
    """``(out, **scene) -> (exit code, answer or None)``: one training, to its end or its death."""

    def run(out, job="job", *, resume=False, every=2, arguments=None, **scene):
        found = {"out": str(out), "resume": resume, "checkpoint_every_steps": every, **(arguments or {})}
        child = launch(job, found, **scene)
        code = child.wait()
        return code, child.answer if child.answer_path.exists() else None

    return run


def weights_digest(path):
    """sha256 over all tensors of a saved state_dict, by key."""
    digest = hashlib.sha256()
    for name, tensor in sorted(torch.load(path, weights_only=True).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def launch_ranks(launch, places):
    """``(job, arguments, num, **scene) -> [Child]``: the ranks of one launch, each a child process."""

    def start(job, arguments, num=2, *, plan="format = 1\n[techniques.ddp]\n", environment=None, **scene):
        each = [{**place, **(environment or {})} for place in places(num)]
        return [launch(job, arguments, environment=place, plan=plan, **scene) for place in each]

    return start


def wait_for(condition, seconds=600):
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def digest():
    return weights_digest


@pytest.fixture
def until():
    return wait_for


@pytest.fixture(scope="session")
def tiny():
    from types import SimpleNamespace

    return SimpleNamespace(**runpy.run_path(str(TINY)))


@pytest.fixture(scope="session")
def reference(start_scene, tmp_path_factory):
    """The weights of the tiny job's uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference")
    arguments = {"out": str(folder / "run"), "checkpoint_every_steps": 2}
    scene = {"job": f"{TINY}:job", "arguments": arguments, "answer": str(folder / "answer.json")}
    child = start_scene(SCENES / "child.py", SCENE=scene)
    child.join(60)
    assert child.exitcode == 0, (folder / "answer.json").read_text()
    return weights_digest(folder / "run" / "model.pt")
