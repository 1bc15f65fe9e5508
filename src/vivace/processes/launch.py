"""Child processes: a job runs in its own process, so that a crash, a hang or a printed line stays there.

The parent talks to a child in JSON lines over two pipes; the child's standard input is closed and its output
goes to a log. A child dies with its parent, and does not see the terminal's Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle

from vivace.blame import blame
from vivace.errors import (
    ChildFailed,
    Code,
    FolderError,
    JobError,
    OutOfMemory,
    PlanError,
    TimedOut,
    VivaceError,
    is_busy_device,
    is_full_disk,
    ran_out_of_memory,
)
from vivace.files import open_own
from vivace.job import Job, JobFunction, load
from vivace.plan import Plan
from vivace.processes.pipes import is_closed, ready
from vivace.processes.waiting import waiting
from vivace.technique import Technique, registry

_NO_ZYGOTE = "the process that starts child processes has died"
_by_value = threading.RLock()
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Source:
    """Where a job comes from: a reference that each child loads by itself, or a pickled object.

    Pickled, it can start children on another machine that has the same files.
    """

    def __init__(self, job: Job | JobFunction | str) -> None:
        self.reference = job if isinstance(job, str) else None
        self.name = self.reference or "job"
        self.payload: Job | JobFunction | str = job
        self.folder = os.getcwd()  # a job that is loaded here may change it
        self._sent: bytes | None = None  # the body, where this is a copy

    def load(self) -> None:
        """Load the job in this process too, so that the techniques that its file registers are known here."""
        if self.reference is not None:
            load(self.reference)

    def pickled(self, entry: str, arguments: dict[str, Any], environment: dict[str, str]) -> bytes:
        """What a child needs to begin: search path, registered techniques, the job, and its entry point."""
        head: dict[str, Any] = {"entry": entry, "arguments": arguments, "body": self.body()}
        head |= {"sys_path": sys.path, "folder": self.folder, "environment": os.environ | environment}
        return bytes(cloudpickle.dumps(head))

    def __getstate__(self) -> dict[str, Any]:
        return {"reference": self.reference, "name": self.name, "folder": self.folder, "_sent": self.body()}

    def techniques(self) -> list[type[Technique]]:
        """Which have to be registered where the job is unpacked: a job's file registers its own."""
        return registry.registered() if self.reference is None else []

    def body(self) -> bytes:
        """The job, for `unpacked` in another process."""
        if self._sent is not None:
            return self._sent
        classes = self.techniques()
        by_value = [] if self.reference is not None else _modules_out_of_reach(self.payload, classes)
        with _by_value:  # what cloudpickle has registered is the process's, and may be the person's
            by_value = [m for m in by_value if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
            for module in by_value:
                cloudpickle.register_pickle_by_value(module)
            try:
                return bytes(cloudpickle.dumps((self.payload, classes)))
            except Exception as error:
                raise JobError(
                    f"the Job cannot be sent to a child process ({error}); put it into a file: file.py:name"
                ) from error
            finally:
                for module in by_value:
                    cloudpickle.unregister_pickle_by_value(module)


def _modules_out_of_reach(job: object, classes: list[type]) -> list[Any]:
    """Modules of the job's functions that a fresh interpreter with the same search path would not find."""
    functions = [value for value in vars(job).values() if callable(value)]
    found = {}
    for thing in [*functions, *classes]:
        module = sys.modules.get(getattr(thing, "__module__", "") or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ in ("__main__", "builtins"):
            continue
        parts = module.__name__.split(".")
        at, package = Path(*parts).with_suffix(".py"), Path(file).name == "__init__.py"
        if package and importlib.machinery.PathFinder.find_spec(parts[0]) is not None:
            continue
        if not any(Path(folder or ".", at).resolve() == Path(file) for folder in sys.path):
            found[module.__name__] = module
    return list(found.values())


def unpacked(body: bytes) -> Any:
    """In another process, the job or its reference; the techniques that came with it are registered."""
    job, classes = pickle.loads(body)  # which this person's own process has written
    for cls in classes:
        registry.register(cls)
    return job


def plan_of(plan: Plan | str | os.PathLike[str], job: Job | str) -> Plan:
    """A plan, loaded where it is a file; the job's file is loaded first where the plan names its techniques.

    Raises PlanError as `Plan.load` does.
    """
    if isinstance(plan, Plan):
        return plan
    try:
        return Plan.load(plan)
    except PlanError:
        if not isinstance(job, str):
            raise
        path = Path(plan).absolute()  # the job's file may change the working directory
        load(job)
        return Plan.load(path)


class Child:
    """A child process that serves commands; see `vivace.processes.child` for its side.

    Args:
        entry: ``package.module:Class``; the class is built as ``Class(job, **arguments)``, its methods are
            commands.
        source: the job.
        arguments: JSON types.
        log: file to which the child's output is appended.
        environment: variables set for the child on top of this process's own.
    """

    def __init__(
        self,
        entry: str,
        source: Source,
        arguments: dict[str, Any] | None = None,
        *,
        log: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        payload = source.pickled(entry, arguments or {}, environment or {})
        output = open_own(log, _APPEND) if log is not None else os.open(os.devnull, os.O_WRONLY)
        to_child, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._read, from_child = os.pipe()
        self._status, report = os.pipe()
        self._buffer = b""
        theirs = (to_child, from_child, output, report)
        with contextlib.ExitStack() as stack:
            for own in (self._write, self._read, self._status):
                stack.callback(os.close, own)
            try:
                with tempfile.TemporaryFile() as file:  # no name: it holds the environment, secrets and all
                    file.write(payload)
                    file.seek(0)
                    _zygote().fork([*theirs, file.fileno()])
            except BrokenPipeError:
                raise ChildFailed(_NO_ZYGOTE) from None
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            self._pid = self._number()
            stack.pop_all()
        self._ended: int | None = None
        self._closed = False

    def ask(self, command: str, timeout: float, **arguments: object) -> Any:
        """Send one command and wait for its answer; see `converse`."""
        return self.converse(command, timeout, None, **arguments)

    def converse(
        self,
        command: str,
        timeout: float,
        reply: Callable[[Any], Any] | None,
        meanwhile: Callable[[], None] = lambda: None,
        /,
        **arguments: object,
    ) -> Any:
        """Send one command and wait for its answer. Errors of the child are raised here under their own
        class.

        `reply` answers what the child asks (`ask_parent`), in JSON types. `meanwhile` is called each time
        when it has been answered and goes on.

        Raises ChildFailed where the child died or ran out of memory, and TimedOut where it did not answer,
        or ask, within `timeout` seconds.
        """
        told = {"command": command, "arguments": arguments, "seconds": timeout}
        turn = self.say(told, command, timeout)
        while "question" in turn:
            assert reply is not None, "nobody answers what the child asks"
            turn = self.say(reply(turn["question"]), command, timeout, meanwhile)
        if "error" not in turn:
            return turn["answer"]
        raise VivaceError.from_dict(turn["error"])

    def say(
        self, message: object, command: str, timeout: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """One turn of `converse`: send the command itself, or what a question was answered, and wait for
        the next message, which has one key: ``question``, ``answer`` or ``error``.

        Raises ChildFailed and TimedOut as `converse` does.
        """
        deadline = time.monotonic() + timeout
        try:
            self._send(message, deadline)
            meanwhile()
            found: dict[str, Any] = json.loads(self._line(deadline))
        except TimeoutError:
            self._kill()
            raise TimedOut(f"no answer to '{command}' within {timeout:.0f} s: it was stopped") from None
        return found

    @property
    def pid(self) -> int:
        """The child's process id, which is also that of its group."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Has the child not ended yet, as far as this process knows?"""
        return self._ended is None

    def close(self) -> None:
        """End the child, by force if it does not leave by itself; once closed it stays so."""
        if self._closed:
            return
        self._closed = True
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        if not ready([self._status], seconds=3.0):
            self._kill()
        try:
            self._wait()
        finally:
            with contextlib.suppress(OSError):
                os.close(self._status)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(ChildFailed):  # what is under way says more
                self._kill()
        self.close()

    def _send(self, message: object, deadline: float) -> None:
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:  # a pipe takes 64 KiB at once, and no more until the child reads them
                self._ready([], [self._write], deadline)
                data = data[os.write(self._write, data) :]
        except BrokenPipeError:
            raise self._obituary() from None

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            self._ready([self._read], [], deadline)
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise self._obituary()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ready(self, reads: list[int], writes: list[int], deadline: float) -> None:
        """Wait for an end of a pipe. Raises TimeoutError, and ChildFailed where the child has ended: what it
        had forked may hold the other end.
        """
        left = max(0.0, deadline - time.monotonic())
        found = ready([*reads, self._status], writes, left)
        if not found:
            raise TimeoutError
        if found == {self._status}:
            raise self._obituary()

    def _kill(self) -> None:
        self._kill_group()
        self._wait()

    def _kill_group(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or is so young that it leads no group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _wait(self) -> int:
        if self._ended is None:
            try:
                self._ended = self._number()
            except ChildFailed:  # with the zygote the child has died, and not what that has halted
                self._kill_group()
                self._ended = signal.SIGKILL  # once: its number may be another process's later
                raise
        return self._ended

    def _number(self) -> int:
        data = os.read(self._status, 4)
        if len(data) < 4:
            raise ChildFailed(_NO_ZYGOTE)
        return int(struct.unpack("i", data)[0])

    def _obituary(self) -> ChildFailed:
        code = os.waitstatus_to_exitcode(self._wait())
        if code >= 0:
            return ChildFailed(f"the process ended with exit code {code}")
        if -code == signal.SIGKILL:
            return ChildFailed("the process died from SIGKILL (out of memory?)", code=Code.KILLED)
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return ChildFailed(f"the process died from {name}")


class _Zygote:
    """The parent's handle of the zygote; one for this process's whole life."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        folders = [one for one in sys.path if isinstance(one, str)]  # Python passes over a Path, too
        code = "import sys; sys.path[:] = {}; from vivace.processes.zygote import main; main({}, {})"
        self.process = _from_a_lasting_thread(
            [sys.executable, "-c", code.format(folders, theirs.fileno(), os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            # A module that asks for GPUs while it is imported must not start CUDA: children could not then.
            env={**os.environ, **waiting(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        theirs.close()

    @property
    def ended(self) -> bool:
        """Has it ended, also a moment ago?"""
        return self.process.poll() is not None or is_closed(self._socket.fileno())

    def fork(self, descriptors: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps({"fork": True}).encode()], descriptors)

    def preload(self, names: Sequence[str]) -> None:
        self._socket.sendall(json.dumps({"preload": names}).encode())
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(KeyboardInterrupt):  # pressed as Python ends: the zygote ends in any case
            self.process.kill()  # it may be importing torch still, after an interrupt
            self.process.wait()


def _from_a_lasting_thread(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lasts as long as this one does, or the new one.

    "Die with the parent" means the thread that has started it: prctl(2), PR_SET_PDEATHSIG.
    """
    if threading.get_native_id() == os.getpid():  # the first one, which lasts
        return subprocess.Popen(command, **options)
    begun = Future[subprocess.Popen[bytes]]()

    def start() -> None:
        try:
            process = subprocess.Popen(command, **options)
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(process)
        process.wait()

    threading.Thread(target=start, name="vivace-zygote", daemon=True).start()
    return begun.result()


_zygotes: dict[int, _Zygote] = {}


def _zygote() -> _Zygote:
    """This process's zygote, started when first needed; a fork of this process gets one of its own."""
    found = _zygotes.get(os.getpid())
    if found is None or found.ended:
        found = _zygotes[os.getpid()] = _Zygote()
        atexit.register(found.close)
    return found


def begin() -> None:
    """Start what children are forked from: it imports beside this process, which has imports of its own."""
    _zygote()


def preload(names: Sequence[str]) -> None:
    """Let later children find these modules imported already."""
    _zygote().preload(names)


@contextlib.contextmanager
def enough_memory_to(what: str) -> Iterator[None]:
    """Where a child lacks memory, and nothing goes on without it, OutOfMemory says what that was for."""
    try:
        yield
    except ChildFailed as failed:
        if failed.code != Code.OUT_OF_MEMORY:
            raise
        raise OutOfMemory(
            f"there is not enough memory to {what} ({failed}): a smaller batch or model may fit, or a device "
            "with more memory"
        ) from None


def own_error(error: BaseException) -> VivaceError:
    """An exception as one of Vivace's, which can cross to the parent; a lack of memory, or of room on a disk,
    is named as such.
    """
    if isinstance(error, OutOfMemory):
        return ChildFailed(str(error), code=Code.OUT_OF_MEMORY)
    cause = error.__cause__ if isinstance(error, JobError) else error
    if cause is not None and ran_out_of_memory(cause):
        text = f"{type(error).__name__}: {error}".strip()
        return ChildFailed("out of memory: " + text.split("\n")[0], code=Code.OUT_OF_MEMORY)
    if cause is not None and is_busy_device(cause):
        return ChildFailed(blame(cause)[:500], code=Code.BUSY)
    if cause is not None and is_full_disk(cause):
        return FolderError(f"a disk is full, and nothing can be written any more: {blame(cause)[:500]}")
    return error if isinstance(error, VivaceError) else ChildFailed(blame(error)[:500])
