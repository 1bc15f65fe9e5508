"""`scripts/bench scripts`: pairs in turn, going on where it was stopped, limits, and what is listed."""

import json
import tomllib

import pytest
import scripts

SCRIPT = {"repository": "some/one", "folder": ".", "command": ["python", "train.py"]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "copies/some+one").mkdir(parents=True)
    (tmp_path / "copies/some+one/train.py").write_text(
        "import pathlib\npathlib.Path('mine').touch(exist_ok=False)\n"
    )
    return tmp_path / "copies"


def run(seconds, code=0):
    return {
        "seconds": seconds,
        "cpu_seconds": seconds,
        "code": code,
        "document": {"outcome": "faster"},
        "said": "so",
    }


def test_pairs_alternate_and_go_on_where_they_were_ended(folder, tmp_path, monkeypatch):
    order = []

    def once(folder, script, under):
        order.append(under)
        return run(1.0 if under else 2.0)

    monkeypatch.setattr(scripts, "once", once)
    journal = tmp_path / "runs/one.jsonl"
    assert len(scripts.measured(folder, SCRIPT, 1, journal, 1e12)) == 1
    assert scripts.measured(folder, SCRIPT, 3, journal, 0.0) == [json.loads(journal.read_text())]
    pairs = scripts.measured(folder, SCRIPT, 3, journal, 1e12)
    assert order == [False, True, True, False, False, True]
    found = scripts.summarised(SCRIPT, pairs)
    assert found["ratio"]["estimate"] == pytest.approx(2.0)
    assert "2.00x" in scripts.told(found)
    other = {**SCRIPT, "command": ["python", "other.py"]}
    assert scripts.measured(folder, other, 3, journal, 0.0) == []


@pytest.mark.parametrize(("code", "word"), [(1, "broken"), (scripts.TOO_LONG, "too long")])
def test_a_run_that_ends_otherwise_has_no_ratio(code, word):
    pair = {"alone": run(1.0, code if code < 0 else 0), "under": run(1.0, code), "load": 1.0}
    found = scripts.summarised(SCRIPT, [pair] * 3)
    assert found["ratio"] is None
    assert scripts.told(found).startswith(word)


def test_each_run_is_in_a_fresh_copy_and_has_a_limit(folder):
    for _ in range(2):
        found = scripts.once(folder, SCRIPT, under=False)
        assert found["code"] == 0
        assert found["cpu_seconds"] > 0
    (folder / "some+one/train.py").write_text("import time\ntime.sleep(60)\n")
    assert scripts.once(folder, {**SCRIPT, "limit": 0.5}, under=False)["code"] == scripts.TOO_LONG


def test_the_docstring_lists_every_script_with_its_arguments():
    listed = tomllib.loads(scripts.LISTED.read_text())
    told = {
        line.split()[0]: line
        for line in scripts.__doc__.splitlines()
        if line.startswith("    ") and line.split()
    }
    for name, script in listed.items():
        assert script["repository"] in told[name]
        assert script["command"][1] in told[name]
