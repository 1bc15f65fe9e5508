"""The gauges of the host: disk and JPEG decoding. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy

from vivace.inspection.limits import memory_limit, own_cores, read
from vivace.inspection.reading import Gauge, Reading, Unmeasured

MIB = 2**20
FILE_BYTES, BLOCK_BYTES, NUM_READERS = 256 * MIB, MIB, 4
READING_SECONDS = 0.3
IMAGE_SHAPE = (375, 500, 3)


def disk_read(cleanup: contextlib.ExitStack) -> Reading:
    """Several readers share a nameless file of random bytes in the working folder, past the page cache.

    As the workers of a loader do; one alone leaves a disk idle between two of its blocks, for as long as the
    disk's own delay takes, which repeats worse from minute to minute than what the disk can give.
    """
    if shutil.disk_usage(os.getcwd()).free < 4 * FILE_BYTES:
        raise Unmeasured("the working folder's disk is almost full")
    try:
        file = cleanup.enter_context(tempfile.TemporaryFile(dir=os.getcwd()))  # noqa: SIM115
        _fill(file.fileno())
    except OSError as error:
        raise Unmeasured(f"the working folder cannot be written: {error.strerror}") from None
    blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(NUM_READERS)]  # aligned to pages, for direct reading

    def read() -> float:
        places = iter(range(0, FILE_BYTES, BLOCK_BYTES))
        with _uncached(file.fileno()) as handle, ThreadPoolExecutor(NUM_READERS) as readers:
            begin = time.perf_counter()
            done = sum(readers.map(partial(_read_share, handle, places, begin + READING_SECONDS), blocks))
            return done / (time.perf_counter() - begin)

    return read


def jpeg_decode_per_core() -> Reading:
    """Decode a 500x375 image with a photograph's detail, 84 kB, to RGB by Pillow in one thread.

    By the processor's time of the thread: what else runs on the core is no part of what a core can do.
    """
    if importlib.util.find_spec("PIL") is None:
        raise Unmeasured("Pillow is not installed")
    from PIL import Image

    encoded = _photograph()

    def decode() -> float:
        begin, done, seconds = time.thread_time(), 0, 0.0
        while seconds < READING_SECONDS:
            Image.open(io.BytesIO(encoded)).convert("RGB")
            done += 1
            seconds = time.thread_time() - begin
        return done / seconds

    return decode


def gauges(cleanup: contextlib.ExitStack) -> list[Gauge]:
    """The host's gauges; `cleanup` closes their file."""
    return [
        Gauge("disk_read", partial(disk_read, cleanup)),
        Gauge("jpeg_decode_per_core", jpeg_decode_per_core),
    ]


def beyond_the_caches(root: Path = Path("/")) -> int:
    """Bytes that no caches hold: twice those of the largest level of all our cores, which on many processors
    have several; at least 256 MiB, at most a 16th of memory.
    """
    sizes: dict[tuple[str, str], int] = {}
    for core in own_cores():
        for cache in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            sizes[cache.name, read(cache / "shared_cpu_list")] = _size(read(cache / "size").strip())
    totals: Counter[str] = Counter()
    for (name, _), size in sizes.items():
        totals[name] += size
    return min(max(256 * MIB, 2 * max(totals.values(), default=0)), memory_limit() // 16)


def _size(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[:-1].isdigit() and text[-1] in units else 0


def _read_share(handle: int, places: Iterator[int], end: float, block: mmap.mmap) -> int:
    """Read the next place that no other reader has, until none is left or the time is up; bytes read."""
    done = 0
    for place in places:
        done += os.preadv(handle, [block], place)
        if time.perf_counter() > end:
            break
    return done


def _fill(handle: int) -> None:
    content = os.urandom(BLOCK_BYTES)
    for _ in range(FILE_BYTES // BLOCK_BYTES):
        os.write(handle, content)
        content = content[1:] + content[:1]  # blocks differ, lest the file system stores one
    os.fsync(handle)


@contextlib.contextmanager
def _uncached(handle: int):  # type: ignore[no-untyped-def]
    """The file opened for direct reading; where its file system has none, its pages are dropped first."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        direct = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        yield handle
        return
    try:
        yield direct
    finally:
        os.close(direct)


def _photograph() -> bytes:
    """A JPEG whose detail falls with frequency as in photographs: noise of several sizes, summed."""
    from PIL import Image

    random = numpy.random.default_rng(0)
    height, width, channels = IMAGE_SHAPE
    total = numpy.full(IMAGE_SHAPE, 128.0)
    for step, strength in ((125, 60.0), (25, 30.0), (5, 15.0), (1, 9.0)):
        coarse = random.normal(0, strength, (height // step, width // step, channels))
        total += coarse.repeat(step, axis=0).repeat(step, axis=1)
    memory = io.BytesIO()
    Image.fromarray(total.clip(0, 255).astype(numpy.uint8)).save(memory, "JPEG", quality=90)
    return memory.getvalue()
