"""Sweeps on a Ray cluster of two nodes, both on this machine: places that are lost, Ctrl-C, going on."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import vivace
from vivace.errors import InputError

JOBS = Path(__file__).parent / "jobs.py"

on_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture
def cluster(ray_cluster):
    return ray_cluster


def wait_for(condition, what, seconds=90):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def begun(cluster, out, *arguments):
    """A sweep of six slow trials that has been started."""
    command = [sys.executable, "-m", "vivace", "sweep", f"{JOBS}:troubled", "trouble=slow", "lr=0.1..1"]
    command += ["epochs=2", "--trials", "6", "--seeds", "0", "--out", str(out), "--json", *arguments]
    return subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def states(out, state):
    journal = out / "study.journal"
    return journal.read_text().count(f'"state":{state}') if journal.exists() else 0


@on_ray
def test_a_lost_place_costs_no_trial_and_what_stops_it_keeps_the_best(cluster, tmp_path):
    out = tmp_path / "out"
    on_it = ("--engine", "ray", "--address", cluster.address)
    sweep = begun(cluster, out, *on_it)
    try:
        lost = wait_for(lambda: next(places(cluster), None), "no trial began")
        lost.kill()
        wait_for(lambda: states(out, 1) >= 2, "two trials did not end")
        assert {path.name for path in out.iterdir()} >= {"ray", "study.journal"}
    finally:
        first = stopped(cluster, sweep, signal.SIGTERM)
    assert first["workers"] == 2
    assert "on 2 nodes" in first["device"]
    assert not (out / "ray").exists()

    sweep = begun(cluster, out, "--resume", *on_it)
    try:
        wait_for(lambda: states(out, 1) >= 4, "two more trials did not end")
    finally:
        second = stopped(cluster, sweep, signal.SIGINT)

    sweep = begun(cluster, out, "--resume")  # an engine is no part of a sweep: it goes on without the cluster
    output, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, errors
    last = json.loads(output)
    assert [trial["number"] for trial in last["trials"]] == list(range(6))
    assert {trial["state"] for trial in last["trials"]} == {"complete"}
    assert len({trial["parameters"]["lr"] for trial in last["trials"]}) == 6
    assert all(list(trial["curve"]) == ["1", "2"] for trial in last["trials"])
    assert ended(first).items() <= ended(second).items() <= ended(last).items()


def stopped(cluster, sweep, how):
    """What a sweep says that is asked to stop."""
    sweep.send_signal(how)
    output, errors = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, errors
    found = json.loads(output)
    assert found["best"]
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "open"}
    wait_for(lambda: not list(places(cluster)), "a trial outlives its sweep")
    return found


def ended(found):
    return {trial["number"]: trial["metric"] for trial in found["trials"] if trial["state"] == "complete"}


def places(cluster):
    """The processes of Ray that run a trial."""
    for node in cluster.nodes:
        for process in psutil.Process(node.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if process.cmdline()[0].startswith("ray::") and process.children():
                    yield process


@on_ray
@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "no Ray cluster at '127.0.0.1:1'"),
        ("127.0.0.1", "auto, on one of its nodes, or its head's HOST:PORT, not '127.0.0.1'"),
        ("ray://127.0.0.1:1", "HOST:PORT, not 'ray://127.0.0.1:1'"),
    ],
)
def test_where_no_cluster_is_it_is_one_sentence(tmp_path, address, sentence):
    with pytest.raises(InputError, match=sentence):
        vivace.sweep(f"{JOBS}:job", ["lr=0..1"], out=tmp_path / "out", engine="ray", address=address)


@on_ray
def test_trials_share_what_the_cluster_has():
    from vivace.sweeping.cluster import shares_of

    processors = [{"CPU": 8.0}, {"CPU": 4.0}]
    assert shares_of(processors, None) == ((12, 1), {"cpu": 1})
    assert shares_of(processors, 3) == ((3, 4), {"cpu": 4})
    assert shares_of(processors, 1) == ((1, 4), {"cpu": 4})  # more than the smaller node has would wait there
    assert shares_of(processors, 24) == ((24, 1), {"cpu": 0.5})
    cards = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}]
    assert shares_of(cards, None) == ((2, 4), {"cpu": 4, "gpu": 1})
    assert shares_of(cards, 4) == ((4, 2), {"cpu": 2, "gpu": 0.5})


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"engine": "dask"}, "engine ray, not 'dask'"),
        ({"address": "auto"}, "give --engine ray"),
    ],
)
def test_what_no_engine_is_is_one_sentence(tmp_path, asked, sentence):
    with pytest.raises(InputError, match=sentence):
        vivace.sweep(f"{JOBS}:job", ["lr=0..1"], out=tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_without_ray_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "vivace.sweeping.cluster", raising=False)
    with pytest.raises(InputError, match=r"needs Ray: pip install 'vivace\[ray\]'"):
        vivace.sweep(f"{JOBS}:job", ["lr=0..1"], out=tmp_path / "out", engine="ray")
    assert not (tmp_path / "out").exists()
