"""What is kept between two runs of a benchmark: whole or not at all, and never another machine's."""

import errno
import os

import _record
import pytest

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
    with pytest.raises(SystemExit, match="on another machine or under other versions: name another file"):
        _record.kept(path)


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
