"""C code of Vivace's own, compiled once for a machine by the compiler that is there."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from vivace.inspection.store import cache_folder

NUMBERS_A_THREAD = 8_192
HEADER = Path(__file__).with_name("numbers.h")  # which they share
FLAGS = ("-x", "c", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{HEADER.parent}")


@functools.cache
def compiled(source: Path) -> ctypes.CDLL:
    """What a C file defines, compiled for this processor unless the cache folder has it.

    Raises OSError with a reason, where there is no gcc, or it fails, or the folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "gcc"))), None)
    if compiler is None:
        raise OSError("gcc is needed, and neither gcc nor g++ is here")
    # What a compiler defines names its version and every instruction that it may use.
    defined = _output(compiler, *FLAGS, "-dM", "-E", os.devnull)
    text = "".join(file.read_text(encoding="utf-8") for file in (HEADER, source))
    flags = tuple(flag for flag in FLAGS if not flag.startswith("-I"))  # wherever the header lies
    key = hashlib.sha256(f"{text}{flags}{defined}".encode()).hexdigest()[:16]
    path = cache_folder() / "compiled" / f"{source.stem}-{key}.so"
    if not path.exists():
        _compile(compiler, source, path)
    _require_own(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # torn by a crash, or of another C library
        _compile(compiler, source, path)
        return ctypes.CDLL(str(path))


def threads_for(numbers: int) -> int:
    """How many of PyTorch's threads pay for a pass over so many numbers: each takes some time to wake."""
    import torch

    return max(1, min(torch.get_num_threads(), numbers // NUMBERS_A_THREAD))


def _compile(compiler: str, source: Path, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _output(compiler, *FLAGS, str(source), "-o", str(made))
        os.replace(made, path)  # whole, also where several processes compile it


def _require_own(path: Path) -> None:
    """No code is run that somebody else could have put there, as in a folder of a temporary one."""
    for place in (path, path.parent, path.parent.parent, path.parent.parent.parent):
        found = place.stat()
        open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or open_to_all:
            raise OSError(f"others may write to '{place}': set XDG_CACHE_HOME to a folder of your own")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise OSError(f"{command[0]} ends with {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout
