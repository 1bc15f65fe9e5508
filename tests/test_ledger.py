"""The ledger: what cannot be constructed, what survives the file, and torn lines."""

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.errors import FolderError
from vivace.files import finite
from vivace.ledger import Code, Ledger, Ratio, Trial

BASE = {"techniques": {"channels_last": {}}, "plan_id": "a" * 12, "machine": "m", "job": "j"}
MEASURED = Trial(
    **BASE, status="measured", ratio=Ratio(2.0, 1.9, 2.1), pairs=((0.2, 0.1),) * 6, predicted=(1.0, 3.0)
)


def test_a_trial_without_a_paired_reference_cannot_be_constructed():
    with pytest.raises(AssertionError, match="paired"):
        Trial(**BASE, status="measured", ratio=Ratio(2.0, 1.9, 2.1))
    with pytest.raises(AssertionError, match="paired"):
        Trial(**BASE, status="measured", pairs=((0.2, 0.1),))
    with pytest.raises(AssertionError, match="reason"):
        Trial(**BASE, status="refused")


@pytest.mark.fault(37)
def test_a_trial_that_says_too_little_is_not_built_upon(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    names = {"techniques": {}, "plan_id": "x", "machine": "m", "job": "j"}
    for status in ("measured", "failed"):
        ledger.append("trial", {**names, "status": status})
    assert ledger.trials() == []


NUMBERS = st.none() | st.integers() | st.floats() | st.text(max_size=4)


@settings(deadline=None, max_examples=30)  # each waits for the disk
@given(NUMBERS | st.lists(NUMBERS, max_size=4) | st.dictionaries(st.text(max_size=4), NUMBERS, max_size=4))
def test_a_line_is_json_that_every_reader_takes(value):
    def refuse(constant):
        raise AssertionError(constant)

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        ledger.append("verdict", {"value": value})
        json.loads(ledger.path.read_bytes().decode(), parse_constant=refuse)
        assert ledger.read() == [{"record": "verdict", "value": finite(value)}]


def test_numbers_that_are_not_finite_are_none():
    content = {"checks": [{"score": math.inf, "value": math.nan, "seeds": 8}], "pair": (1.5, -math.inf)}
    assert finite(content) == {"checks": [{"score": None, "value": None, "seeds": 8}], "pair": [1.5, None]}


def test_trials_survive_the_file_and_a_torn_line_is_ignored(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    refused = Trial(**BASE, status="refused", reason="the model has no 2-D convolution")
    for trial in (MEASURED, refused):
        ledger.append("trial", trial.to_dict())
    ledger.append("run", {"command": "x"})
    with ledger.path.open("a") as file:
        file.write('{"record": "trial", "techn')
    assert ledger.trials() == [MEASURED, refused]
    assert ledger.read("run")[0]["command"] == "x"
    ledger.append("run", {"command": "y"})  # not the rest of the torn one
    assert [run["command"] for run in ledger.read("run")] == ["x", "y"]


@pytest.mark.fault(29)
def test_a_ledger_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(FolderError, match="cannot be written"):
        Ledger(tmp_path / "no" / "ledger.jsonl").append("run", {})


def test_a_trial_of_an_older_ledger_has_no_code():
    document = MEASURED.to_dict()
    coded = Trial(**BASE, status="failed", reason="no answer", code=Code.TIMED_OUT)
    assert Trial.from_dict(json.loads(json.dumps(coded.to_dict()))) == coded
    del document["code"], document["foreign_share"]
    assert Trial.from_dict(document).code is Code.NONE


@pytest.mark.parametrize(
    ("ratio", "candidate", "steps"),
    [
        (Ratio(2.0, 1.9, 2.1), 0.1, 30.0),
        (Ratio(0.5, 0.4, 0.6), 0.4, math.inf),
        (Ratio(1.1, 0.9, 1.3), 0.1, None),  # noise may be all of it
    ],
)
def test_a_warm_up_is_gained_back_after_so_many_steps(ratio, candidate, steps):
    """By the middle of the differences within pairs: a machine that slows down changes both of a pair."""
    pairs = ((0.2, candidate), (2.2, 2.0 + candidate), (4.2, 4.0 + candidate))
    trial = dataclasses.replace(MEASURED, ratio=ratio, pairs=pairs, warmup_seconds=3.0)
    assert trial.break_even_steps == (steps if steps is None else pytest.approx(steps))
    assert dataclasses.replace(trial, warmup_seconds=None).break_even_steps is None


def test_what_another_version_wrote_is_read_as_far_as_it_is_known(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for more in ({"later": 1}, {"code": "of a later version"}, {"ratio": {"middle": 2.0}}):
        ledger.append("trial", {**MEASURED.to_dict(), **more})
    assert ledger.trials() == [MEASURED]


def test_a_name_that_is_no_text_is_kept_as_far_as_it_is_one(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("run", {"command": os.fsdecode(b"vivace tune \xff.py")})
    assert ledger.read("run")[0]["command"] == "vivace tune ?.py"


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [(Ratio(1.5, 1.3, 1.7), 1.5), (Ratio(20.4, 1.1, 340.0), 1.1), (Ratio(2.0, 0.5, 8.0), 2.0)],
)
def test_a_wide_interval_above_one_counts_by_its_lower_end(ratio, counts):
    assert ratio.counts == counts
