"""Files of ours in folders that others may have filled: replaced whole or not at all, through no link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from vivace.errors import FolderError, is_full_disk

LOCK = "lock"
FULL_BYTES = 2**20  # a disk on which a write failed and no more is free
_MARKS = {".html": b"Vivace</title>", ".json": b'"page_path":'}  # what pages and documents of ours hold
_LEFTOVER = re.compile(r".+\.tmp\.[0-9a-f]{8}")


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a new file that takes the place of `path`, whole or not at all. Raises FolderError."""
    temporary = path.with_name(f"{path.name}.tmp.{uuid.uuid4().hex[:8]}")
    try:
        try:
            with _new(temporary) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            # torch.save reports a full disk as a RuntimeError of positions
            full = isinstance(error, RuntimeError) and shutil.disk_usage(path.parent).free < FULL_BYTES
            temporary.unlink(missing_ok=True)
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise FolderError(f"'{path}' cannot be written: {reason}") from None


def replace_text(path: Path, text: str) -> None:
    """Like `replace_file`, with a text; what UTF-8 cannot hold becomes '?'."""
    replace_file(path, lambda file: file.write(text.encode(errors="replace")))


def finite(content: object) -> Any:
    """A document as every reader of JSON takes it: None for each number that is not finite, for which JSON
    has no word.
    """
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def open_own(path: Path, flags: int) -> int:
    """A descriptor of our own file `path`, opened with `flags` of `os.open`.

    Raises FolderError where a link, a folder or a pipe stands in its place, OSError as `os.open` does.
    """
    if path.is_symlink():
        raise FolderError(f"'{path}' is a link, and Vivace writes into files of its own only: remove it")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FolderError(f"'{path}' is not a file: remove it")
    return descriptor


@contextlib.contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Let a command that writes into its folder, and temporary files, say so where a disk is full.

    Raises FolderError.
    """
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise FolderError(f"a disk is full, that of '{folder}' or of '{tempfile.gettempdir()}'") from None


def read_own(path: Path) -> bytes:
    """All of our own file `path`; nothing where there is none. Raises as `open_own` does."""
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def own_folder(path: Path) -> Path:
    """Our own folder `path`, made where there is none. Raises FolderError where a link stands there."""
    if path.is_symlink():
        raise FolderError(f"'{path}' is a link, and Vivace writes into folders of its own only: remove it")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise FolderError(f"the folder '{path}' cannot be made: {error.strerror}") from None
    return path


def take_lock(folder: Path, what: str) -> IO[bytes]:
    """Lock our own folder against a second `what` until the file is closed; a lock dies with its process.

    Raises FolderError where another one holds it, or its disk has no locks, as some of clusters have none.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = os.fdopen(open_own(folder / LOCK, os.O_RDWR | os.O_CREAT), "rb+")
            stack.enter_context(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"another {what} is running in '{folder}': wait for it, stop it, or choose a new name"
            ) from None
        except OSError as error:
            raise FolderError(
                f"the folder '{folder}' cannot be locked: {error.strerror}; name another one"
            ) from None
        stack.pop_all()
    return file


def is_leftover(name: str) -> bool:
    """Is this the name of a file that a killed process had begun to write?"""
    return _LEFTOVER.fullmatch(name) is not None


def _new(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")


def output_folder(folder: Path, own: Iterable[str], *, locked: bool = False) -> Path:
    """The output folder of a command, made if missing; its absolute path.

    `own` are patterns of names that an earlier run of the command left there. Raises FolderError where
    anything else lies in it, where it is a file, or cannot be written. `locked`: an earlier run has left its
    lock, and where there is none all files are a person's own, whatever they are called.
    """
    patterns = tuple(own)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name that a kill could leave behind
            pass
        found = [entry for entry in folder.iterdir() if not is_leftover(entry.name)]
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        said = "" if file == folder else f" cannot be made, as '{file}'"
        raise FolderError(f"the output '{folder}'{said} is a file; name a folder") from None
    except OSError as error:
        raise FolderError(f"the output folder '{folder}' cannot be written: {error.strerror}") from None
    if locked and LOCK not in (entry.name for entry in found):
        patterns = ()
    strangers = [entry.name for entry in found if not any(map(entry.match, patterns))]
    if strangers:
        raise FolderError(
            f"the output folder '{folder}' is not empty ({min(strangers)}): name another with --out"
        )
    return folder.absolute()


def require_page(page: Path) -> None:
    """Raises FolderError where the page of a command, or the document of its name beside it, is a person's
    own file, or cannot be read.
    """
    for path in (page, page.with_suffix(".json")):
        try:
            content = read_own(path)
        except OSError as error:
            raise FolderError(f"'{path}' cannot be read: {error.strerror}") from None
        if content and _MARKS[path.suffix] not in content:
            raise FolderError(
                f"'{path}' is not what vivace {page.stem} wrote: name another folder with --out"
            )
