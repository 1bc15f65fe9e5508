"""Files of the data against what `sha256sum` wrote of them: no decoder notices a bit that has flipped."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from vivace.errors import JobError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class Checksums:
    """What stands in a file of `sha256sum`; names in it are taken from the folder in which it lies.

    Raises JobError where it is no such file.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = Path(file).absolute()
        self._whole: set[str] = set()
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"the Job's checksums '{self.file}' cannot be read: {error}") from None
        found = [_LINE.fullmatch(line) for line in lines]
        if None in found:
            number = found.index(None)
            raise JobError(
                f"line {number + 1} of the Job's checksums '{self.file}' is {lines[number][:40]!r}, and not "
                "as sha256sum writes it"
            )
        names = [os.path.normpath(self.file.parent / line[2]) for line in found if line is not None]
        self._wanted = dict(zip(names, (line[1] for line in found if line is not None), strict=True))

    def require(self, path: str) -> None:
        """Raises OSError where a file has changed, or is not listed; looks at each once in a process."""
        if path in self._whole:
            return
        wanted = self._wanted.get(os.path.abspath(path))
        if wanted is None:
            raise OSError(f"it is not listed in '{self.file}'")
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise OSError(f"it has changed: its sha256 is not the one in '{self.file}'")
        self._whole.add(path)
