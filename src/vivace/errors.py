"""Every exception that Vivace raises on purpose.

    VivaceError                 base; exit code 2
    ├── InputError              what a person handed in cannot be used (also a ValueError)
    │   ├── JobError            the job file, or a callable of the Job
    │   │   └── SampleError     a sample of the data
    │   ├── PlanError           the plan file, or a technique's settings
    │   └── FolderError         the output folder, its lock, or the disk below it
    ├── Refused                 a technique declines, with its reason
    ├── CheckpointError         no checkpoint of the run can be trusted
    ├── RankLost                one of several ranks hangs, has died or never came; exit code 1
    ├── AnswerIsNo              the question was answered, and the answer is no; exit code 1
    │   ├── Diverged            training left the finite numbers
    │   ├── OutOfMemory         training does not fit, however small its pieces
    │   └── PromiseBroken       a watched step of a run did not train the same model
    └── ChildFailed             a child process crashed, hung or ran out of memory
        ├── TimedOut            it did not answer in time
        └── Unsteady            it was timed, and the machine was too unsteady for an answer

Each message is one sentence in the person's nouns, with the offending value and what would be right. Programs
read an error's class and its fields, which cross from process to process with it (as JSON by `to_dict` and
`from_dict`, or pickled). Where torch says something by a sentence alone, the functions at the end of this
file are the only ones that read it.
"""

from __future__ import annotations

import difflib
import enum
import errno
import re
import signal
from collections.abc import Iterable
from typing import Any, ClassVar, Self


class Code(enum.StrEnum):
    """Why something has no result, for programs; the error's message or `Trial.reason` says it to people."""

    NONE = ""  # it has one; or for the reason given
    RULED_OUT = "ruled_out"  # by its card: no process was started
    TOO_COARSE = "too_coarse"  # on this job it promises more than is allowed
    NOT_TRIED = "not_tried"  # the budget ended first
    CANNOT_PAY = "cannot_pay"  # to try it costs more than it can save
    TIMED_OUT = "timed_out"
    UNSTEADY = "unsteady"  # timed, and the interval holds both faster and slower
    OUT_OF_MEMORY = "out_of_memory"
    BUSY = "busy"  # the device serves one process at a time, and another one has it
    KILLED = "killed"  # by SIGKILL: the kernel leaves no other sign where the machine's memory is used up


class VivaceError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with.

    Subclasses take the message as their only positional argument, so that they can be pickled.

    Args:
        technique: the name of the technique at fault, where it is one's.
        code: why, for programs; a class may have one for all its errors.
    """

    exit_code = 2
    fields: ClassVar[tuple[str, ...]] = ("technique", "code", "unnamed")
    """What crosses to another process beside kind and message: attributes of JSON types."""
    technique = unnamed = ""
    code = Code.NONE

    def __init__(self, message: str = "", *, technique: str = "", code: Code | None = None) -> None:
        super().__init__(message)
        if technique:
            self.technique = technique
        if code is not None:
            self.code = code

    @property
    def kind(self) -> str:
        """The name under which `--json` reports the error: the nearest class of this module."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)

    def by(self, technique: str) -> Self:
        """This error as the technique's: its message opens with the name, and `unnamed` is the rest. One that
        has a name keeps it.
        """
        if not self.technique:
            self.technique, self.unnamed = technique, str(self)
            self.args = (f"{technique}: {self}",)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Kind, text and fields as JSON types; `from_dict` makes the error of them again."""
        return {"kind": self.kind, "text": str(self), **{name: getattr(self, name) for name in self.fields}}

    @staticmethod
    def from_dict(document: dict[str, Any]) -> VivaceError:
        """The error of `to_dict`'s document; of a kind unknown here a VivaceError that names the kind."""
        kind, text = document["kind"], document["text"]
        known = globals().get(kind)
        if isinstance(known, type) and issubclass(known, VivaceError):
            error: VivaceError = known(text)
        else:
            error = VivaceError(f"{kind}: {text}")
        for name in error.fields:
            setattr(error, name, document[name])
        error.code = Code(error.code)
        return error


class InputError(VivaceError, ValueError):
    """Something that a person handed in cannot be used."""


class JobError(InputError):
    """The job file cannot be loaded, or one of the Job's callables does not do what a Job needs."""


class SampleError(JobError):
    """A sample cannot be read. Says the same on both sides of a worker process, which adds a traceback."""

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message.rpartition(f"{__name__}.{type(self).__name__}: ")[2].strip(), **fields)


class PlanError(InputError):
    """The plan file or a technique's settings are not valid."""


class FolderError(InputError):
    """The output folder cannot be used."""


class Refused(VivaceError):
    """A technique declines to act; the message is the reason; `by` puts the name before it."""


class CheckpointError(VivaceError):
    """No checkpoint of this run can be trusted."""


