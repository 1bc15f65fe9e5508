"""NVIDIA GPUs as their driver's library (NVML) describes them: devices, MIG, links. Nothing raises."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from vivace.machine import Device, Link

PROBE = Path(__file__).with_name("probe.py")
STARTING_SECONDS = 30.0  # of CUDA with many GPUs
NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION: a cluster gave it to somebody else
MOST_LINKS = 18
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
COMPUTE_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
ANCESTORS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "the PCIe host bridge",
    40: "the host bridges of one NUMA node",
    50: "the link between sockets",
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU or MIG instance, its identifier, its number in NVML, and is MIG mode on without an instance?"""

    device: Device
    uuid: str = ""
    index: int = 0
    empty_mig: bool = False


@dataclasses.dataclass(frozen=True)
class Nvidia:
    """What NVML said: GPUs in CUDA's order, links, driver, the newest CUDA it serves, or why not."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None
    error: str = ""
    lost: dict[int, str] = dataclasses.field(default_factory=dict)  # by NVML's number: why it does not answer


def ask(nvml: ModuleType | None = None) -> Nvidia:
    """Ask NVML; `nvml` is the module to ask, `pynvml` unless given."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # NVML raises its own classes, and a broken library raises anything
        return Nvidia(error=str(error) or type(error).__name__)
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion)
        version = _try(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        cuda = (version // 1000, version % 1000 // 10) if version else None
        gpus: list[Gpu] = []
        handles: dict[int, object] = {}
        lost: dict[int, str] = {}
        why = ""
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus += [*_gpus(nvml, handle, index)]
                handles[index] = handle
            except Exception as error:  # as of one that has fallen off the bus
                why = str(error) or type(error).__name__
                if getattr(error, "value", None) != NO_PERMISSION:
                    lost[index] = why
        links = tuple(_links(nvml, handles))
        return Nvidia(_as_cuda_counts(tuple(gpus)), links, driver, cuda, "" if gpus else why, lost)
    except Exception as error:
        return Nvidia(error=str(error) or type(error).__name__)
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def visible(gpus: tuple[Gpu, ...], choice: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows under `choice`, the value of CUDA_VISIBLE_DEVICES, in its order.

    CUDA stops at the first word that names none. A MIG instance is named by its identifier only; without one,
    CUDA shows the first instance.
    """
    if choice is None:
        return tuple(gpu for gpu in gpus if not gpu.empty_mig)
    found: list[Gpu] = []
    for word in (word.strip() for word in choice.split(",")):
        by_number = [gpu for gpu in gpus if word == number_of(gpu, gpus)]
        by_name = [gpu for gpu in gpus if len(word) > 4 and gpu.uuid.startswith(word)]
        chosen = next((gpu for gpu in by_number or by_name if not gpu.empty_mig), None)
        if chosen is None:
            break
        found.append(chosen)
    return tuple(found)


def number_of(gpu: Gpu, gpus: tuple[Gpu, ...]) -> str:
    """The number of a GPU among all, as CUDA counts them: instances have their card's."""
    return str([*dict.fromkeys(one.index for one in gpus)].index(gpu.index))


def _as_cuda_counts(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """GPUs of several kinds in CUDA's order, the fastest first unless it is told otherwise."""
    kinds = {gpu.device.name for gpu in gpus}
    if len(kinds) < 2 or any("mig" in gpu.device.features for gpu in gpus):
        return gpus
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return gpus
    told = _told_by_cuda()
    places = {name: place for place, name in enumerate(told)}
    return tuple(sorted(gpus, key=lambda gpu: places.get(gpu.uuid, len(told))))


@functools.cache
def _told_by_cuda() -> tuple[str, ...]:
    """The identifiers of all GPUs in CUDA's order, by a child process: one that has started CUDA could not be
    forked. Empty where it does not answer.
    """
    shown = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROBE), "order"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=shown,
            timeout=STARTING_SECONDS,
            check=False,
        )
        return tuple(json.loads(done.stdout)["devices"])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()


def _gpus(nvml: ModuleType, handle: object, index: int) -> Iterator[Gpu]:
    """The GPU, or its MIG instances where that mode is on."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    capability = f"sm_{major}{minor}"
    state = _state(nvml, handle)
    mode = _try(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        yield Gpu(_device(nvml, handle, (capability,), state), _text(nvml.nvmlDeviceGetUUID, handle), index)
        return
    instances = (
        _try(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        for number in range(_try(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    )
    found = [instance for instance in instances if instance is not None]
    for instance in found:
        device = _device(nvml, instance, (capability, "mig"), state)
        yield Gpu(device, _text(nvml.nvmlDeviceGetUUID, instance), index)
    if not found:
        device = _device(nvml, handle, (capability, "mig"), state)
        yield Gpu(device, _text(nvml.nvmlDeviceGetUUID, handle), index, empty_mig=True)


def _device(nvml: ModuleType, handle: object, features: tuple[str, ...], state: dict[str, Any]) -> Device:
    memory = _try(nvml, "nvmlDeviceGetMemoryInfo", handle)  # none where CPU and GPU share their memory
    name = _text(nvml.nvmlDeviceGetName, handle)
    return Device("cuda", name, int(memory.total) if memory else 0, features, state=state)


def _state(nvml: ModuleType, handle: object) -> dict[str, Any]:
    """What may change while the machine runs: bus width, power limit, compute mode."""
    watts = [
        _try(nvml, f"nvmlDeviceGetPowerManagement{which}", handle) for which in ("Limit", "DefaultLimit")
    ]
    read = {
        "pcie_lanes": _try(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        "pcie_lanes_most": _try(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "pcie_generation": _try(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "power_limit_watts": watts[0] and watts[0] / 1000,
        "power_default_watts": watts[1] and watts[1] / 1000,
        "compute_mode": COMPUTE_MODES.get(_try(nvml, "nvmlDeviceGetComputeMode", handle) or 0),
    }
    return {name: value for name, value in read.items() if value}


def _links(nvml: ModuleType, handles: dict[int, Any]) -> Iterator[Link]:
    """How every pair of GPUs is connected: by NVLink where that is, else by what of PCIe they share."""
    if len(handles) < 2:
        return
    buses = {gpu: _bus(_try(nvml, "nvmlDeviceGetPciInfo", handle)) for gpu, handle in handles.items()}
    ends = {gpu: _ends(nvml, handle) for gpu, handle in handles.items()}
    for (first, here), (second, there) in itertools.combinations(handles.items(), 2):
        direct = sum(bus == buses[second] and bool(bus) for bus, _ in ends[first])
        switched = min(sum(to_switch for _, to_switch in ends[one]) for one in (first, second))
        if direct or switched:
            yield Link(first, second, f"NVLink x{direct}" if direct else f"NVSwitch x{switched}")
        else:
            level = _try(nvml, "nvmlDeviceGetTopologyCommonAncestor", here, there)
            yield Link(first, second, ANCESTORS.get(level, "unknown") if level is not None else "unknown")


def _ends(nvml: ModuleType, handle: object) -> list[tuple[str, bool]]:
    """For each active NVLink of a GPU, the other end's bus address and whether it is a switch."""
    found = []
    for number in range(MOST_LINKS):
        if _try(nvml, "nvmlDeviceGetNvLinkState", handle, number):
            kind = _try(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            remote = _try(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
            found.append((_bus(remote), kind == SWITCH))
    return found


def _bus(info: object) -> str:
    return _text(getattr, info, "busId", "")


def _text(function: Callable[..., Any], *arguments: object) -> str:
    value = function(*arguments)
    return value.decode() if isinstance(value, bytes) else str(value)


def _try(nvml: ModuleType, question: str, *arguments: object) -> Any:
    """What NVML answers; `None` where this card, driver or library does not support the question."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:
        return None
