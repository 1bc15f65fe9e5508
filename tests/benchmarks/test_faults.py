"""The table of faults: no row without a test, no mark without a row, and results that follow the outcomes."""

import ast
from pathlib import Path

import _faults
import _record
import faults
import pytest

ROOT = Path(__file__).resolve().parents[2]


def marked_rows():
    """The numbers in all marks of the tests, read without importing them."""
    found = set()
    for path in faults.marked_files():
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fault":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def test_every_row_has_a_test_and_every_mark_a_row():
    rows = faults.read_rows()
    assert list(rows) == list(range(1, 43))
    assert marked_rows() == set(rows)


@pytest.mark.parametrize(
    ("row", "outcomes", "result"),
    [
        ({}, ["passed", "passed"], "survived"),
        ({"answer": "refused"}, ["passed"], "refused"),
        ({"left": "half of it"}, ["passed"], "partly"),
        ({}, ["passed", "failed"], "partly"),
        ({"answer": "refused"}, ["failed", "skipped"], "not"),
        ({}, ["skipped"], "not shown"),
        ({}, [], "not shown"),
    ],
)
def test_a_row_comes_to_what_its_tests_say(row, outcomes, result):
    assert faults.result(row, outcomes) == result


def test_outcomes_are_kept_test_by_test_and_not_run_again(tmp_path):
    file = tmp_path / "test_made_up.py"
    file.write_text(
        "import pathlib, pytest\n"
        "@pytest.mark.fault(1, 3)\n"
        "def test_good(record_property):\n"
        "    record_property('kills', 2)\n"
        f"    with pathlib.Path({str(tmp_path / 'ran')!r}).open('a') as file: file.write('x')\n"
        "@pytest.mark.fault(3)\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.fault(2)\n"
        "def test_other(): assert False\n"
    )
    keep = tmp_path / "kept.json"
    outcomes = {}
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", str(ROOT / "pyproject.toml")]
    pytest.main([*options, str(file)], plugins=[faults.Rows({1, 3}, outcomes, keep, 6)])
    outcomes = _record.kept(keep, kills=6) | {
        "test_made_up.py::test_gone": {"rows": [1], "outcome": "failed"}
    }
    pytest.main([*options, str(file)], plugins=[faults.Rows({1, 3}, outcomes, keep, 6)])
    assert (tmp_path / "ran").read_text() == "x"
    rows = faults.read_rows()
    one, two, three = (faults.row_of(number, rows[number], outcomes) for number in (1, 2, 3))
    assert [row["result"] for row in (one, two, three)] == ["survived", "not shown", "partly"]
    assert one["figures"] == {"kills": 2}
    assert faults.figures(faults.total(outcomes.values())) == "2 kills"
    assert faults.counts([one, two, three]) == "1 survived, 1 not shown, 1 partly"


def test_the_page_holds_every_row_and_what_is_left():
    row = {"row": 7, "fault": "a flood", "expected": "dry", "result": "partly", "left": "the cellar"}
    row |= {"figures": {"kills": 1200}, "tests": {"a": {"outcome": "passed"}, "b": {"outcome": "failed"}}}
    record = {
        "date": "2026-01-02",
        "vivace": "9",
        "machine": {"device": "a box", "cores": 2},
        "versions": {"torch": "2"},
        "rows": [row],
        "total": {"kills": 1200, "bytes_lost": 0},
        "seconds": 120,
    }
    text = _faults.page([{**record, "date": "2025-01-01", "rows": []}, record]).replace("\n", " ")
    assert "| 7 | a flood | dry | partly | 1,200 kills | 1 of 2 |" in text
    assert "of 1 rows 1 partly. In all 1,200 kills, 0 bytes lost, in 2 tests" in text
    assert "- 7, a flood: the cellar." in text
    row["tests"]["b"]["outcome"] = "skipped"
    assert "| 1 of 2, 1 skipped |" in _faults.page([record])
    assert "No record yet" in _faults.page([])
