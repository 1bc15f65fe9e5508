"""Worker processes that fetch a script's batches ahead of it: forked from it, and ended without being asked.

torch's own workers are no choice here: the death of one raises in the script wherever that is, a batch lies
in /dev/shm for as long as the script holds it, and what they draw from random streams goes unseen.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy
import torch

from vivace.live.fetching import difference
from vivace.tensors import randomness

PR_SET_PDEATHSIG = 1
SIGNALS = {signal.SIGINT, signal.SIGTERM}
GONE_SECONDS = 1.0  # for a killed process to end; one that hangs in a disk's driver does not
PAGE = 4096
SMALL_BYTES = 4096  # of an array: not worth a place of its own
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What would be seen outside of a worker, or outlive it, by Python's own audit events.
CHANGES = {
    "os.fork",
    "os.forkpty",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.system",
    "os.truncate",
    "subprocess.Popen",
}


class CannotFetch(Exception):
    """A batch did not come from the workers; the message says why."""


class Request(NamedTuple):
    """The `indices` of a batch, and whether it is to be fetched `twice` and compared."""

    indices: object
    twice: bool


class Answer(NamedTuple):
    """Bytes in the worker's place: of the pickled batch, and of the arrays beside it; or a `fault`."""

    pickled: int
    arrays: tuple[int, ...]
    fault: str = ""


