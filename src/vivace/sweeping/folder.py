"""The folder of a sweep: its files, its lock, and the folders of its trials."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Self

from vivace.errors import FolderError
from vivace.files import LOCK, output_folder, own_folder, take_lock

JOURNAL, RESULT, PAGE, BEST, LOG, TRIALS, RAY = (
    "study.journal",
    "sweep.json",
    "sweep.html",
    "best.py",
    "children.log",
    "trials",
    "ray",  # what Ray Tune notes for itself, while a sweep runs on a cluster
)
PLAN, CHECKPOINTS = "plan.toml", "checkpoints"  # what every run of its own begins with
_OWN = (JOURNAL, f"{JOURNAL}.lock*", LOCK, RESULT, PAGE, BEST, LOG, RAY, TRIALS, "seeds", "__pycache__")


class SweepFolder:
    """An open folder, locked against a second sweep until it is closed; a lock dies with its process.

    Raises FolderError where it holds anything else, or a sweep and no `resume`.
    """

    def __init__(self, out: str | os.PathLike[str], *, resume: bool) -> None:
        self.path = output_folder(Path(out), _OWN, locked=True)
        if self.journal.exists() and not resume:
            raise FolderError(
                f"the folder '{out}' already holds a sweep: go on with it (--resume, resume=True) "
                "or choose a new name"
            )
        self._lock = take_lock(self.path, "sweep")

    @property
    def journal(self) -> Path:
        """Optuna's journal: every trial, as it happens."""
        return self.path / JOURNAL

    def trial(self, number: int) -> Path:
        """The run folder of a trial."""
        return own_folder(self.path / TRIALS) / f"trial_{number:04d}"

    @staticmethod
    def alone(path: Path) -> Path:
        """A run folder for a process of its own: what no run can go on from goes, as what one without a
        checkpoint wrote as part of a stack.
        """
        if not can_go_on(path):
            shutil.rmtree(path, ignore_errors=True)
        return path

    def begin_anew(self) -> None:
        """Forget the runs that have not ended."""
        for run in self.path.glob("*/trial_*"):
            if can_go_on(run):
                shutil.rmtree(run, ignore_errors=True)

    def seed(self, number: int, seed: int) -> Path:
        """The run folder of a trial's configuration under another seed."""
        return own_folder(self.path / "seeds") / f"trial_{number:04d}_seed_{seed}"

    def close(self) -> None:
        """Give the folder's lock back, so that another sweep may write there."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_go_on(run: Path) -> bool:
    """Does the folder hold a run that has not ended?"""
    return (run / PLAN).exists() and (run / CHECKPOINTS).exists()


def lighten(run: Path, *, model: bool) -> None:
    """Remove what an ended run needs no longer: checkpoints, event files and, unless kept, weights."""
    there = {path.name for path in run.iterdir()} if run.exists() else set[str]()
    for name in there & {CHECKPOINTS, "tensorboard"}:
        shutil.rmtree(run / name, ignore_errors=True)
    if not model and "model.pt" in there:
        (run / "model.pt").unlink(missing_ok=True)
