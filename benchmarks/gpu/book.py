"""What was measured: one file of JSON lines, written case by case, so that it can go on later."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vivace
from vivace.errors import ChildFailed, InputError, Refused, Unsteady
from vivace.inspection.nvidia import ask, visible

SAME = ("device", "driver", "torch", "dry")
FILE = "cases.jsonl"
Case = dict[str, Any]
AGAIN = ("failed", "unsteady")  # what another call does again
FAILED: Case = {"status": "failed"}


def facts(dry: bool) -> dict[str, Any]:
    """The facts under which everything here holds; asks the driver's library, not CUDA."""
    machine = vivace.inspect()
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": machine.device.name,
        "kind": machine.device.kind,
        "memory_bytes": machine.device.memory_bytes,
        "features": list(machine.device.features),
        "fingerprint": machine.fingerprint,
        "cores": machine.num_cores,
        "vivace": vivace.__version__,
        "dry": dry,
        **machine.versions,  # with the driver's, where there is one
    }
    with contextlib.suppress(Exception):  # a machine without NVML
        import pynvml as nvml

        handle = _handle()
        found["power_limit_watts"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        found["clock_max_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        found["memory_clock_max_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
    return found


def gauges() -> dict[str, float]:
    """Clock, power and temperature now; empty where NVML does not tell."""
    with contextlib.suppress(Exception):
        import pynvml as nvml

        handle = _handle()
        return {
            "clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
    return {}


def _handle() -> Any:
    import pynvml as nvml

    nvml.nvmlInit()
    shown = visible(ask(nvml).gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return nvml.nvmlDeviceGetHandleByIndex(shown[0].index)


class Book:
    """The cases of one part, until its time is up. Whatever a case does, the next one comes.

    Args:
        folder: where ``cases.jsonl`` lies; what it holds is done again only where it failed or was unsteady.
        seconds: the time that this part has.
        written: called after each case.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        seconds: float,
        now: dict[str, Any],
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.path, self.written = folder, folder / FILE, written
        self.facts, self.dry = now, now["dry"]
        self.part, self.deadline = part, time.monotonic() + seconds
        self.unreached: list[str] = []
        first, parts = read(folder)
        self.cases = parts.get(part, {})
        changed = [key for key in SAME if first and first.get(key) != now.get(key)]
        if changed:
            raise InputError(
                f"'{self.path}' was measured with {changed[0]} {first.get(changed[0])!r}, and this is "
                f"{now.get(changed[0])!r}: choose another --out"
            )
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # it died while it wrote: the torn line stays alone
        if not first:
            self._write({"facts": now})

    @property
    def left(self) -> float:
        """Seconds until this part has to end."""
        return self.deadline - time.monotonic()

    def patience(self, seconds: float) -> float:
        """How long a case may take: `seconds`, or what is left of the part; in a dry run all that is left."""
        return max(5.0, self.left if self.dry else min(seconds, self.left))

    def case(self, name: str, measure: Callable[[], Case], *, seconds: float = 2.0) -> Case:
        """The result of a case, from the file where it stands there; `seconds` is what it needs at least.

        ``status`` is ok, refused (with the reason), broken (a promise), unsteady (the machine was, too much
        for an answer), failed, or unreached (not written).
        """
        if self.done(name):
            return self.cases[name]
        if self.left < seconds:
            self.unreached.append(name)
            return {"status": "unreached"}
        begin = time.monotonic()
        try:
            result = {"status": "ok", **measure()}
        except Refused as refused:
            result = {"status": "refused", "reason": _clean(str(refused))}
        except Unsteady as unsteady:
            result = {"status": "unsteady", "reason": _clean(str(unsteady))}
        except Exception as error:  # the next case must come
            kind = "" if isinstance(error, ChildFailed) else f"{type(error).__name__}: "
            result = {"status": "failed", "reason": _clean(f"{kind}{error}")}
        result |= {"seconds": round(time.monotonic() - begin, 2), **gauges()}
        self.cases[name] = result
        self._write({"part": self.part, "case": name, **result})
        self.written()
        print(f"{self.part}: {name}: {result['status']} {result.get('reason', '')}".rstrip(), flush=True)
        return result

    def whole(self, part: Callable[[Book], None]) -> str:
        """All cases of the part; what stopped it between two of them, or ''. Other parts must come."""
        try:
            part(self)
        except Exception as error:
            stopped = _clean(f"{type(error).__name__}: {error}")
            self._write({"part": self.part, "stopped": stopped})
            return stopped
        return ""

    def done(self, *names: str) -> bool:
        """Is nothing left to do of these cases?"""
        return all(self.cases.get(name, FAILED)["status"] not in AGAIN for name in names)

    def keep(self, folder: Path) -> None:
        """Put what a command has written into one file here, which takes the place of an older one."""
        if not folder.exists():
            return
        new = self.folder / "archive.new"
        with tarfile.open(new, "w:gz") as archive, contextlib.suppress(FileNotFoundError):
            archive.add(folder, folder.name)  # while the command still writes and removes
        new.replace(self.folder / f"{folder.name}.tar.gz")

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Server:
    """A child that is made when it is first needed, and made anew after an error."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.child: Any = None

    def call(self, use: Callable[[Any], Any]) -> Any:
        self.child = self.child or self.make()
        try:
            return use(self.child)
        except Refused:
            raise
        except Exception:  # CUDA errors stay in a process, under whatever name: go on in a new one
            self.close()
            raise

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        return self.call(lambda child: child.ask(command, timeout, **arguments))

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
        self.child = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Case]]]:
    """The facts, and by part the newest of each case; a torn last line is left out."""
    path = folder / FILE
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Case]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if "facts" in entry:
                found = entry["facts"]
            elif "case" in entry:
                parts.setdefault(entry.pop("part"), {})[entry.pop("case")] = entry
    return found, parts


def _clean(reason: str) -> str:
    """One line, with the files in it cut down to their names: a record says nothing of folders."""
    line = " ".join(reason.split())[:600]
    return re.sub(r"(?<![\w./:-])/(?:[\w.+-]+/)+", "", line)
