"""The proof of `vivace run` is examined on a loop that trains: planted defects and right plans."""

import importlib

import _evidence
import pytest
import torch

from vivace.live.proof import Verdict
from vivace.technique import registry


@pytest.fixture
def live_proof(monkeypatch):
    """The benchmark, with a few of its plans; the defects that it registers are known only in these tests."""
    known, num_threads = dict(registry._registered), torch.get_num_threads()
    found = importlib.import_module("live_proof")
    registry._registered.update(found.defects.REGISTERED)
    planted = ["defect_smallest_gradient_zeroed", "defect_upwards", "defect_decay_lost"]
    monkeypatch.setattr(found, "LIVE", planted)
    monkeypatch.setattr(found.defects, "PLANTED", [])
    monkeypatch.setattr(found.defects, "FURTHER", [])
    monkeypatch.setattr(found, "right_plans", lambda *_: [{"fused_optimizer": {}}])
    yield found
    registry._registered.clear()
    registry._registered.update(known)
    torch.set_num_threads(num_threads)


def test_defects_are_refused_right_plans_may_act_and_the_record_counts_both(live_proof):
    judged = live_proof.examine("mlp", 0, 3)
    answers = {entry["plan"]: entry["answer"] for entry in judged}
    assert answers["fused_optimizer"] == "let through"
    assert answers["defect_smallest_gradient_zeroed"] == answers["defect_upwards"] == "refused"
    assert answers["bf16_autocast + defect_upwards"] == "refused"
    assert answers["defect_decay_lost"] == "cannot act", "Adam has no weight decay there"
    found = live_proof.summarise(judged)
    assert found["caught"] == {"count": 4, "of": 4, "rate": 1.0}
    assert found["false_alarms"] == {"count": 0, "of": 1, "rate": 0.0}
    (row,) = _evidence.live_proof(found, "README.md")
    assert row[0].startswith("2 kinds of defects")
    assert row[1] == "4 of 4; 0 of 1; of the ruler's milder kinds, 0 of 0"


def test_what_is_let_through_is_named(live_proof, monkeypatch):
    monkeypatch.setattr(live_proof.Proof, "judge", lambda *_: Verdict(True, score=1.5))
    found = live_proof.summarise(live_proof.examine("mlp", 0, 0))
    assert found["caught"]["count"] == 0
    assert found["let_through"][0] == "mlp_0, step 0: defect_smallest_gradient_zeroed (1.5)"
