"""Crafted manifests, states and ledgers: skipped with a reason, whatever they hold."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vivace.errors import CheckpointError
from vivace.training.checkpoints import MANIFEST, Checkpoints, Position, _digest

FACTS = {"plan_id": "x", "plan": "format = 1", "job": ["data: list"], "seed": 0, "course": {"epochs": "1"}}
KEYS = ("format", "files", "position", *FACTS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints and the manifest of the newer one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder, FACTS)
    state = {"optimizer": {}, "scheduler": None, "techniques": None, "streams": [None]}
    for step in (1, 2):
        checkpoints.save(Position(step=step), {"weight": torch.ones(2)}, state)
    return checkpoints, json.loads((folder / "step_2" / MANIFEST).read_text())


def newest(checkpoints, manifest):
    """The checkpoint that is taken where a newer one has this manifest, with a digest that holds."""
    crafted = {key: value for key, value in manifest.items() if key != "digest"}
    crafted["digest"] = _digest(crafted)
    (checkpoints.folder / "step_2" / MANIFEST).write_text(json.dumps(crafted))
    found = checkpoints.newest()
    assert found is not None
    if found.path.name == "step_1":
        (reason,) = found.skipped
        assert reason.startswith("step_2: ")
    return found


@pytest.mark.fault(33)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3), st.sets(st.sampled_from(KEYS)))
def test_a_crafted_manifest_is_skipped_or_can_be_used(saved, bad_input, changes, missing):
    bad_input()
    checkpoints, manifest = saved
    crafted = {key: value for key, value in {**manifest, **changes}.items() if key not in missing}
    found = newest(checkpoints, crafted)
    assert isinstance(found.position.step, int)
    assert found.manifest["plan"] == str(found.manifest["plan"])


@pytest.mark.fault(33)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(tuple(vars(Position()))), JSON)
def test_a_crafted_position_is_skipped_or_can_be_used(saved, bad_input, key, value):
    bad_input()
    checkpoints, manifest = saved
    found = newest(checkpoints, {**manifest, "position": {**manifest["position"], key: value}})
    assert all(type(getattr(found.position, name)) is int for name in ("step", "epoch", "batch", "log_bytes"))


@pytest.mark.fault(31)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_a_manifest_of_any_bytes_is_skipped(saved, bad_input, content):
    bad_input()
    checkpoints, _ = saved
    (checkpoints.folder / "step_2" / MANIFEST).write_bytes(content)
    assert checkpoints.newest().path.name == "step_1"


@pytest.mark.fault(32)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()), min_size=1)
)
def test_a_ledger_of_any_bytes_says_that_there_was_something(tmp_path_factory, bad_input, lines):
    bad_input()
    folder = Path(tmp_path_factory.getbasetemp(), "lost")
    folder.mkdir(exist_ok=True)
    ledger = folder.parent / "saved.jsonl"
    ledger.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CheckpointError, match="are gone"):
        Checkpoints(folder, FACTS, ledger).newest()
