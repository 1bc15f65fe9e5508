"""What a run says while it trains: JSON lines, TensorBoard events where it is installed, and a callback."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vivace.errors import FolderError
from vivace.events import OnEvent, scalars_of, teller
from vivace.files import finite, open_own, own_folder
from vivace.inspection.energy import Meter
from vivace.training.crew import num_ranks_here
from vivace.training.folder import LOG

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class ListenerFailed(Exception):
    """The run's listener has raised `error`, which reaches the person once what was trained is kept."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def raising_the_listeners() -> Iterator[None]:
    """What a listener raises inside leaves as what it is."""
    try:
        yield
    except ListenerFailed as failed:
        raise failed.error from failed.error.__cause__


class Progress:
    """The log of one run. A disk that refuses it stops the log, with one notice, and not the training.

    Args:
        folder: the run folder; None on ranks that write nothing.
        step: the step at which the run goes on.
        log_bytes: the length of the log at that step; what a killed run wrote after it is cut off.
        on_event: the run's listener.
        on_gpus: count the energy of those that this machine's ranks train on, too.
    """

    def __init__(
        self, folder: Path | None, step: int, log_bytes: int, on_event: OnEvent | None, *, on_gpus: bool
    ) -> None:
        self.notices: list[str] = []
        self.meter = Meter(gpus=num_ranks_here() if on_gpus else 0)
        self._tell = teller(on_event if folder is not None else None)
        self._holder, self._held = 0, deque[tuple[str, dict[str, object]]]()  # see `held`
        self._path = folder / LOG if folder is not None else None
        self.num_bytes = log_bytes  # of metrics.jsonl as far as it is whole: a resumed run cuts it off there
        self._scalars: Callable[[int, dict[str, float]], None] | None = None
        if self._path is not None and folder is not None:
            self._guard(lambda: self._open(folder, step, log_bytes))

    def log(self, kind: str, record: dict[str, Any]) -> None:
        """Append one line of JSON with a ``step``, and tell the callback."""
        self.tell(kind, **record)
        self.meter.joules()  # before a counter begins anew
        if self._path is not None:
            self._guard(lambda: self._append(record))

    def tell(self, kind: str, **fields: object) -> None:
        """Call `on_event` without writing to the log. Raises ListenerFailed where that raises."""
        if self._holder == threading.get_ident():
            self._held.append((kind, fields))
        else:
            self._hand_on(kind, fields)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What this thread tells inside reaches `on_event` at the end: a listener breaks no step off.

        Other threads do not wait: they tell of steps that may never end.
        """
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = 0
            while self._held:
                self._hand_on(*self._held.popleft())

    def _hand_on(self, kind: str, fields: dict[str, object]) -> None:
        try:
            self._tell(kind, fields)
        except Exception as error:
            raise ListenerFailed(error) from error

    def notice(self, text: str) -> None:
        """A sentence that the person should read, now and in ``run.json``."""
        self.notices.append(text)
        self.tell("notice", text=text)

    def _open(self, folder: Path, step: int, log_bytes: int) -> None:
        assert self._path is not None
        with os.fdopen(open_own(self._path, _APPEND), "ab") as file:
            self.num_bytes = min(log_bytes, os.fstat(file.fileno()).st_size)
            file.truncate(self.num_bytes)
        self._scalars = tensorboard_writer(folder / "tensorboard", step)

    def _append(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        with os.fdopen(open_own(self._path, _APPEND), "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")
            file.flush()
            self.num_bytes = os.fstat(file.fileno()).st_size
        if self._scalars is not None:
            self._scalars(record["step"], scalars_of(record))

    def _guard(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, FolderError) as error:
            path, self._path, self._scalars = self._path, None, None
            reason = error.strerror if isinstance(error, OSError) else error
            self.notice(f"the log '{path}' cannot be written ({reason}): training goes on without it")


def tensorboard_writer(folder: Path, step: int) -> Callable[[int, dict[str, float]], None] | None:
    """``(step, scalars) -> None``, appending to an event file in `folder`; None without tensorboard.

    Events of later steps than `step`, from a run that was killed, are dropped by TensorBoard when it reads
    the file.
    """
    try:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
    except ImportError:
        return None
    own_folder(folder)
    path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"

    def append(*found: Any) -> None:
        with os.fdopen(open_own(path, _APPEND), "ab") as file:
            for event in found:
                records.RecordWriter(file).write(event.SerializeToString())

    start = events.SessionLog(status=events.SessionLog.START)
    append(
        events.Event(wall_time=time.time(), file_version="brain.Event:2"),
        events.Event(wall_time=time.time(), step=step, session_log=start),
    )

    def write(at: int, scalars: dict[str, float]) -> None:
        values = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        append(events.Event(wall_time=time.time(), step=at, summary=summaries.Summary(value=values)))

    return write
