"""Energy as counters of this machine tell it: processors by RAPL, NVIDIA's GPUs by NVML. Nothing raises.

A counter is of a whole package or board, whoever used it: it tells what the machine took meanwhile.
Sources: Linux's Documentation/power/powercap; NVML's nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from vivace.inspection.nvidia import ask, visible

POWERCAP = Path("/sys/class/powercap")
NO_COUNTER = "this machine shows no counter of energy, as most virtual machines do not"


@dataclasses.dataclass
class _Counter:
    """One counter in joules, which begins anew after `span` of them."""

    name: str
    read: Callable[[], float]
    span: float
    last: float

    def since(self) -> float:
        """Joules since it was read last."""
        now = self.read()
        passed, self.last = now - self.last, now
        return passed if passed >= 0 else passed + self.span


class Meter:
    """Joules since it was made. A package's counter begins anew after some 260 kJ: read it more often.

    Args:
        gpus: so many of the GPUs that CUDA shows count, too, the first ones: those that the ranks train on.
        powercap: folder of the processors' counters; the system's unless given.
        nvml: the module to ask, `pynvml` unless given.
    """

    def __init__(self, *, gpus: int, powercap: Path | None = None, nvml: ModuleType | None = None) -> None:
        self.reason = NO_COUNTER  # why nothing is measured
        self._total = 0.0
        try:
            self._counters = [*self._packages(powercap or POWERCAP), *_gpus(gpus, nvml)]
        except Exception as error:  # NVML raises its own classes
            self._counters, self.reason = [], f"the counters of energy do not answer: {error}"

    def joules(self) -> float | None:
        """Joules of all counters together; None where there is none, or one of them has ceased to answer."""
        if not self._counters:
            return None
        try:
            self._total += sum(counter.since() for counter in self._counters)
        except Exception as error:  # NVML raises its own classes
            self._counters, self.reason = [], f"a counter of energy ceased to answer: {error}"
            return None
        return self._total

    @property
    def sources(self) -> dict[str, Any]:
        """For a record: the ``counters`` by name, or the ``reason`` why nothing is measured."""
        names = [counter.name for counter in self._counters]
        return {"counters": names} if names else {"reason": self.reason}

    def told(self, samples: int) -> dict[str, Any]:
        """For a record: ``joules``, ``joules_per_sample`` and `sources`; without counters these alone."""
        joules = self.joules()
        if joules is None:
            return self.sources
        return {
            "joules": joules,
            "joules_per_sample": joules / samples if samples else None,
            **self.sources,
        }

    def _packages(self, powercap: Path) -> Iterator[_Counter]:
        """Packages and their memory; the other zones are parts of a package, or count it once more."""
        for zone in sorted(powercap.glob("intel-rapl:*")):
            try:
                name = (zone / "name").read_text().strip()
                if not name.startswith("package") and name != "dram":
                    continue
                span, begin = (_joules(zone / f"{kind}_uj") for kind in ("max_energy_range", "energy"))
                yield _Counter(name, functools.partial(_joules, zone / "energy_uj"), span, begin)
            except PermissionError:
                self.reason = f"{zone / 'energy_uj'} may be read by administrators only"
            except (OSError, ValueError):
                continue


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _gpus(most: int, nvml: ModuleType | None) -> Iterator[_Counter]:
    """Boards of the first that CUDA shows; those count which are Volta and later."""
    shown = visible(ask(nvml).gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))[:most] if most else ()
    if not shown:
        return
    nvml = nvml or importlib.import_module("pynvml")
    nvml.nvmlInit()
    for index in dict.fromkeys(gpu.index for gpu in shown):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)

        def read(handle: object = handle) -> float:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        try:
            begin = read()
        except Exception:  # NVML's own class: the board does not count
            continue
        name = next(gpu.device.name for gpu in shown if gpu.index == index)
        yield _Counter(f"{name} ({index})", read, math.inf, begin)
