"""The source of Python's own standard library, split so that no package is on both sides."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

from vivace.errors import InputError

# Tests may be left out of an installation; encodings are tables, nearly the same ones a hundred times.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
SPLITS = ("training", "validation", "test")


def split_of(package: str) -> str:
    """Which split a top-level module or package belongs to: 8, 1 and 1 of ten, whatever the version."""
    share = hashlib.sha256(package.encode()).digest()[0] % 10
    return SPLITS[max(0, share - 7)]


def text(split: str) -> bytes:
    """The files of one split, one after the other. Raises InputError where there is no source."""
    found = _texts()[split]
    if not found:
        raise InputError(f"no source of Python's standard library is in '{sysconfig.get_path('stdlib')}'")
    return found


@functools.cache
def _texts() -> dict[str, bytes]:
    """Each split's files; a file that is there twice counts once, for the split that has it first."""
    folder = Path(sysconfig.get_path("stdlib"))
    seen: set[bytes] = set()
    found: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    paths = list[Path]()
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - LEFT_OUT  # what is installed may be a hundred times as much
        paths += (Path(place, name) for name in files if name.endswith(".py"))
    for path in sorted(paths):
        parts = path.relative_to(folder).with_suffix("").parts
        content = b"" if LEFT_OUT & set(parts) else path.read_bytes()
        if content and content not in seen:
            seen.add(content)
            found[split_of(parts[0])].append(content)
    return {split: b"\n".join(files) for split, files in found.items()}
