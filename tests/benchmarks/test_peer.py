"""The comparison with other libraries: its arithmetic, its steps, and a dry run without any of them."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import _record
import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, start
from vivace.session.session import Session
from vivace.technique import registry
from vivace.testing.jobs import mlp

PEER = """
import contextlib, types, torch

class Result:
    scaler, config = None, types.SimpleNamespace(fused_opt=False, precision="fp32_default")
    autocast = staticmethod(contextlib.nullcontext)

    def __init__(self, model, optimizer, loss):
        self.model, self.optimizer, self.loss = model, optimizer, loss

    def step(self, inputs, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss

def autotune(model, batch, loss_fn, optimizer, device, verbose, budget, cache):
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return Result(model, optimizer(model.parameters()), loss_fn)
"""


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def peer():
    known = set(registry._registered)
    sys.path.insert(0, str(BENCHMARKS))  # before folders of jobs that other tests have loaded
    sys.modules.pop("jobs", None)
    import peer

    yield peer
    sys.path.remove(str(BENCHMARKS))
    for name in set(registry._registered) - known:
        del registry._registered[name]
    for name in ("peer", "peer_child", "peer_timing", "peer_jobs", "jobs"):
        sys.modules.pop(name, None)


@pytest.fixture
def child(peer):
    return sys.modules["peer_child"]


@pytest.fixture
def timing(peer):
    return sys.modules["peer_timing"]


def ratio(estimate, low, high):
    return {"estimate": estimate, "low": low, "high": high}


def test_the_geometric_mean_of_ratios_narrows_as_independent_ones_do(peer):
    assert peer.geometric_mean([None]) is None
    mean = peer.geometric_mean([ratio(2.0, 1.0, 4.0), None, ratio(8.0, 8.0, 8.0)])
    assert mean == pytest.approx(ratio(4.0, 4.0 / 2**0.5, 4.0 * 2**0.5))
    four = peer.geometric_mean([ratio(1.0, 0.5, 2.0)] * 4)
    assert four == pytest.approx(ratio(1.0, 0.5**0.5, 2.0**0.5))


def test_the_best_one_liner_is_the_fastest_of_all_but_vivace(peer):
    rows = {"vivace": {"ratio": ratio(3.0, 2.9, 3.1)}, "peer": {"status": "failed"}, "fabric": {}}
    assert peer.fastest_other(rows) == ""
    entry = {"best": "", "vivace_against_best": None}
    assert peer.best(entry) == "one-liners not measured"
    rows |= {"fabric": {"ratio": ratio(1.2, 0.9, 1.6)}, "compile": {"ratio": ratio(1.3, 1.2, 1.4)}}
    assert peer.fastest_other(rows) == "compile"
    entry = {"best": "compile", "vivace_against_best": ratio(0.9, 0.8, 0.99)}
    assert peer.best(entry) == "the best one-liner, torch.compile, 0.90x (0.80-0.99)"
    assert peer.behind_beyond_noise(entry)
    assert not peer.behind_beyond_noise(entry | {"vivace_against_best": ratio(0.9, 0.8, 1.01)})


def test_ratios_pair_the_turns_of_each_set_of_processes(timing):
    def turns(slowness):
        return [{"strict_fp32": slowness * d, "peer": slowness * d / 2} for d in (1.0, 1.1, 0.9, 1.0, 1.2)]

    warm = {"strict_fp32": 0.0, "peer": 3.0}
    heats = [timing.Heat(turns(s), 0, warm, {"vivace": ("failed", "it died")}) for s in (1.0, 5.0, 2.0)]
    rows = timing.ratios(heats, "strict_fp32")
    assert rows["peer"]["ratio"] == pytest.approx(ratio(2.0, 2.0, 2.0))
    assert rows["peer"]["warmup_seconds"] == 3.0
    assert rows["vivace"] == {"status": "failed", "reason": "it died"}
    heats[0].failures.clear()
    heats[1].failures.clear()
    heats[2].failures["peer"] = ("failed", "it died late")
    rows = timing.ratios(heats, "strict_fp32")  # two heats of three are no ratio of it
    assert rows["peer"] == {"status": "failed", "reason": "it died late"}


def test_a_record_names_no_folder_and_holds_no_infinity(peer):
    before = {"reason": "no file /tmp/some/where.cpp", "scores": [1.0, float("inf")], "kept": (True,)}
    after = {"reason": "no file where.cpp", "scores": [1.0, None], "kept": [True]}
    assert _record.clean(before) == after


def test_an_optimizer_that_the_peer_has_a_word_for_goes_by_that_word(child):
    parameters = nn.Linear(2, 2).parameters
    word = child.own_word(torch.optim.Adam(parameters(), lr=0.002))
    assert word == {"optimizer": "adam", "lr": 0.002}
    assert child.own_word(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))["optimizer"] == "sgd"
    assert child.own_word(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)) is None
    assert child.own_word(torch.optim.AdamW(parameters(), lr=0.1, betas=(0.9, 0.95))) is None


def test_a_search_that_overruns_is_interrupted_and_one_that_does_not_is_left_alone(child):
    with pytest.raises(KeyboardInterrupt), child.interrupted_after(0.01):
        time.sleep(5)
    with child.interrupted_after(60.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def trained(job, plan):
    """The parameters after a few steps; whatever happens, the session is closed."""
    session = start(job, plan, inspect())
    try:
        torch.manual_seed(1)
        for batch in first_batches(call(job, "data"), 4):
            session.step(batch)
        return [p.detach().clone() for p in session.build.models[0].parameters()]
    finally:
        Session.close(session)


@pytest.mark.parametrize("clipped", [False, True], ids=["own step", "clipped"])
def test_the_step_of_the_peer_trains_the_job_as_it_is(child, clipped, monkeypatch, tmp_path, one_thread):
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    job = dataclasses.replace(mlp(), on_gradients=clip if clipped else None)
    (tmp_path / "pytorch_autotune.py").write_text(PEER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pytorch_autotune", raising=False)
    monkeypatch.setattr("vivace.job.load", lambda reference: job)
    flags = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark
    plain, theirs = trained(job, Plan()), trained(job, Plan([child.PeerResult(job="job")]))
    monkeypatch.delitem(sys.modules, "pytorch_autotune")
    assert all(torch.equal(a, b) for a, b in zip(plain, theirs, strict=True))
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark) == flags


def test_a_library_that_is_missing_is_refused_by_name(child, monkeypatch):
    monkeypatch.setattr(child, "importable", lambda module: False)
    for kind in (child.PeerResult, child.FabricBf16, child.AccelerateBf16):
        with pytest.raises(Refused, match=f"{kind.label} is not installed"):
            start(mlp(), Plan([kind()]), inspect())


def test_where_no_environment_can_be_made_it_goes_on_and_says_so(peer, monkeypatch, capsys):
    def offline(*_):
        raise subprocess.CalledProcessError(1, "install")

    monkeypatch.setattr(peer, "make_environment", offline)
    monkeypatch.setattr(peer.os, "execv", lambda *_: pytest.fail("there is nothing to enter"))
    peer.enter_environment()
    assert "without pytorch-autotune" in capsys.readouterr().err


def test_every_job_has_a_name_and_every_name_a_job(peer):
    import peer_jobs

    assert {name for name, value in vars(peer_jobs).items() if isinstance(value, Job)} == set(peer.JOBS)


def test_rows_of_other_versions_do_not_join_todays_record(peer, monkeypatch, tmp_path):
    monkeypatch.setattr(peer._record, "RECORDS", tmp_path)  # jobs that other tests load may leave another one
    monkeypatch.setattr(peer, "importable", lambda module: True)
    record = peer.opened(inspect())
    record["versions"]["pytorch-autotune"] = "0.0.1"
    peer._record.write(record)
    monkeypatch.setattr("sys.argv", ["peer.py", "gpt"])
    with pytest.raises(SystemExit, match="today's record is of another pytorch-autotune"):
        peer.main()


def test_an_entry_of_other_code_is_told_and_measured_anew_by_name(peer, monkeypatch, tmp_path, capsys):
    entry = {"vivace_against_best": None, "vivace_against_peer": None, "contestants": {}, "best": ""}
    monkeypatch.setattr(peer._record, "RECORDS", tmp_path)
    monkeypatch.setattr(peer, "importable", lambda module: True)
    monkeypatch.setattr(peer, "JOBS", ("gpt",))
    monkeypatch.setattr(peer, "compared", lambda *_: dict(entry))
    record = peer.opened(inspect())
    record["jobs"]["gpt"] = entry  # as records of before are: it says of no code
    peer._record.write(record)

    def gpt():
        return json.loads(peer._record.path_of(record).read_text())["jobs"]["gpt"]

    monkeypatch.setattr("sys.argv", ["peer.py"])
    peer.main()
    assert "gpt: measured with other code, and left as it is unless" in capsys.readouterr().err
    assert gpt() == entry
    monkeypatch.setattr("sys.argv", ["peer.py", "gpt"])
    peer.main()
    assert gpt()["vivace"] == peer._record.where()["vivace"]
    capsys.readouterr()
    peer.main()
    assert "other code" not in capsys.readouterr().err


def test_a_dry_run_without_the_peers(peer, monkeypatch, tmp_path):
    everybody = peer.contestants

    def without_compile(*arguments):
        return {name: entry for name, entry in everybody(*arguments).items() if name != "compile"}

    found = {"plan": {"fused_optimizer": {}}, "tuner_reason": "", "tuner_seconds": 0.0, "trials": []}
    monkeypatch.setattr(peer, "tuned", lambda *_: found)
    monkeypatch.setattr(peer, "contestants", without_compile)
    monkeypatch.setattr(peer, "importable", lambda module: False)
    monkeypatch.setattr(peer, "HEATS", 1)
    machine = inspect()
    record = peer.opened(machine)
    record["jobs"]["mlp"] = entry = peer.compared("vivace.testing.jobs:mlp", machine, 6.0)
    rows = entry["contestants"]
    assert rows["vivace"]["ratio"]["low"] > 0
    assert rows["vivace"]["verdict"]["kept"] is True
    assert entry["vivace_against_peer"] is None
    assert entry["vivace_against_best"] is None
    for name in ("peer", "fabric", "accelerate"):
        assert rows[name]["status"] == "not installed"
        assert f"{rows[name]['reason']}" in peer.table(record)
    assert str(tmp_path.parent) not in json.dumps(_record.clean(record), allow_nan=False)


def test_padded_sequences_end_where_their_texts_do_and_padding_is_not_looked_at(peer):
    import peer_jobs

    tokens, labels = peer_jobs.sentences(6, 32).tensors
    lengths = (tokens != peer_jobs.MASK).sum(1)
    assert 8 <= lengths.min() < lengths.max() <= 32
    assert all((row[:size] != 0).all() for row, size in zip(tokens, lengths, strict=True))
    assert labels.max() < peer_jobs.NUM_CLASSES
    torch.manual_seed(0)
    model = peer_jobs.Classifier(32, 64, num_layers=1, num_heads=4).eval()
    shortest = int(lengths.argmin())
    padded, alone = tokens[shortest : shortest + 1], tokens[shortest : shortest + 1, : lengths[shortest]]
    assert torch.allclose(model(padded), model(alone), atol=1e-5)


def test_boxes_hold_what_was_drawn_and_the_detector_learns_from_them(peer):
    import peer_jobs

    pixels, targets = peer_jobs.boxed_images(4, 48).tensors
    boxes, labels = targets[..., :4], targets[..., 4]
    assert (boxes >= 0).all()
    assert (boxes <= 48).all()
    assert (boxes[..., 2:] > boxes[..., :2]).all()
    assert labels.unique().min() == -1
    model = peer_jobs.fcos.Detector(peer_jobs.NUM_CLASSES, width=8, depth=1)
    peer_jobs.boxes_loss(model, (pixels, targets)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_recommender_sees_every_pair_of_features_once(peer):
    import peer_jobs

    rows, labels = peer_jobs.clicks(64).tensors
    categories = rows[:, peer_jobs.NUM_COUNTS :]
    assert categories.shape == (64, peer_jobs.NUM_CATEGORIES)
    assert 0 <= categories.min() <= categories.max() < peer_jobs.NUM_ROWS
    assert 0 < labels.mean() < 1
    model = peer_jobs.Recommender(8)
    pairs = {frozenset(pair) for pair in zip(model.first.tolist(), model.second.tolist(), strict=True)}
    assert len(pairs) == len(model.first) == 27 * 26 // 2
    assert model(rows).shape == (64,)
