"""The folder of a run: its names, its lock, and a test before the first step that it can hold a run."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import uuid
from pathlib import Path
from typing import IO, Self

from vivace.errors import FolderError, is_full_disk
from vivace.files import is_leftover, open_own, own_folder

_LOCK = "lock"
_PLAN = "plan.toml"
LEDGER = "saved.jsonl"  # what was saved, beside the checkpoints
LOG = "metrics.jsonl"
SEED = "run.seed"  # with which the run began, in digits
FORMER = "former"  # what a checkpoint is renamed to before another of the same step takes its place
CHECKPOINT = re.compile(rf"step_(\d{{1,18}})(\.{FORMER}\..*)?")
_held: set[Path] = set()


class RunFolder:
    """An open run folder, locked against a second run until it is closed.

    A lock dies with its process: one left behind by a killed run is taken over. With `restart` what the run
    had trained stays until the new training is built (see `Checkpoints.clear`).
    """

    def __init__(self, out: str | os.PathLike[str], *, resume: bool, restart: bool) -> None:
        self.path = Path(out)
        self._make()
        self._refuse_foreign(resume or restart)
        if resume and self.plan.exists() and not self.checkpoints.exists():
            raise FolderError(
                f"the folder '{self.checkpoints}' is gone, and with it what the run had trained: put it "
                "back, or train from zero again (--restart, restart=True)"
            )
        self._lock = self._take_lock()
        try:
            own_folder(self.checkpoints)
            for item in filter(lambda item: is_leftover(item.name), self.checkpoints.iterdir()):
                shutil.rmtree(item, ignore_errors=True)  # the disk may have room for no more
            _rehearse(self.checkpoints)
            for item in self.path.iterdir():
                if is_leftover(item.name):
                    item.unlink()
        except BaseException:
            self.close()
            raise

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def plan(self) -> Path:
        """The plan under which the run trains."""
        return self.path / _PLAN

    def close(self) -> None:
        """Release the lock on the run folder."""
        self._lock.truncate(0)
        self._lock.close()
        _held.discard(self.path.resolve())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # a name that holds a zero byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise FolderError(f"the folder '{self.path}' cannot be made: {reason}") from None

    def _refuse_foreign(self, continues: bool) -> None:
        names = _names_in(self.path)
        found = sorted(names - {_LOCK, SEED, "checkpoints"})
        if _PLAN not in names and not self.checkpoints.is_symlink():  # then no checkpoint is a run's either
            found += sorted(f"checkpoints/{name}" for name in _names_in(self.checkpoints))
        elif _PLAN in names and {"checkpoints", LEDGER, LOG} & names:  # else a search's plan, or a person's
            found = []
        if found:
            raise FolderError(
                f"the folder '{self.path}' holds other files ('{found[0]}') and no run of Vivace: "
                "choose a new name"
            )
        if _PLAN in names and not continues:
            raise FolderError(
                f"the folder '{self.path}' already holds a run: go on with it (--resume, resume=True) "
                "or choose a new name"
            )

    def _take_lock(self) -> IO[str]:
        if self.path.resolve() in _held:  # the kernel's lock does not keep a process from itself
            raise FolderError(f"this process is already training in '{self.path}': choose a new name")
        path = self.path / _LOCK
        try:
            file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8")
        except OSError as error:
            raise FolderError(f"the folder '{self.path}' cannot be written: {error.strerror}") from None
        file.seek(0)
        holder = _read_holder(file.read())
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the kernel when the process dies
        except (BlockingIOError, PermissionError):
            file.close()
            raise FolderError(
                f"another run (process {holder.get('pid', '?')} on {holder.get('host', '?')}) is training in "
                f"'{self.path}': wait for it, stop it, or choose a new name"
            ) from None
        except OSError as error:
            file.close()
            raise FolderError(f"the folder '{self.path}' cannot be locked: {error.strerror}") from None
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        _held.add(self.path.resolve())
        return file


def is_checkpoint(path: Path) -> bool:
    """Is this named as a checkpoint is, or as one that was begun?"""
    begun = path.name.startswith("step_") and ".tmp." in path.name
    return begun or CHECKPOINT.fullmatch(path.name) is not None


def _names_in(folder: Path) -> set[str]:
    """What lies in a folder, beside what a killed process had begun."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return {item.name for item in entries if not is_leftover(item.name)}


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rehearse(folder: Path) -> None:
    """Do once, with a few bytes, what a checkpoint does: write, flush, rename. Raises FolderError."""
    end = f"tmp.{uuid.uuid4().hex[:8]}"  # of both: a process can be killed before and after it renames
    before, after = folder / f"rehearsal.{end}", folder / f"rehearsal.renamed.{end}"
    try:
        before.mkdir()
        with (before / "file").open("wb") as file:
            file.write(b"vivace")
            file.flush()
            os.fsync(file.fileno())
        os.rename(before, after)
        sync_folder(folder)
    except OSError as error:
        needed = "it must allow writing, flushing and renaming; choose one on a local disk"
        if is_full_disk(error):
            needed = "make room, such as by removing checkpoints that are not needed any more"
        raise FolderError(
            f"the folder '{folder}' cannot hold checkpoints ({error.strerror}): {needed}"
        ) from None
    finally:
        for path in (before, after):
            shutil.rmtree(path, ignore_errors=True)


def _read_holder(text: str) -> dict[str, object]:
    try:
        holder = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return holder if isinstance(holder, dict) else {}
