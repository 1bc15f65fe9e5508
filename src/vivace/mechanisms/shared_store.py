"""A budgeted store of byte records in one memory-mapped file, shared by processes, which notices damage.

In memory the file has no name: it ends with the last process that holds it, also with one that was killed. On
a disk it stays, and the next run begins where this one ended. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy

from vivace.errors import Refused

_KIND = b"vivace-store-"
_MAGIC = _KIND + b"1\0\0"
_HEADER = struct.Struct("<16sQQ")  # magic, slots, bytes of records
_COUNTERS = ("records", "bytes", "hits", "misses", "damaged", "full", "unknown")
_COUNTER = struct.Struct("<Q")
_SLOT = struct.Struct("<16sQQQ")  # key, offset, length, sum of the record's 64-bit words
_SLOTS_AT = 4096
_BYTES_A_SLOT = 8192  # of records: one slot for each so many
_PROBES = 32
_WORD = 8


@dataclasses.dataclass(frozen=True)
class Room:
    """Where a record is to be written, found by nobody yet: `size` bytes, of which `view` is the record."""

    offset: int
    size: int
    view: memoryview


class SharedStore:
    """Records by a key of 16 bytes. The first to publish a key wins; nothing is ever evicted.

    A random order of reading makes every eviction rule useless: what fits in the first pass stays.

    Args:
        budget_bytes: the most bytes of records.
        path: a file on a disk, or ``/proc/PID/fd/N`` of another process's store; None: memory without a name.
    """

    def __init__(self, budget_bytes: int, path: str | Path | None = None) -> None:
        self.num_slots = max(64, budget_bytes // _BYTES_A_SLOT)
        self.records_at = -(-(_SLOTS_AT + self.num_slots * _SLOT.size) // 4096) * 4096
        self.budget_bytes = budget_bytes
        header = _HEADER.pack(_MAGIC, self.num_slots, budget_bytes)
        size = self.records_at + budget_bytes
        self._file = _opened(path, header, self.records_at, size)
        self._map = mmap.mmap(self._file, size)
        self._map[: len(header)] = header
        self._on_disk = path is not None and not str(path).startswith("/proc/")
        self._sound: set[tuple[bytes, int]] = set()
        self._owner, self._threads = os.getpid(), threading.Lock()

    @property
    def path(self) -> str:
        """Where other processes of this machine find it, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def counts(self) -> dict[str, int]:
        """Records and bytes held; hits and misses; what was found damaged, refused as full, or had no key."""
        found = _COUNTER.iter_unpack(self._map[32 : 32 + _COUNTER.size * len(_COUNTERS)])
        return dict(zip(_COUNTERS, (value for (value,) in found), strict=True))

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter that all processes share."""
        with self._locked():
            self._add(name, amount)

    def _add(self, name: str, amount: int) -> None:
        at = 32 + _COUNTER.size * _COUNTERS.index(name)
        (before,) = _COUNTER.unpack_from(self._map, at)
        _COUNTER.pack_into(self._map, at, before + amount)

    def get(self, key: bytes, length: int) -> memoryview | None:
        """The record of a key where it is there, of this length, and undamaged when first seen here."""
        _, held, offset, found, total = self._slot(key)
        if held != key:
            self.count("misses")
            return None
        within = found - length in range(_WORD) and self.records_at <= offset <= len(self._map) - found
        if not within or ((key, offset) not in self._sound and _sum(self._at(offset, found)) != total):
            self.count("damaged")
            return None
        self._sound.add((key, offset))
        self.count("hits")
        return self._at(offset, length)

    def put(self, key: bytes, data: bytes) -> bool:
        """Keep a copy of `data` and let every process find it; False where the budget or the disk is full."""
        room = self.reserve(key, len(data))
        if room is None:
            return False
        room.view[:] = data
        return self.publish(key, room)

    def reserve(self, key: bytes, length: int) -> Room | None:
        """Room for a record of `key`, for the caller alone; None where the budget or the disk is full."""
        size = -(-length // _WORD) * _WORD
        with self._locked():
            used = self.counts()["bytes"]
            fits = used + size <= self.budget_bytes and self._slot(key)[0] >= 0
            self._add("bytes" if fits else "full", size if fits else 1)
        offset = self.records_at + used
        if not fits or not self._allocated(offset, size):
            return None
        return Room(offset, size, self._at(offset, length))

    def publish(self, key: bytes, room: Room) -> bool:
        """Let every process find what was written into `room`."""
        with self._locked():
            slot, held, *_ = self._slot(key)
            if slot < 0:
                return False
            self._add("records", int(held != key))
            at = _SLOTS_AT + slot * _SLOT.size
            self._map[at : at + 16] = bytes(16)  # nobody may find the key beside another record's place
            total = _sum(self._at(room.offset, room.size))
            _SLOT.pack_into(self._map, at, bytes(16), room.offset, room.size, total)
            self._map[at : at + 16] = key
        return True

    def give_back(self, room: Room) -> None:
        """What was reserved is free again, unless more was reserved behind it since."""
        self._at(room.offset, room.size)[:] = bytes(room.size)
        with self._locked():
            last = self.records_at + self.counts()["bytes"] == room.offset + room.size
            self._add("bytes", -room.size if last else 0)

    def _at(self, offset: int, length: int) -> memoryview:
        return memoryview(self._map)[offset : offset + length]

    def _slot(self, key: bytes) -> tuple[int, bytes, int, int, int]:
        """The key's slot or the free one that it would take, with what it holds; -1 where there is none."""
        start = int.from_bytes(key[:8], "little")
        for step in range(_PROBES):
            number = (start + step) % self.num_slots
            held, offset, length, total = _SLOT.unpack_from(self._map, _SLOTS_AT + number * _SLOT.size)
            if held == key or held == bytes(16):
                return number, held, offset, length, total
        return -1, b"", 0, 0, 0

    def _allocated(self, offset: int, size: int) -> bool:
        """Claim room on a disk: a full one is an error here; through the mapping it ends the process."""
        try:
            if self._on_disk:
                os.posix_fallocate(self._file, offset, size)
        except OSError:
            self.count("full")
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among threads and processes: a killed process gives a file's record lock back."""
        if self._owner != os.getpid():  # forked, perhaps while another thread was inside
            self._owner, self._threads = os.getpid(), threading.Lock()
        with self._threads:  # a record lock is the process's: a second thread would be let in
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the file back; records that are still looked at keep the memory until they go."""
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._file)


def _opened(path: str | Path | None, header: bytes, records_at: int, size: int) -> int:
    """A file of `size` bytes; a store of another size or version is replaced, not cut: others may read it."""
    if path is None:
        found = os.memfd_create("vivace-store", os.MFD_CLOEXEC)
        os.ftruncate(found, size)
        return found
    try:
        if str(path).startswith("/proc/"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return _opened_on_disk(Path(path).expanduser(), header, records_at, size)
    except OSError as error:
        raise Refused(f"'{path}' cannot be used: {error.strerror}") from None


def _opened_on_disk(path: Path, header: bytes, records_at: int, size: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(found, fcntl.LOCK_EX)
            if os.fstat(found).st_size == 0:
                os.pwrite(found, header, 0)  # first, so that it is known for ours whatever comes next
                os.posix_fallocate(found, 0, records_at)
                os.ftruncate(found, size)
            head = os.pread(found, len(header), 0)
            if os.fstat(found).st_size == size and head == header:
                fcntl.lockf(found, fcntl.LOCK_UN)
                return found
            if not head.startswith(_KIND):
                raise Refused(f"'{path}' is a file of another kind, which it would replace: name a new one")
            path.unlink(missing_ok=True)
        except BaseException:
            os.close(found)  # and with it the lock, for which others wait
            raise
        os.close(found)


def _sum(record: memoryview) -> int:
    """The sum of 64-bit words: it notices any change of one word and lost pages, not two words exchanged."""
    return int(numpy.frombuffer(record, numpy.uint64).sum(dtype=numpy.uint64))