class RankLost(VivaceError):
    """One of several ranks hangs, has died, is cut off or never came; the message names it.

    `interrupted_by` names the signal that asked for a stop meanwhile; the exit code is then its own.
    """

    fields = (*VivaceError.fields, "interrupted_by")

    def __init__(self, message: str = "", *, interrupted_by: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.interrupted_by = interrupted_by

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1, or 128 and the signal's number."""
        return 128 + signal.Signals[self.interrupted_by] if self.interrupted_by else 1


class AnswerIsNo(VivaceError):
    """The question was answered, and the answer is no (promise broken, budget cannot be met)."""

    exit_code = 1


class Diverged(AnswerIsNo):
    """The loss or the weights of a run are no longer finite, or far from where they began; the message names
    the step. `may_pass`: taken again from the last good state, the same steps might go well; `what` is the
    message without the advice.
    """

    def __init__(self, message: str = "", *, may_pass: bool = False, what: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.may_pass, self.what = may_pass, what


class OutOfMemory(AnswerIsNo):
    """The training does not fit into the device's memory; the message names what would fit."""


class NoPageLockedMemory(MemoryError):
    """The host's memory has no room for pages that a GPU copies from; CUDA's own error reads as the GPU's."""


class PromiseBroken(AnswerIsNo):
    """A watched step of a run did not train the same model; the message names figure, layer and step."""


class ChildFailed(VivaceError):
    """A child process crashed, hung or ran out of memory; the message says which."""

    @property
    def lacked_memory(self) -> bool:
        """Did it end for lack of memory, as far as one can tell?"""
        return self.code in (Code.OUT_OF_MEMORY, Code.KILLED)


class TimedOut(ChildFailed):
    """A child process did not answer in time, and was stopped."""

    code = Code.TIMED_OUT


class Unsteady(ChildFailed):
    """A child process was timed, and the interval is too wide to tell faster from slower.

    `foreign_share` is the largest share of the processor that other processes used meanwhile.
    """

    fields = (*ChildFailed.fields, "foreign_share")
    code = Code.UNSTEADY

    def __init__(self, message: str = "", *, foreign_share: float = 0.0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.foreign_share = foreign_share


class TechniqueWarning(UserWarning):
    """A technique is left out because it is broken; the message names it and says why."""


def printable(text: str) -> str:
    """`text` in one line, with a space for each character that could steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
_BUSY = "CUDA-capable device(s) is/are busy or unavailable"
_LOST_RANK = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Application timeout caused pair closure",
    "was aborted",
)
_LOST_WORKER = ("DataLoader worker (pid", "received 0 items of ancdata")
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ran_out_of_memory(error: BaseException) -> bool:
    """Did an allocation of the device or of the host fail? torch says so by class, or by text alone."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_busy_device(error: BaseException) -> bool:
    """Is the device another process's, as a GPU in an exclusive compute mode is?"""
    return isinstance(error, RuntimeError) and _BUSY in str(error)


def is_broken_exchange(error: BaseException) -> bool:
    """Did an exchange between ranks break, because another one or the link is gone?"""
    if any(cls.__name__ in ("DistBackendError", "DistNetworkError") for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_RANK)


def is_lost_worker(error: BaseException, *, from_workers: bool) -> bool:
    """Was a loader's worker killed, rather than that it raised? What it sent half of fails in many ways;
    where nothing was read `from_workers`, the data themselves end so.
    """
    text = str(error)
    if text.startswith("Caught "):  # what the worker raised, and torch raises again
        return False
    return text.startswith(_LOST_WORKER) or (from_workers and isinstance(error, (ConnectionError, EOFError)))


def is_of_pinning_thread(error: BaseException) -> bool:
    """Was it raised in the thread in which a loader with workers copies batches to page-locked memory?"""
    return re.match(r"Caught \w+ in pin memory thread", str(error)) is not None


def is_no_shared_memory(error: BaseException) -> bool:
    """Did torch find no room for a tensor in shared memory, in which a loader's workers hand batches over?"""
    return isinstance(error, RuntimeError) and "allocate shared memory" in str(error)


def is_full_disk(error: BaseException) -> bool:
    """Could a file not be written whole? torch's own writer says no more than that it is at another place."""
    if isinstance(error, OSError):
        return error.errno in _DISK_IS_FULL
    return isinstance(error, RuntimeError) and "unexpected pos" in str(error)


def forbids_hooks(error: BaseException) -> bool:
    """Does a transform of torch.func find hooks of saved tensors, which it does not serve?"""
    return isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)


def hides_memory(error: BaseException) -> bool:
    """Was a tensor asked for its memory that has none of its own, as inside of a transform of torch.func?"""
    return isinstance(error, NotImplementedError) and "Cannot access storage" in str(error)
