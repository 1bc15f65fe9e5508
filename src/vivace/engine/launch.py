"""Child processes: a job runs in its own process, so that a crash, a hang or a printed line stays there.

The parent talks to a child in JSON lines over two pipes; the child's standard input is closed and its output
goes to a log. A child dies with its parent, and does not see the terminal's Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cloudpickle

from vivace import errors, registry
from vivace.errors import ChildFailed, JobError, VivaceError
from vivace.job import Job

OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


class Source:
    """Where a job comes from: a reference that each child loads by itself, or a pickled Job object."""

    def __init__(self, job: Job | str) -> None:
        self.reference = job if isinstance(job, str) else None
        self.name = self.reference or "job"
        self.payload: Job | str = job

    def pickled(self, entry: str, arguments: dict[str, Any]) -> bytes:
        """What a child needs to begin: search path, registered techniques, the job, and its entry point."""
        classes = registry.registered() if self.reference is None else []
        by_value = [] if self.reference is not None else _modules_out_of_reach(self.payload, classes)
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            body = cloudpickle.dumps((self.payload, classes))
        except Exception as error:
            raise JobError(
                f"the Job cannot be sent to a child process ({error}); put it into a file and name it as file.py:name"
            ) from error
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)
        head = {"entry": entry, "arguments": arguments, "sys_path": sys.path, "body": body}
        return bytes(cloudpickle.dumps(head))


def _modules_out_of_reach(job: Any, classes: list[type]) -> list[Any]:
    """Modules of the job's functions that a fresh interpreter with the same search path would not find."""
    functions = [value for value in vars(job).values() if callable(value)]
    found = {}
    for thing in [*functions, *classes]:
        module = sys.modules.get(getattr(thing, "__module__", "") or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ in ("__main__", "builtins"):
            continue
        parts = module.__name__.split(".")
        reachable = importlib.machinery.PathFinder.find_spec(parts[0])
        at = Path(*parts).with_suffix(".py")
        if reachable is None or not any(
            Path(folder or ".", at).resolve() == Path(file) for folder in sys.path
        ):
            if Path(file).name != "__init__.py" or reachable is None:
                found[module.__name__] = module
    return list(found.values())


class Child:
    """A child process that serves commands; see `vivace.engine.child` for its side.

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
        payload = source.pickled(entry, arguments or {})
        with tempfile.NamedTemporaryFile(prefix="vivace-", suffix=".job", delete=False) as file:
            file.write(payload)
        self._payload = Path(file.name)
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        self._buffer = b""
        self.log = log
        output = log.open("ab") if log is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vivace.engine.child",
                file.name,
                str(to_child),
                str(from_child),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(to_child, from_child),
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        os.close(to_child)
        os.close(from_child)
        if log is not None:
            output.close()  # type: ignore[union-attr]

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Send one command and wait for its answer. Errors of the child are raised here under their own
        class.

        Raises ChildFailed where the child died, ran out of memory, or did not answer within `timeout`
        seconds.
        """
        message = json.dumps({"command": command, "arguments": arguments}) + "\n"
        try:
            os.write(self._write, message.encode())
        except BrokenPipeError:
            raise ChildFailed(self._obituary()) from None
        answer = json.loads(self._line(command, timeout))
        if "error" not in answer:
            return answer["answer"]
        kind, text = answer["error"]["kind"], answer["error"]["message"]
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, VivaceError):
            raise known(text)
        raise ChildFailed(text)

    def close(self) -> None:
        """End the child, by force if it does not leave by itself."""
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._kill()
        self._payload.unlink(missing_ok=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def _line(self, command: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                raise ChildFailed(f"no answer to '{command}' within {timeout:.0f} s: it was stopped")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise ChildFailed(self._obituary())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _obituary(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"the process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the process died from {name}{hint}"


def describe(error: BaseException) -> dict[str, str]:
    """An exception as the JSON that travels to the parent: Vivace's own by kind, memory exhaustion by name."""
    text = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, VivaceError):
        return {"kind": error.kind, "message": str(error)}
    if type(error).__name__ == "OutOfMemoryError" or any(mark in text for mark in OUT_OF_MEMORY):
        return {"kind": "ChildFailed", "message": "out of memory: " + text.split("\n")[0]}
    return {"kind": "ChildFailed", "message": text.split("\n")[0][:500]}
