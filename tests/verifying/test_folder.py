"""The examination by others: a folder of cases is judged as its files say."""

import time
from pathlib import Path

import _folder
import pytest

from vivace.errors import InputError
from vivace.ledger import Ledger

EXAMPLE = Path(_folder.__file__).with_name("folder_example")


def test_the_example_is_judged_as_it_says_and_goes_on_where_it_stopped(tmp_path):
    partial = tmp_path / "ruler-folder_example.jsonl"
    ledger = Ledger(partial)
    assert _folder.examine(EXAMPLE, ledger, time.monotonic() - 1.0, fresh=False) is None
    record = _folder.examine(EXAMPLE, ledger, time.monotonic() + 1e6, fresh=False)
    assert record["folder"] == "folder_example"
    assert record["caught"] == {"count": 2, "of": 2}, record
    assert record["false_alarms"] == {"count": 0, "of": 1}, record
    assert {entry["name"] for entry in ledger.read("judgement")} == {
        "clipping_lost",
        "loss_by_hand",
        "head_scaled",
    }
    before = partial.read_text()
    assert _folder.examine(EXAMPLE, ledger, time.monotonic() - 1.0, fresh=False) == record
    assert partial.read_text() == before


def test_what_is_missed_or_wrongly_broken_or_open_is_named(tmp_path):
    answers = ("kept", "failed", "broken", "unjudged", "refused")
    done = [
        {"name": f"{expect}_{answer}", "expect": expect, "answer": answer, "reason": "x"}
        for expect in ("different", "same")
        for answer in answers
    ]
    record = _folder.summarise(tmp_path, done)
    assert record["caught"] == {"count": 1, "of": 3}
    assert record["missed"] == ["different_kept", "different_failed"]
    assert record["false_alarms"] == {"count": 2, "of": 3}
    assert len(record["open"]) == 4


def test_a_file_that_does_not_say_what_is_right_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no job file"):
        list(_folder.cases(tmp_path))
    (tmp_path / "silent.py").write_text("import vivace\n# expect: same\n")
    with pytest.raises(InputError, match="must begin with '# expect: different' or '# expect: same'"):
        list(_folder.cases(tmp_path))
