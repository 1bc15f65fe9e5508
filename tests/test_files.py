"""Files of ours in folders that a stranger has filled with links."""

import errno
import fcntl
import os
import shutil
from types import SimpleNamespace

import pytest

import vivace
from vivace.errors import FolderError
from vivace.files import (
    is_leftover,
    own_folder,
    read_own,
    replace_file,
    replace_text,
    require_page,
    take_lock,
)
from vivace.ledger import Ledger
from vivace.training.folder import RunFolder
from vivace.training.progress import Progress


@pytest.fixture
def mine(tmp_path):
    """A file of the person's own, which nothing may change."""
    path = tmp_path / "mine"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_link_is_replaced_and_not_followed(folder, mine):
    for name in ("report.html", "report.html.part", "report.html.tmp"):
        (folder / name).symlink_to(mine)
    replace_text(folder / "report.html", "<p>\udcff</p>")
    assert (folder / "report.html").read_text() == "<p>?</p>"
    assert not (folder / "report.html").is_symlink()


@pytest.mark.fault(41)
def test_a_report_of_a_strangers_folder_writes_there_only(folder, mine):
    Ledger(folder / "metrics.jsonl").append("step", {"step": 1, "loss": 1.0})
    for name in ("report.html", "report.html.part", "report.html.tmp"):
        (folder / name).symlink_to(mine)
    assert vivace.report(folder).read_text().startswith("<!doctype html>")


def test_a_failure_leaves_the_old_file_and_no_other(folder):
    replace_text(folder / "file", "old")

    def fail(file):
        file.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(FolderError, match="cannot be written: No space left on device"):
        replace_file(folder / "file", fail)
    assert [item.name for item in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "old"


@pytest.mark.parametrize(("free", "reason"), [(4096, os.strerror(errno.ENOSPC)), (2**40, "unexpected pos 7")])
def test_a_full_disk_is_called_so_where_torch_does_not(folder, monkeypatch, free, reason):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def fail(file):
        raise RuntimeError("unexpected pos 7")

    with pytest.raises(FolderError, match=f"'{folder / 'file'}' cannot be written: {reason}"):
        replace_file(folder / "file", fail)


@pytest.mark.fault(29)
def test_a_plan_cannot_be_written_is_a_sentence(folder):
    with pytest.raises(FolderError, match=r"gone/plan\.toml' cannot be written: No such file or directory"):
        vivace.Plan().save(folder / "gone" / "plan.toml")


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_ledger_is_a_file(what, folder, mine):
    path = folder / "ledger.jsonl"
    match what:
        case "link":
            path.symlink_to(mine)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(FolderError, match=f"'{path}' (is|cannot)|the ledger '{path}' cannot"):
        Ledger(path).append("run", {})
    with pytest.raises((FolderError, OSError)):
        Ledger(path).read()


def test_nothing_is_read_where_there_is_nothing(folder):
    assert read_own(folder / "nothing") == b""


@pytest.mark.parametrize("name", ["lock", "checkpoints"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_run_folder_with_links_in_it_is_refused(name, restart, folder, mine):
    (mine.parent / "elsewhere").mkdir()
    (mine.parent / "elsewhere" / "step_1.tmp.x").write_text("kept")
    (folder / name).symlink_to(mine if name == "lock" else mine.parent / "elsewhere")
    with pytest.raises(FolderError, match=rf"'{folder / name}' is a link"):
        RunFolder(folder, resume=False, restart=restart)
    assert (mine.parent / "elsewhere" / "step_1.tmp.x").read_text() == "kept"


def test_a_log_that_is_a_link_is_left_alone(folder, mine):
    (folder / "metrics.jsonl").symlink_to(mine)
    progress = Progress(folder, 0, 0, None, on_gpus=False)
    progress.log("step", {"step": 1})
    assert "metrics.jsonl' is a link" in progress.notices[0]


def test_what_a_kill_leaves_locks_nobody_out(folder):
    kept = folder / "report.html.tmp.0123abcd"
    kept.write_text("<p>")
    with RunFolder(folder, resume=False, restart=False):
        assert not kept.exists()
    assert not is_leftover("thesis.tmp")


@pytest.mark.parametrize("missing", ["flock", "permission"])
def test_a_folder_that_cannot_be_locked_is_a_sentence(missing, folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(*((fcntl, "flock") if missing == "flock" else (os, "open")), refuse)
    with pytest.raises(FolderError, match=f"'{folder}' cannot be locked: Function not implemented; name"):
        take_lock(folder, "tune")


def test_a_second_one_waits_for_the_lock(folder):
    with take_lock(folder, "tune"), pytest.raises(FolderError, match="another tune is running"):
        take_lock(folder, "tune")
    take_lock(folder, "tune").close()


def test_a_folder_of_ours_is_no_file(folder):
    (folder / "checkpoints").write_text("")
    with pytest.raises(FolderError, match="cannot be made: File exists"):
        own_folder(folder / "checkpoints")


@pytest.mark.parametrize("name", ["compare.html", "compare.json"])
def test_a_page_or_a_document_of_a_person_is_told_from_ours(folder, name):
    page = folder / "compare.html"
    replace_text(page, "<title>Slower · Vivace</title>")
    replace_text(folder / "compare.json", '{\n "page_path": null\n}')
    require_page(page)
    (folder / name).write_text("theirs")
    with pytest.raises(FolderError, match=rf"'{folder / name}' is not what vivace compare wrote: name"):
        require_page(page)
    (folder / name).unlink()
    require_page(page)
