"""What this machine is, read from the operating system, the container and the driver's library."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil

from vivace.errors import InputError
from vivace.inspect.store import cached_ceilings
from vivace.machine import Device, Machine

PACKAGES = ("torch", "torchvision", "triton", "numpy")
CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
OLDEST_TORCH = (2, 11)


def inspect() -> Machine:
    """Gather the Machine that this process runs on; takes milliseconds and touches no GPU memory.

    `Machine.ceilings` are the ones that `vivace inspect --measure` stored, for the training device.
    What cannot be read is named in `Machine.missing` with its reason; nothing here raises.
    """
    missing: list[str] = []
    gpus = _gpus(missing)
    cores = usable_cores()
    cpu = Device("cpu", _cpu_name(), memory_limit(), _cpu_features())
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if "torch" not in versions:
        missing.append("torch is not installed: training needs it; reports and advice do not")
    if shutil.which("gcc") is None and shutil.which("g++") is None and shutil.which("clang") is None:
        missing.append("no C++ compiler (g++ or clang): torch.compile cannot build CPU kernels")
    machine = Machine(
        devices=(*gpus, cpu),
        num_cores=cores,
        versions=versions,
        limits=_limits(cores),
        missing=tuple(missing),
    )
    return dataclasses.replace(machine, ceilings=cached_ceilings(machine.fingerprint, machine.device.kind))


def require_torch() -> None:
    """Raise InputError where torch is missing or older than Vivace needs."""
    wanted = ".".join(map(str, OLDEST_TORCH))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"torch is not installed; install torch >= {wanted}") from None
    if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2]) < OLDEST_TORCH:
        raise InputError(f"torch {found} is too old; Vivace needs torch >= {wanted}")


def usable_cores() -> int:
    """Cores this process may use: the smaller of its affinity and its container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores)


def _gpus(missing: list[str]) -> list[Device]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        missing.append("GPUs are hidden by CUDA_VISIBLE_DEVICES")
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own classes, and a broken library raises anything
        missing.append(f"no NVIDIA GPU: {error}")
        return []
    devices = []
    visible = {word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")} - {""}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if visible and not visible & {str(index), pynvml.nvmlDeviceGetUUID(handle)}:
                continue
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            devices.append(Device("cuda", name, memory, (f"sm_{major}{minor}",)))
        _driver["driver"] = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:
        missing.append(f"the NVIDIA driver does not answer: {error}")
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()
    return devices


_driver: dict[str, str] = {}


def _limits(cores: int) -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return {
        "cores_seen": os.cpu_count() or 1,
        "cores_usable": cores,
        "memory_bytes": memory_limit(),
        "shared_memory_bytes": shared,
        "open_files": soft,
        "disk_free_bytes": shutil.disk_usage(os.getcwd()).free,
        **_driver,
    }


def memory_limit() -> int:
    """Bytes of memory that this process may use: the smaller of the machine's and its container's."""
    total = int(psutil.virtual_memory().total)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(file).strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_features() -> tuple[str, ...]:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.lower().startswith(("flags", "features")):
            words = set(line.partition(":")[2].split())
            return tuple(feature for feature in CPU_FEATURES if feature in words)
    return ()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
