"""Faults at random times and in odd places: what was trained is kept, to the last byte."""

import errno
import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from vivace.training import keeping
from vivace.training.progress import Progress
from vivace.training.training import train

SCENES = Path(__file__).parent / "scenes"
TINY = SCENES / "tiny.py"
KINDS = ("slow", "workers", "two_models")


def bytes_of(path):
    """Every tensor of a saved file, by its place, as bytes."""
    found = {}

    def walk(place, thing):
        if isinstance(thing, torch.Tensor):
            found[place] = bytes(thing.contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(thing, dict):
            for key, value in thing.items():
                walk(f"{place}.{key}", value)
        elif isinstance(thing, list):
            for index, value in enumerate(thing):
                walk(f"{place}.{index}", value)

    walk("", torch.load(path, weights_only=True))
    return found


def files_of(run):
    """The weights at the end of a run, and all else that its last checkpoint holds."""
    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return {**bytes_of(run / "model.pt"), **bytes_of(last / "state.pt")}


def newest_step(run):
    """The step of a run's newest checkpoint; 0 before the first."""
    names = [path.name.removeprefix("step_") for path in (run / "checkpoints").glob("step_*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def lost(run, whole):
    """How many bytes of two runs' ends were compared, and how many differ."""
    mine, theirs = files_of(run), files_of(whole)
    assert mine.keys() == theirs.keys()
    pairs = [(mine[name], theirs[name]) for name in theirs]
    differing = sum(sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs)
    return sum(len(one) for _, one in pairs), differing


@pytest.mark.fault(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_random_times_lose_no_byte(kind, launch, tmp_path, request, record_property, until):
    options = {"checkpoint_every_steps": 1}
    assert launch(kind, {"out": str(tmp_path / "whole"), **options}).wait() == 0
    left, draw = max(1, request.config.getoption("--kills") // len(KINDS)), random.Random(kind)
    torn = num = compared = differing = 0
    while left:
        out, num = tmp_path / f"run_{num}", num + 1
        ended = False
        while not ended:
            child = launch(kind, {"out": str(out), "resume": True, **options})
            target = newest_step(out) + draw.randint(0, 4) if left else math.inf
            until(lambda: newest_step(out) >= target or child.process.exitcode is not None, 100)  # noqa: B023
            time.sleep(draw.uniform(0.0, 0.04) if left else 0.0)
            ended = child.process.exitcode is not None
            if not ended:
                child.process.kill()
                ended = child.wait() != -signal.SIGKILL
                left -= not ended
                torn += any(".tmp." in path.name for path in (out / "checkpoints").glob("*"))
        assert child.process.exitcode == 0, child.answer
        found = lost(out, tmp_path / "whole")
        compared, differing = compared + found[0], differing + found[1]
    record_property("torn_checkpoints", torn)
    record_property("bytes_compared", compared)
    record_property("bytes_lost", differing)
    assert differing == 0 < compared


@pytest.mark.fault(10, 11)
def test_kills_of_ranks_at_random_times_lose_no_byte(launch_ranks, tmp_path, request, record_property, until):
    """Sometimes one of two ranks, sometimes both at once; the one that is left saves what was trained."""
    arguments = {"out": str(tmp_path / "whole"), "checkpoint_every_steps": 5}
    assert [child.wait() for child in launch_ranks("long", arguments)] == [0, 0]
    arguments |= {"out": str(tmp_path / "run"), "resume": True}
    kills, draw = max(1, request.config.getoption("--kills") // 6), random.Random(2)
    steps = sorted(draw.sample(range(1, 11), min(kills, 10)))
    for number, step in enumerate(steps):
        children = launch_ranks("long", arguments)
        until(lambda step=step: (tmp_path / "run" / "checkpoints" / f"step_{5 * step}").exists(), 60)
        time.sleep(draw.uniform(0.0, 0.1))
        for child in children[number % 2 :]:
            child.process.kill()
        assert children[1].wait() == -signal.SIGKILL
        children[0].wait()
    assert [child.wait() for child in launch_ranks("long", arguments)] == [0, 0]
    compared, differing = lost(tmp_path / "run", tmp_path / "whole")
    record_property("bytes_compared", compared)
    record_property("bytes_lost", differing)
    assert differing == 0 < compared


@pytest.mark.fault(8)
def test_a_save_that_is_slower_than_the_grace_costs_only_itself(launch, tmp_path, until, digest, reference):
    out = tmp_path / "run"
    arguments = {"out": str(out), "resume": True, "checkpoint_every_steps": 2}
    assert launch("job", {**arguments, "max_steps": 4}).wait() == 0
    child = launch(
        "slow", {**arguments, "checkpoint_every_steps": 100}, environment={"VIVACE_FAULT": "slow_write"}
    )
    until(
        lambda: '"step": 5' in (out / "metrics.jsonl").read_text() or child.process.exitcode is not None, 20
    )
    os.kill(child.process.pid, signal.SIGTERM)
    until(lambda: list((out / "checkpoints").glob("*.tmp.*")))
    child.process.kill()  # as torchrun and Slurm do once the grace is over
    child.wait()
    resumed = launch("job", arguments)
    assert (resumed.wait(), resumed.answer["resumed_from_step"]) == (0, 4)
    assert digest(out / "model.pt") == reference


@pytest.mark.fault(8)
def test_a_save_that_takes_longer_than_torchruns_grace_is_told_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "GRACE_SECONDS", 0.0)
    assert train(tiny.job, out=tmp_path / "alone").notices == ()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    (notice,) = train(tiny.job, out=tmp_path / "run", checkpoint_every_steps=5).notices
    assert notice.startswith(
        "a checkpoint took 0 s, and torchrun kills a rank 0 s after it was asked to stop"
    )


@pytest.mark.fault(25)
def test_an_infinite_gradient_of_one_rank_is_taken_back_on_all(launch_ranks, tmp_path, digest):
    arguments = {"out": str(tmp_path / "run"), "checkpoint_every_steps": 3}
    children = launch_ranks("job", arguments, file=SCENES / "infinite.py")
    assert [child.wait() for child in children] == [0, 0]
    notices = [child.answer["notices"] for child in children]
    assert all("back to step 3; from here on every number is checked" in one[0] for one in notices)
    arguments["out"] = str(tmp_path / "clean")
    assert [child.wait() for child in launch_ranks("job", arguments)] == [0, 0]
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "clean" / "model.pt")


@pytest.mark.fault(29)
def test_a_log_on_a_full_disk_stops_no_training(tiny, tmp_path, monkeypatch):
    def full(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Progress, "_append", full)
    run = train(tiny.job, out=tmp_path / "run")
    (notice,) = run.notices
    assert notice.endswith("(No space left on device): training goes on without it")
    assert (run.steps, (tmp_path / "run" / "model.pt").is_file()) == (tiny.STEPS, True)


@pytest.mark.fault(34)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(launch_ranks, launch, tmp_path, before, after):
    out = str(tmp_path / "run")

    def part(num, **more):
        arguments = {"out": out, "checkpoint_every_steps": 2, **more}
        children = launch_ranks("job", arguments, num) if num > 1 else [launch("job", arguments)]
        assert [child.wait() for child in children] == [0] * num
        return children[0].answer

    assert part(before, max_steps=4)["steps"] == 4
    answer = part(after, resume=True)
    assert (answer["resumed_from_step"], answer["steps"]) == (4, 15)
    (notice,) = answer["notices"]
    assert notice.startswith("resumed, not bit-exact: ")
    assert f"world_size {before} -> {after}" in notice


@pytest.mark.fault(40)
def test_a_clock_that_jumps_changes_nothing(tiny, tmp_path, monkeypatch, digest):
    wall, jumps = time.time, iter([1e9, -1e9, 1e9] * 100)

    def loss(model, batch):
        by = next(jumps)
        monkeypatch.setattr(time, "time", lambda: wall() + by)
        return tiny.loss(model, batch)

    train(tiny.make(loss=loss), out=tmp_path / "run", checkpoint_every_seconds=1e-6)
    monkeypatch.setattr(time, "time", wall)
    train(tiny.job, out=tmp_path / "clean")
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "clean" / "model.pt")


@pytest.mark.fault(42)
def test_a_process_that_is_stopped_for_a_while_goes_on(launch, tmp_path, until, digest, reference):
    out = tmp_path / "run"
    child = launch("slower", {"out": str(out)})
    until(lambda: (out / "plan.toml").exists())
    os.kill(child.process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    assert child.process.exitcode is None
    os.kill(child.process.pid, signal.SIGCONT)
    assert child.wait() == 0
    assert child.answer["notices"] == []
    assert digest(out / "model.pt") == reference
    assert json.loads((out / "run.json").read_text())["steps"] == 15