class Crew:
    """`num_workers` processes, each with `ahead` batches that it may be asked for at a time.

    Made, it has forked them from this process as it is. Of each batch `slot_bytes` have place. The first
    answer is waited for as long as any: at most `patience` seconds. What any method raises, the crew is of no
    more use but to be closed.
    """

    def __init__(
        self,
        fetch: Callable[[Any], Any],
        num_workers: int,
        ahead: int,
        slot_bytes: int,
        patience: float,
    ) -> None:
        self.room = num_workers * ahead
        self.ahead, self.patience = ahead, patience
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self._pid = os.getpid()
        self._memory = mmap.mmap(-1, num_workers * ahead * self.slot_bytes)  # taken only where it is written
        self._asked = self._taken = 0
        self.own_seconds = 0.0  # to start and to end
        begin = time.perf_counter()
        self._workers: list[Any] = []
        self._lines: list[Connection] = []
        try:
            for number in range(num_workers):
                self._start(fetch, number)
        except BaseException:
            self.close()
            raise
        self.own_seconds = time.perf_counter() - begin

    def _start(self, fetch: Callable[[Any], Any], number: int) -> None:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        self._lines.append(mine)
        own = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else these say on the screen that we fork
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the worker answers none of them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's about threads beside a fork
                worker = context.Process(target=self._work, args=(fetch, theirs, number), daemon=True)
                worker.start()
            self._workers.append(worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            if own is None:
                os.environ.pop("TOKENIZERS_PARALLELISM", None)
            theirs.close()

    @property
    def processes(self) -> list[int]:
        """The workers."""
        return [worker.pid for worker in self._workers]

    def ask(self, index: object, *, twice: bool = False) -> None:
        """Let the next worker in turn fetch a batch. Raises CannotFetch where that is dead."""
        try:
            self._lines[self._asked % len(self._lines)].send(Request(index, twice))
        except OSError:
            raise CannotFetch("one of its workers died") from None
        self._asked += 1

    def take(self) -> Any:
        """The batch that was asked for first. Raises CannotFetch where it may not be used, or none comes."""
        answer, start = self._answer()
        if answer.fault:
            raise CannotFetch(answer.fault)
        return self._read(answer, start)

    def pass_over(self) -> None:
        """Leave out the batch that was asked for first. Raises CannotFetch where none comes."""
        self._answer()

    def _answer(self) -> tuple[Answer, int]:
        """What came, and where its bytes begin."""
        number = self._taken % len(self._lines)
        line = self._lines[number]
        if not line.poll(self.patience):
            raise CannotFetch(f"its workers gave nothing in {self.patience:.0f} s")
        try:
            answer: Answer = line.recv()
        except (EOFError, OSError):
            raise CannotFetch("one of its workers died") from None
        start = self._place(number, self._taken // len(self._lines))
        self._taken += 1
        return answer, start

    def _place(self, number: int, turn: int) -> int:
        return (number * self.ahead + turn % self.ahead) * self.slot_bytes

    def _read(self, answer: Answer, start: int) -> Any:
        """Unpickled, with every array in memory of this process's own."""
        pickled = self._memory[start : start + answer.pickled]
        arrays, place = [], start + _aligned(answer.pickled)
        for size in answer.arrays:
            there = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=place)
            arrays.append(there.clone().numpy())
            place += _aligned(size)
        return pickle.loads(pickled, buffers=arrays)

    def close(self) -> None:
        """End the workers at once: they hold nothing that would be lost."""
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        begin = time.perf_counter()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(GONE_SECONDS)
        for line in self._lines:
            line.close()
        self._workers, self._lines = [], []
        self.own_seconds += time.perf_counter() - begin

    # In a worker.

    def _work(self, fetch: Callable[[Any], Any], line: Connection, number: int) -> None:
        _end_with(self._pid)
        torch.set_num_threads(1)
        watch = _Watch()
        turn = 0
        while True:
            try:
                request: Request = line.recv()
            except EOFError:
                return
            try:
                batch, fault = watch.fetched(fetch, request)
                answer = Answer(0, (), fault)
                if not fault:
                    answer = self._written(batch, self._place(number, turn))
            except Exception as error:
                answer = Answer(0, (), f"in a worker it fails with {type(error).__name__}: {error}"[:500])
            line.send(answer)
            turn += 1

    def _written(self, batch: object, start: int) -> Answer:
        buffers: list[memoryview] = []

        def own_place(buffer: pickle.PickleBuffer) -> bool:
            """False is how a pickler is told that the bytes are taken care of."""
            flat = buffer.raw()
            if flat.nbytes >= SMALL_BYTES:
                buffers.append(flat)
            return flat.nbytes < SMALL_BYTES

        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=own_place).dump(batch)
        pieces = [file.getbuffer(), *buffers]
        if sum(_aligned(piece.nbytes) for piece in pieces) > self.slot_bytes:
            return Answer(0, (), "a batch is much larger than those before it")
        for piece in pieces:
            self._memory[start : start + piece.nbytes] = piece  # type: ignore[assignment]
            start += _aligned(piece.nbytes)
        return Answer(pieces[0].nbytes, tuple(piece.nbytes for piece in buffers))


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class _Pickler(pickle.Pickler):
    """Hands the bytes of plain tensors over as they are; others, as those of a subclass, in torch's way."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is not torch.Tensor:
            return NotImplemented
        kind = thing.layout, thing.device.type, thing.requires_grad, thing.is_quantized
        plain = kind == (torch.strided, "cpu", False, False) and not (thing.is_conj() or thing.is_neg())
        if not (plain and thing.is_contiguous() and thing.numel()):
            return NotImplemented
        flat: Any = thing.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat), thing.dtype, tuple(thing.shape))


def _tensor(
    data: bytes | bytearray | numpy.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if isinstance(data, numpy.ndarray):  # which torch has made
        flat = torch.from_numpy(data)
    else:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
    return flat.view(dtype).reshape(shape)


def _end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, however that comes, and answer none of its signals."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(0)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script to answer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Said(io.TextIOBase):
    """In the place of a stream: what is printed in a worker would stand twice on the screen, or too early."""

    def __init__(self) -> None:
        self.anything = False

    def write(self, text: str) -> int:
        self.anything = True
        return len(text)


class _Watch:
    """Fetches batches in a worker, and sees what a worker may not do."""

    def __init__(self) -> None:
        self._changed = ""
        self._fetching = self._logs = False
        self._screen = os.memfd_create("said")  # in the place of the script's, for what is not Python's too
        os.dup2(self._screen, 1)
        os.dup2(self._screen, 2)
        logging.Logger.callHandlers = self._logged  # type: ignore[method-assign, assignment]
        sys.addaudithook(self._look)

    def _logged(self, record: logging.LogRecord) -> None:
        self._logs = True

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._fetching:
            return
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if (opens and arguments[0] != os.devnull) or event in CHANGES:
            self._changed = f"fetching writes, or starts something ({event}: {arguments[0]!r})"[:300]
            raise PermissionError(self._changed)  # before it is done; the script's own process does it

    @contextlib.contextmanager
    def _watching(self) -> Iterator[_Said]:
        said = _Said()
        os.ftruncate(self._screen, 0)
        self._changed, self._fetching, self._logs = "", True, False
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                yield said
            finally:
                self._fetching = False

    def fetched(self, fetch: Callable[[Any], Any], request: Request) -> tuple[object, str]:
        """The batch, and why it may not be used or empty."""
        before = randomness.capture()
        try:
            with self._watching() as said:
                batch = fetch(request.indices)
                again = fetch(request.indices) if request.twice else None
        except Exception:
            if self._changed:
                return None, self._changed
            raise
        printed = said.anything or self._logs or os.fstat(self._screen).st_size > 0
        fault = self._changed or ("it prints while it is fetched" if printed else "")
        after = randomness.capture()
        if not (randomness.same_host_state(before, after) and torch.equal(before["torch"], after["torch"])):
            fault = fault or "fetching draws random numbers"
        if request.twice and not fault:
            other = difference(batch, again)
            fault = f"fetched twice, it is another batch: {other}" if other else ""
        return batch, fault
