"""The folder of a sweep: its files, its lock, and the folders of its trials."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO, Self

from vivace.errors import FolderError
from vivace.files import open_own, output_folder, own_folder

JOURNAL, LOCK, RESULT, PAGE, BEST, LOG = (
    "study.journal",
    "lock",
    "sweep.json",
    "sweep.html",
    "best.py",
    "children.log",
)
_OWN = (JOURNAL, f"{JOURNAL}.lock*", LOCK, RESULT, PAGE, BEST, LOG, "trials", "seeds", "__pycache__")


class SweepFolder:
    """An open folder, locked against a second sweep until it is closed; a lock dies with its process.

    Raises FolderError where it holds anything else, or a sweep and no `resume`.
    """

    def __init__(self, out: str | os.PathLike[str], *, resume: bool) -> None:
        self.path = output_folder(Path(out), _OWN)
        if self.journal.exists() and not resume:
            raise FolderError(
                f"the folder '{out}' already holds a sweep: go on with it (--resume, resume=True) "
                "or choose a new name"
            )
        self._lock = self._take_lock()

    @property
    def journal(self) -> Path:
        """Optuna's journal: every trial, as it happens."""
        return self.path / JOURNAL

    def trial(self, number: int) -> Path:
        """The run folder of a trial."""
        return own_folder(self.path / "trials") / f"trial_{number:04d}"

    def seed(self, number: int, seed: int) -> Path:
        """The run folder of a trial's configuration under another seed."""
        return own_folder(self.path / "seeds") / f"trial_{number:04d}_seed_{seed}"

    def close(self) -> None:
        """Let another sweep in."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> IO[bytes]:
        file = os.fdopen(open_own(self.path / LOCK, os.O_RDWR | os.O_CREAT), "rb+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FolderError(
                f"another sweep is running in '{self.path}': wait for it, stop it, or choose a new name"
            ) from None
        return file


def lighten(run: Path, *, model: bool) -> None:
    """Remove what an ended run needs no longer: checkpoints, event files and, unless kept, weights."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run / name, ignore_errors=True)
    if not model:
        (run / "model.pt").unlink(missing_ok=True)
