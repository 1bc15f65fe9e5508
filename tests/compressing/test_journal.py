"""What a search leaves behind as it goes on, and who may go on with it."""

import dataclasses

import pytest

from vivace.compressing.journal import Journal
from vivace.compressing.result import Tried
from vivace.errors import InputError
from vivace.ledger import Ratio

ASKED = {"weights": "ab12", "batch": 1}
KEPT = Tried(
    "onnx_fp32", "", "onnx", "fp32", "kept", ratio=Ratio(2.0, 1.9, 2.1), checks=({"output": "output"},)
)
BUSY = Tried("openvino_fp32", "", "openvino", "fp32", "unmeasured", "others were busy")


def test_what_was_tried_comes_back_and_what_was_not_measured_does_not(tmp_path):
    journal = Journal(tmp_path / "forms.jsonl", ASKED)
    assert journal.recall() == []
    journal.add(BUSY)
    journal.add(KEPT)
    assert Journal(tmp_path / "forms.jsonl", ASKED).recall() == [KEPT]


def test_a_line_that_a_kill_has_cut_is_forgotten(tmp_path):
    path = tmp_path / "forms.jsonl"
    journal = Journal(path, ASKED)
    journal.begin()
    journal.add(KEPT)
    path.write_text(path.read_text() + '{"name": "openv')
    assert journal.recall() == [KEPT]
    journal.add(BUSY)
    assert Journal(path, ASKED).recall() == [KEPT]


@pytest.mark.parametrize(
    "damaged",
    [
        b"null",
        b"[1]",
        b'"kept"',
        b'{"name": "onnx_fp32"}',
        b'{"ratio": null}',
        b'{"name": "ope\xff',
        b"[" * 10**5,
    ],
)
def test_a_line_that_is_damaged_is_forgotten_and_those_behind_it_are_not(tmp_path, damaged):
    path = tmp_path / "forms.jsonl"
    journal = Journal(path, ASKED)
    journal.begin()
    path.write_bytes(path.read_bytes() + damaged + b"\n")
    journal.add(KEPT)
    assert journal.recall() == Journal(path, ASKED).recall() == [KEPT]


def test_a_form_that_this_version_does_not_know_is_forgotten(tmp_path):
    journal = Journal(tmp_path / "forms.jsonl", ASKED)
    journal.begin([dataclasses.replace(KEPT, name="onnx_fp3"), KEPT])
    assert journal.recall() == [KEPT]


def test_another_search_is_not_gone_on_with(tmp_path):
    Journal(tmp_path / "forms.jsonl", ASKED).begin()
    with pytest.raises(InputError, match="has batch 1, not 8: resume it with what was asked then"):
        Journal(tmp_path / "forms.jsonl", {**ASKED, "batch": 8}).recall()
    Journal(tmp_path / "forms.jsonl", {**ASKED, "metric": 0.93}).begin()
    with pytest.raises(InputError, match=r"has metric 0\.93, not 0\.95"):
        Journal(tmp_path / "forms.jsonl", {**ASKED, "metric": 0.95}).recall()
    for first in ("[1]\n", '{"asked": {"wei\n', "null\n{}\n"):
        (tmp_path / "forms.jsonl").write_text(first)
        with pytest.raises(InputError, match="not what vivace compress wrote"):
            Journal(tmp_path / "forms.jsonl", ASKED).recall()
        assert (tmp_path / "forms.jsonl").read_text() == first
