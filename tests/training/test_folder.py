import errno
import fcntl
import json
import os
import signal

import pytest

from vivace.errors import FolderError
from vivace.training.checkpoints import Checkpoints
from vivace.training.folder import RunFolder


def open_folder(path, resume=False):
    return RunFolder(path, resume=resume, restart=False)


def begin_anew(path):
    Checkpoints(path / "checkpoints", {}, path / "saved.jsonl").clear()


@pytest.mark.parametrize(
    "name", ["run-1", "with space", "训练", ".hidden", "<script>", "[bold]$(x)'", "x" * 200, "\udcff"]
)
def test_a_run_may_be_called_as_the_disk_allows(tmp_path, name):
    path = tmp_path / name
    with open_folder(path):
        assert {item.name for item in path.iterdir()} == {"checkpoints", "lock"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 300, "zero\0byte"])
def test_a_name_that_the_disk_does_not_take_is_said(tmp_path, name):
    with pytest.raises(FolderError, match=r"cannot be made: .*(too long|null byte)"):
        open_folder(tmp_path / name)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(FolderError, match=r"holds other files \('thesis.tex'\)"):
            open_folder(tmp_path, resume)


def test_a_run_that_never_began_leaves_the_folder_free(tmp_path):
    open_folder(tmp_path).close()
    open_folder(tmp_path).close()


def test_this_process_locks_itself_out(tmp_path):
    with open_folder(tmp_path), pytest.raises(FolderError, match="this process is already training"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "number", "sentence"),
    [(fcntl, "lockf", errno.ENOLCK, "cannot be locked"), (os, "open", errno.EACCES, "cannot be written")],
)
def test_a_disk_that_knows_no_locks_and_a_folder_that_is_read_only(
    tmp_path, monkeypatch, owner, name, number, sentence
):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(FolderError, match=f"run' {sentence}: {os.strerror(number)}"):
            open_folder(tmp_path / "run")
    open_folder(tmp_path / "run").close()


@pytest.mark.fault(35)
def test_two_runs_on_one_folder_and_a_lock_left_behind(launch, tmp_path, until):
    out = tmp_path / "run"
    child = launch("slower", {"out": str(out)})
    until(lambda: (out / "plan.toml").exists())
    with pytest.raises(
        FolderError, match=rf"another run \(process {child.process.pid} on .*choose a new name"
    ):
        open_folder(out, resume=True)
    os.kill(child.process.pid, signal.SIGKILL)
    child.wait()
    assert json.loads((out / "lock").read_text())["pid"] == child.process.pid
    with open_folder(out, resume=True):
        assert json.loads((out / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.fault(36)
def test_a_disk_that_cannot_rename(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(FolderError, match=r"cannot hold checkpoints \(Invalid cross-device link\)"):
        open_folder(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("killed_at", ["rename", "fsync"])  # before it is renamed, and after
def test_a_run_killed_while_it_tried_out_its_folder_can_be_resumed(tmp_path, monkeypatch, killed_at):
    real = getattr(os, killed_at)

    def killed(first, *rest):
        if rest or os.path.isdir(first):
            raise KeyboardInterrupt
        real(first)

    monkeypatch.setattr(os, killed_at, killed)
    monkeypatch.setattr("vivace.training.folder.shutil.rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        open_folder(tmp_path)
    left = [item.name for item in (tmp_path / "checkpoints").iterdir()]
    monkeypatch.undo()
    open_folder(tmp_path, resume=True).close()
    assert len(left) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_place_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(FolderError, match="cannot be made"):
        open_folder(tmp_path / "run")


def test_a_run_does_not_begin_anew_on_checkpoints_that_cannot_be_removed(tmp_path, monkeypatch):
    open_folder(tmp_path).close()
    kept = tmp_path / "checkpoints" / "step_5" / "model.pt"
    kept.parent.mkdir()
    kept.touch()
    (tmp_path / "saved.jsonl").write_text('{"step": 5}\n')
    (tmp_path / "plan.toml").touch()

    unlink = os.unlink

    def refuse(path, **where):
        if os.fspath(path).endswith(kept.name):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **where)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(FolderError, match=r"step_5' cannot be removed"):
            begin_anew(tmp_path)
    assert kept.exists()
    assert (tmp_path / "saved.jsonl").exists()
    begin_anew(tmp_path)
    assert not kept.exists()
    assert not (tmp_path / "saved.jsonl").exists()


def test_what_a_killed_run_had_begun_to_save_takes_no_room_from_the_resumed_one(tmp_path):
    open_folder(tmp_path).close()
    (tmp_path / "plan.toml").touch()
    whole, torn = (tmp_path / "checkpoints" / name / "model.pt" for name in ("step_8", "step_9.tmp.0a1b2c3d"))
    for file in (whole, torn):
        file.parent.mkdir()
        file.touch()
    open_folder(tmp_path, resume=True).close()
    assert whole.exists()
    assert not torn.parent.exists()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("theirs", ["checkpoints/epoch_3.pt", "checkpoints/step_3/model.pt"])
def test_checkpoints_of_another_program_are_not_touched(tmp_path, restart, theirs):
    (tmp_path / theirs).parent.mkdir(parents=True)
    (tmp_path / theirs).write_text("mine")
    with pytest.raises(FolderError, match=r"holds other files \('checkpoints/.*'\) and no run of Vivace"):
        RunFolder(tmp_path, resume=False, restart=restart)
    assert (tmp_path / theirs).read_text() == "mine"


def test_the_plan_that_a_search_has_left_is_no_run(tmp_path):
    for name in ("plan.toml", "ledger.jsonl", "lock"):
        (tmp_path / name).write_text("")
    for resume, restart in ((False, False), (True, False), (False, True)):
        with pytest.raises(FolderError, match=r"holds other files \('ledger.jsonl'\) and no run of Vivace"):
            RunFolder(tmp_path, resume=resume, restart=restart)


def test_a_restart_leaves_what_a_person_has_put_beside_the_checkpoints(tmp_path):
    open_folder(tmp_path).close()
    (tmp_path / "plan.toml").touch()
    for name in ("best/model.pt", "step_5/model.pt", "step_4.former.0a1b2c3d/model.pt"):
        (tmp_path / "checkpoints" / name).parent.mkdir()
        (tmp_path / "checkpoints" / name).touch()
    (tmp_path / "checkpoints" / "step_6").touch()
    begin_anew(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["best"]
