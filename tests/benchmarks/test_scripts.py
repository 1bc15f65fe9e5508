"""`scripts/bench scripts`: pairs in turn, going on where it was stopped, limits, and what is listed."""

import contextlib
import csv
import json
import tomllib

import _script_data
import psutil
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
    with journal.open("a") as file:
        file.write('{"record": "pair", "comm')  # a kill tore it
    pairs = scripts.measured(folder, SCRIPT, 3, journal, 1e12)
    assert order == [False, True, True, False, False, True]
    found = scripts.summarised(SCRIPT, pairs)
    assert found["ratio"]["estimate"] == pytest.approx(2.0)
    assert "2.00x" in scripts.told(found)
    other = {**SCRIPT, "command": ["python", "other.py"]}
    assert scripts.measured(folder, other, 3, journal, 0.0) == []
    monkeypatch.setattr(scripts, "where", lambda: {"vivace": "another"})
    assert scripts.measured(folder, SCRIPT, 3, journal, 0.0) == []


def test_vivace_is_compiled_before_it_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(scripts.sys, "dont_write_bytecode", True)
    (tmp_path / "module.py").write_text("VALUE = 1\n")
    scripts.as_installed(tmp_path)
    assert list(tmp_path.glob("__pycache__/module.*.pyc"))


@pytest.mark.parametrize(("code", "word"), [(1, "broken"), (scripts.TOO_LONG, "too long")])
def test_a_run_that_ends_otherwise_has_no_ratio(code, word):
    for alone in (0, code):
        pair = {"alone": run(1.0, alone), "under": run(1.0, code), "load": 1.0}
        found = scripts.summarised(SCRIPT, [pair] * 3)
        assert found["ratio"] is None
        assert scripts.told(found).startswith(word)


def test_each_run_is_in_a_fresh_copy_and_has_a_limit(folder):
    for _ in range(2):
        found = scripts.once(folder, SCRIPT, under=False)
        assert found["code"] == 0
        assert found["cpu_seconds"] > 0
    (folder / "some+one/train.py").write_text(
        "import pathlib, subprocess\nother = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(folder / 'other')!r}).write_text(str(other.pid))\nother.wait()\n"
    )
    assert scripts.once(folder, {**SCRIPT, "limit": 2.0}, under=False)["code"] == scripts.TOO_LONG
    with contextlib.suppress(psutil.NoSuchProcess):  # what a script started goes with it
        psutil.Process(int((folder / "other").read_text())).wait(60)


def test_what_a_script_reads_is_made_beside_its_copy(folder):
    (folder / "some+one/train.py").write_text(
        "import os, pathlib\nassert os.environ['MODE'] == 'quiet'\nassert not pathlib.Path('.git').exists()\n"
        "assert len(pathlib.Path('texts/one.txt').read_text().split()) >= 500\n"
    )
    (folder / "some+one/.git").mkdir()
    wanted = {"makes": {"texts/one.txt": {"kind": "text", "words": 500}}, "environment": {"MODE": "quiet"}}
    assert scripts.once(folder, {**SCRIPT, **wanted}, under=False)["code"] == 0


def test_tables_and_pictures_hold_what_they_were_asked_for(tmp_path):
    _script_data.make("image_folder", tmp_path / "pictures", trained=16, held_out=8, pixels=32)
    assert len(list((tmp_path / "pictures/train").glob("*/*.jpg"))) == 16
    assert len({path.parent.name for path in (tmp_path / "pictures/val").glob("*/*.jpg")}) == 8
    _script_data.make("labelled_lines", tmp_path / "lines", trained=100, held_out=20)
    written = (tmp_path / "lines/train.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(written.splitlines()))
    assert [row["label"] for row in rows].count("1") == 50
    _script_data.make("sentence_pairs", tmp_path / "pairs", trained=30, held_out=5)
    assert len((tmp_path / "pairs/mrpc/validation.jsonl").read_text(encoding="utf-8").splitlines()) == 5


def test_a_package_that_is_missing_is_named(folder, tmp_path, monkeypatch, capsys):
    listed = tmp_path / "scripts.toml"
    listed.write_text("""[one]
repository = "some/one"
folder = "."
command = ["python", "train.py"]
packages = ["json", "no_such_package"]
""")
    monkeypatch.setattr(scripts, "LISTED", listed)
    monkeypatch.setattr("sys.argv", ["scripts", str(folder), "one"])
    scripts.main()
    assert "pip install no_such_package\n" in capsys.readouterr().out
    listed.write_text(listed.read_text().replace(', "no_such_package"', "").replace("some/one", "some/other"))
    scripts.main()
    assert f"needs a copy of some/other in '{folder / 'some+other'}'\n" in capsys.readouterr().out


def test_every_script_that_is_listed_reads_a_known_kind():
    listed = tomllib.loads(scripts.LISTED.read_text())
    for script in listed.values():
        assert {wanted["kind"] for wanted in script.get("makes", {}).values()} <= set(_script_data.MAKERS)


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
