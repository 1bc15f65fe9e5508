"""Vivace finds the fastest way to train a PyTorch job on this machine, and proves that the model is the same.

    job = vivace.Job(model=..., data=..., loss=..., optimizer=...)
    result = vivace.tune(job)
    run = vivace.train(job, result.plan, out="runs/train")

Importing this package imports neither torch nor any of its own parts: names are loaded when first used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__version__ = "0.1.0"

_HOME = {
    "Job": "vivace.job",
    "Plan": "vivace.plan",
    "Machine": "vivace.machine",
    "Session": "vivace.session.session",
    "Ran": "vivace.live",
    "attach": "vivace.session.opening",
    "register": "vivace.technique.registry",
    "Technique": "vivace.technique",
    "Way": "vivace.technique",
    "Plain": "vivace.technique",
    "Card": "vivace.technique",
    "Stage": "vivace.technique",
    "Seam": "vivace.technique",
    "Numerics": "vivace.technique",
    "Build": "vivace.technique",
    "Observation": "vivace.ledger",
    "Profile": "vivace.ledger",
    "Result": "vivace.tuning",
    "Run": "vivace.training.training",
    "Verdict": "vivace.verifying",
    "Profiled": "vivace.profiling",
    "Advice": "vivace.advising",
    "Compared": "vivace.comparing",
    "Compressed": "vivace.compressing",
    "Exported": "vivace.exporting",
    "VivaceError": "vivace.errors",
    "InputError": "vivace.errors",
    "JobError": "vivace.errors",
    "SampleError": "vivace.errors",
    "PlanError": "vivace.errors",
    "FolderError": "vivace.errors",
    "RankLost": "vivace.errors",
    "Refused": "vivace.errors",
    "CheckpointError": "vivace.errors",
    "AnswerIsNo": "vivace.errors",
    "Diverged": "vivace.errors",
    "OutOfMemory": "vivace.errors",
    "PromiseBroken": "vivace.errors",
    "ChildFailed": "vivace.errors",
    "Code": "vivace.errors",
    "Event": "vivace.events",
    "EventKind": "vivace.events",
    "TimedOut": "vivace.errors",
    "Unsteady": "vivace.errors",
    "TechniqueWarning": "vivace.errors",
    "inspect": "vivace.inspection",
    "profile": "vivace.profiling",
    "tune": "vivace.tuning",
    "verify": "vivace.verifying",
    "train": "vivace.live.training",
    "report": "vivace.reporting",
    "run": "vivace.live",
    "run_here": "vivace.live",
    "advise": "vivace.advising",
    "compare": "vivace.comparing",
    "compress": "vivace.compressing",
    "export": "vivace.exporting.proving",
    "in_words": "vivace.exporting",
    "sweep": "vivace.sweeping",
    "Swept": "vivace.sweeping",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vivace' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _JobFiles:
    """Finds the module of a person's file (see `vivace.job.load`) in processes that are not forked, such as
    the workers of a loader with ``multiprocessing_context="spawn"``: their name leads to the path.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = os.environ.get(name) if name.startswith("vivace_job_") else None
        return importlib.util.spec_from_file_location(name, file) if file else None


sys.meta_path.append(_JobFiles)


if TYPE_CHECKING:
    from vivace.advising.advice import Advice as Advice
    from vivace.advising.ranking import advise as advise
    from vivace.comparing import Compared as Compared
    from vivace.comparing import compare as compare
    from vivace.compressing import Compressed as Compressed
    from vivace.compressing import compress as compress
    from vivace.errors import AnswerIsNo as AnswerIsNo
    from vivace.errors import CheckpointError as CheckpointError
    from vivace.errors import ChildFailed as ChildFailed
    from vivace.errors import Code as Code
    from vivace.errors import Diverged as Diverged
    from vivace.errors import FolderError as FolderError
    from vivace.errors import InputError as InputError
    from vivace.errors import JobError as JobError
    from vivace.errors import OutOfMemory as OutOfMemory
    from vivace.errors import PlanError as PlanError
    from vivace.errors import PromiseBroken as PromiseBroken
    from vivace.errors import RankLost as RankLost
    from vivace.errors import Refused as Refused
    from vivace.errors import SampleError as SampleError
    from vivace.errors import TechniqueWarning as TechniqueWarning
    from vivace.errors import TimedOut as TimedOut
    from vivace.errors import Unsteady as Unsteady
    from vivace.errors import VivaceError as VivaceError
    from vivace.events import Event as Event
    from vivace.events import EventKind as EventKind
    from vivace.exporting import Exported as Exported
    from vivace.exporting import in_words as in_words
    from vivace.exporting.proving import export as export
    from vivace.inspection import inspect as inspect
    from vivace.job import Job as Job
    from vivace.ledger import Observation as Observation
    from vivace.ledger import Profile as Profile
    from vivace.live import Ran as Ran
    from vivace.live import run as run
    from vivace.live import run_here as run_here
    from vivace.live.training import train as train
    from vivace.machine import Machine as Machine
    from vivace.plan import Plan as Plan
    from vivace.profiling import Profiled as Profiled
    from vivace.profiling import profile as profile
    from vivace.reporting import report as report
    from vivace.session.opening import attach as attach
    from vivace.session.session import Session as Session
    from vivace.sweeping import sweep as sweep
    from vivace.sweeping.result import Swept as Swept
    from vivace.technique import Build as Build
    from vivace.technique import Card as Card
    from vivace.technique import Numerics as Numerics
    from vivace.technique import Plain as Plain
    from vivace.technique import Seam as Seam
    from vivace.technique import Stage as Stage
    from vivace.technique import Technique as Technique
    from vivace.technique import Way as Way
    from vivace.technique.registry import register as register
    from vivace.training.training import Run as Run
    from vivace.tuning import Result as Result
    from vivace.tuning import tune as tune
    from vivace.verifying import Verdict as Verdict
    from vivace.verifying import verify as verify
