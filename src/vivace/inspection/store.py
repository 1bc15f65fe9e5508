"""The store of measured ceilings: one JSON file a machine, in the user's cache folder. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from vivace.inspection.ceilings import Ceiling, Survey

FORMAT = 1


def cache_folder() -> Path:
    """What is known of machines, and spares time only: ``$XDG_CACHE_HOME/vivace``."""
    named = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    found = next(filter(os.path.isabs, named), None)  # a container's user may have no home
    return Path(found or f"{tempfile.gettempdir()}/cache-{os.getuid()}") / "vivace"


def path_of(fingerprint: str) -> Path:
    """Where the ceilings of a machine lie: ``$XDG_CACHE_HOME/vivace/ceilings/FINGERPRINT.json``."""
    return cache_folder() / "ceilings" / f"{fingerprint}.json"


def load(fingerprint: str, device: str) -> Survey:
    """What was measured on a machine's `device` (``cpu``, ``cuda``); empty where nothing is readable."""
    document = _mapping(_read(path_of(fingerprint)).get(device))
    found = Survey(absent={key: str(reason) for key, reason in _mapping(document.get("absent")).items()})
    for key, entry in _mapping(document.get("ceilings")).items():
        with contextlib.suppress(TypeError, ValueError, KeyError):
            ceiling = Ceiling(
                float(entry["value"]),
                float(entry["spread"]),
                int(entry["num_readings"]),
                entry["measured_at"],
            )
            if math.isfinite(ceiling.value) and ceiling.value > 0:
                found.ceilings[key] = ceiling
    return found


def names(fingerprint: str) -> tuple[str, ...]:
    """What was measured on a machine: kinds of devices, and compute APIs with their devices."""
    return tuple(_read(path_of(fingerprint)))


def cached_ceilings(fingerprint: str, device: str) -> dict[str, float]:
    """The stored ceilings of this machine's `device` in SI units; empty before `vivace inspect --measure`."""
    return load(fingerprint, device).values


def save(fingerprint: str, device: str, survey: Survey) -> Path:
    """Keep a survey; what it did not reach stays as it was stored before. May raise OSError.

    The file is replaced whole, so a reader and a crash see the old one or the new one.
    """
    path = path_of(fingerprint)
    before = load(fingerprint, device).ceilings
    kept = {key: ceiling for key, ceiling in before.items() if key in survey.unreached}
    ceilings = {**kept, **survey.ceilings}
    absent = {key: reason for key, reason in survey.absent.items() if key not in ceilings}
    document = _read(path)
    document[device] = {
        "ceilings": {key: dataclasses.asdict(ceiling) for key, ceiling in ceilings.items()},
        "absent": absent,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".new-", suffix=".json", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "devices": document}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


def _read(path: Path) -> dict[str, Any]:
    """The devices of a stored file; empty where it is missing, torn, or of another format."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return {}
    return _mapping(document.get("devices"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
