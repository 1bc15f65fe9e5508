"""The output folder of a tune run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vivace.errors import FolderError
from vivace.files import is_leftover

LONG_PLAN = "plan-long.toml"
OWN = {"ledger.jsonl", "plan.toml", LONG_PLAN, "report.html", "children.log"}


def claim_folder(folder: Path) -> Path:
    """Make the folder, or take over that of an earlier tune run; its absolute path. Raises FolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name that a kill could leave behind
            pass
        found = {entry.name for entry in os.scandir(folder) if not is_leftover(entry.name)}
    except (FileExistsError, NotADirectoryError):
        raise FolderError(f"the output '{folder}' is a file; name a folder") from None
    except OSError as error:
        raise FolderError(f"the output folder '{folder}' cannot be written: {error.strerror}") from None
    strangers = found - OWN
    if strangers:
        raise FolderError(
            f"the output folder '{folder}' is not empty ({sorted(strangers)[0]}): name another with --out"
        )
    return folder.absolute()
