"""What is kept between two runs of a benchmark: whole or not at all, and never another machine's."""

import errno
import json
import os
import sys
from types import SimpleNamespace

import _record
import fold_eval
import pytest
import real_loops
import sweep
import verdicts

from vivace.errors import FolderError


def test_what_was_kept_comes_back(tmp_path):
    path = tmp_path / "rows.json"
    assert _record.kept(path) is None
    assert _record.kept(None) is None
    _record.keep(None, [1])
    _record.keep(path, [{"seconds": 1.5}])
    assert _record.kept(path) == [{"seconds": 1.5}]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.parametrize("other", ["machine", "vivace"])
def test_what_another_machine_or_version_measured_is_not_taken_over(other, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    _record.keep(path, [1])
    elsewhere = {**_record.where(), other: "another"}
    monkeypatch.setattr(_record, "where", lambda: elsewhere)
    with pytest.raises(SystemExit, match="on another machine, under other versions or with other options"):
        _record.kept(path)


def test_what_was_measured_with_other_options_is_not_taken_over(tmp_path):
    path = tmp_path / "rows.json"
    _record.keep(path, [1], steps=200)
    assert _record.kept(path, steps=200) == [1]
    for options in ({"steps": 1800}, {}):
        with pytest.raises(SystemExit, match="with other options: name another file"):
            _record.kept(path, **options)


def test_a_record_goes_on_with_the_newest_of_its_kind_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    record = {"job": "one", "machine": {"fingerprint": "f"}, "versions": {"torch": "2.15"}}
    same = ("machine", "versions")
    assert _record.newest_like(record | {"date": "2026-01-04"}, same) is None
    for date, versions in (("01", "2.15"), ("02", "2.15"), ("03", "2.16")):
        _record.write(record | {"date": f"2026-01-{date}", "versions": {"torch": versions}})
    assert _record.newest_like(record | {"date": "2026-01-04"}, same)["date"] == "2026-01-02"


def test_another_line_of_vivace_is_another_vivace(tmp_path, monkeypatch):
    monkeypatch.setattr(_record.vivace, "__file__", str(tmp_path / "__init__.py"))
    found = []
    for text in ("VALUE = 1\n", "VALUE = 2\n"):
        (tmp_path / "module.py").write_text(text)
        found.append(_record.where.__wrapped__())
    assert found[0] != found[1]
    assert found[0]["machine"] == found[1]["machine"]


def test_a_search_that_was_cut_off_ends_the_benchmark(tmp_path, monkeypatch):
    cut_off = SimpleNamespace(interrupted=True, exit_code=130)
    monkeypatch.setattr(_record.vivace, "tune", lambda *_, **__: cut_off)
    with pytest.raises(SystemExit, match="130"):
        _record.tuned("job", 60, tmp_path)
    whole = SimpleNamespace(interrupted=False)
    monkeypatch.setattr(_record.vivace, "tune", lambda *_, **__: whole)
    assert _record.tuned("job", 60, tmp_path) is whole


def test_a_record_of_nothing_and_one_of_a_part_are_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    for benchmark in (verdicts, real_loops):
        monkeypatch.setattr(benchmark, "try_out", lambda *_: pytest.fail("nothing may be measured"))
    for benchmark, words in ((verdicts, ["input_read"]), (verdicts, ["--no-gain"]), (real_loops, [])):
        monkeypatch.setattr("sys.argv", [benchmark.__name__, *words, "--record"])
        with pytest.raises(SystemExit):
            benchmark.main()
        assert "--record writes the rows of all" in capsys.readouterr().err
    monkeypatch.setattr(fold_eval, "timed", lambda name: {"difference": 0.0})
    for words, there in ((["resnet50"], False), ([], True)):
        monkeypatch.setattr("sys.argv", ["fold_eval", *words])
        assert fold_eval.main() == 0
        assert bool(list(tmp_path.rglob("*.json"))) is there


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    record = {"job": "one", "machine": {"fingerprint": "f"}, "date": "2026-01-01"}
    _record.write({**record, "rows": [1]})
    path = _record.path_of(record)
    before = path.read_text(encoding="utf-8")
    full = OSError(errno.ENOSPC, "the disk is full")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(FolderError, match="cannot be written"):
        _record.write({**record, "rows": [1, 2]})
    assert path.read_text(encoding="utf-8") == before
    assert list(path.parent.iterdir()) == [path]


def test_stacks_that_were_measured_otherwise_today_are_not_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sweep, "stacks", lambda cells, record, seconds: cells.setdefault("mlp x 16", seconds))
    monkeypatch.setattr(sys, "argv", ["sweep", "stacks", "--seconds", "0.01"])
    for _ in range(2):
        sweep.main()
    monkeypatch.setattr(sys, "argv", ["sweep", "stacks"])
    with pytest.raises(SystemExit, match="today's record is of another command: put"):
        sweep.main()
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text())["cells"] == {"mlp x 16": 0.01}
