"""Every exception that Vivace raises on purpose.

    VivaceError                 base; exit code 2
    ├── InputError              what a person handed in cannot be used (also a ValueError)
    │   ├── JobError            the job file, or a callable of the Job
    │   │   └── SampleError     a sample of the data
    │   ├── PlanError           the plan file, or a technique's settings
    │   └── FolderError         the output folder, its lock, or the disk below it
    ├── Refused                 a technique declines, with its reason
    ├── CheckpointError         no checkpoint of the run can be trusted
    ├── AnswerIsNo              the question was answered, and the answer is no; exit code 1
    │   ├── Diverged            training left the finite numbers
    │   ├── OutOfMemory         training does not fit, however small its pieces
    │   └── PromiseBroken       a watched step of a run did not train the same model
    └── ChildFailed             a child process crashed, hung or ran out of memory
        ├── TimedOut            it did not answer in time
        └── Unsteady            it was timed, and the machine was too unsteady for an answer

Each message is one sentence in the person's nouns, with the offending value and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VivaceError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 2

    @property
    def kind(self) -> str:
        """The name under which `--json` reports the error."""
        return type(self).__name__


class InputError(VivaceError, ValueError):
    """Something that a person handed in cannot be used."""


class JobError(InputError):
    """The job file cannot be loaded, or one of the Job's callables does not do what a Job needs."""


class SampleError(JobError):
    """A sample cannot be read. Says the same on both sides of a worker process, which adds a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{__name__}.{type(self).__name__}: ")[2].strip())


class PlanError(InputError):
    """The plan file or a technique's settings are not valid."""


class FolderError(InputError):
    """The output folder cannot be used."""


class Refused(VivaceError):
    """A technique declines to act; the message is the reason; `by` puts the name before it."""

    technique = ""

    def by(self, technique: str) -> Refused:
        """This refusal, its message opened with the technique's name unless one is there already."""
        if self.technique:
            return self
        named = Refused(f"{technique}: {self}")
        named.technique = technique
        return named


class CheckpointError(VivaceError):
    """No checkpoint of this run can be trusted."""


class AnswerIsNo(VivaceError):
    """The question was answered, and the answer is no (promise broken, budget cannot be met)."""

    exit_code = 1


class Diverged(AnswerIsNo):
    """The loss or the weights of a run are no longer finite; the message names the step."""


class OutOfMemory(AnswerIsNo):
    """The training does not fit into the device's memory; the message names what would fit."""


class PromiseBroken(AnswerIsNo):
    """A watched step of a run did not train the same model; the message names figure, layer and step."""


class ChildFailed(VivaceError):
    """A child process crashed, hung or ran out of memory; the message says which."""


class TimedOut(ChildFailed):
    """A child process did not answer in time, and was stopped."""


class Unsteady(ChildFailed):
    """A child process was timed, and the interval is too wide to tell faster from slower.

    `foreign_share` is the largest share of the processor that other processes used meanwhile.
    """

    def __init__(self, message: str, foreign_share: float = 0.0) -> None:
        super().__init__(message)
        self.foreign_share = foreign_share


class TechniqueWarning(UserWarning):
    """A technique is left out because it is broken; the message names it and says why."""


OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Did an allocation of the device or of the host fail? torch says so by class, or by text alone."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def printable(text: str) -> str:
    """`text` in one line, with a space for each character that could steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
