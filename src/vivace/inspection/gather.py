"""What this machine is, read from the operating system, the container and the driver's library."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from vivace import torch_internals
from vivace.errors import InputError
from vivace.inspection.backends import backends
from vivace.inspection.ceilings import reason_of
from vivace.inspection.diagnosis import diagnose, nvidia_is_out_of_reach, torch_trains_on, version_of
from vivace.inspection.facts import Facts, gather_facts
from vivace.inspection.limits import gather_limits, read
from vivace.inspection.limits import usable_cores as usable_cores
from vivace.inspection.nvidia import visible
from vivace.inspection.store import cached_ceilings
from vivace.machine import Device, Link, Machine, trained_first

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
# Of servers; https://github.com/torvalds/linux/blob/master/arch/arm64/include/asm/cputype.h
ARM_CORES = {
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
}
HIDES_ALL = ("", "-1")  # in CUDA_VISIBLE_DEVICES
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)  # that Vivace was tried with


def inspect() -> Machine:
    """Gather the Machine that this process runs on; takes milliseconds and touches no GPU memory.

    With a torch newer than `NEWEST_TORCH` it takes seconds: what Vivace needs of it is looked up. Of GPUs of
    several kinds CUDA is asked for their order, once, by a child process.
    `Machine.ceilings` are the ones that `vivace inspect --measure` stored, for the training device.
    What cannot be read is named in `Machine.missing` with its reason; what keeps a device from training, in
    `Machine.findings` with the next step. Nothing here raises.
    """
    facts = gather_facts()
    limits = gather_limits()
    cpuinfo = read(Path("/proc/cpuinfo"))
    cpu = Device("cpu", _cpu_name(cpuinfo), limits["memory_bytes"], _cpu_features(cpuinfo))
    devices = (*_gpus(facts), cpu)
    machine = Machine(
        devices=trained_first(devices),
        num_cores=limits["cores_usable"],
        versions=_versions(facts),
        limits=limits,
        missing=tuple(_missing(facts)),
        findings=diagnose(facts, limits),
        backends=backends(facts, devices),
        links=_links(facts),
    )
    return dataclasses.replace(machine, ceilings=cached_ceilings(machine.measured_as, machine.device.kind))


def require_torch() -> None:
    """Raise InputError where torch is missing or older than Vivace needs."""
    wanted = ".".join(map(str, OLDEST_TORCH))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"torch is not installed: pip install 'vivace[torch]', or your GPU's build of torch >= {wanted}"
        ) from None
    if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2]) < OLDEST_TORCH:
        raise InputError(f"torch {found} is too old; Vivace needs torch >= {wanted}")


def _gpus(facts: Facts) -> list[Device]:
    """The GPUs that a process sees, and whether a job can train on them."""
    choice = facts.hiding.get("CUDA_VISIBLE_DEVICES")
    shown = [gpu.device for gpu in visible(facts.nvidia.gpus, choice)]
    if any("mig" in device.features for device in shown):
        shown = shown[:1]  # CUDA shows a process one instance
    found = [(device, "nvidia") for device in shown]
    found += [(device, "amd") for device in facts.amd_shown]
    not_yet = []
    if nvidia_is_out_of_reach(facts) and choice not in HIDES_ALL:
        name = "NVIDIA GPU" if facts.has_nvidia else "GPU of Windows"
        not_yet.append(Device("cuda", name, 0, served=False))
    not_yet += [Device("xpu", "Intel GPU", 0, served=False)] * facts.intel_gpus
    not_yet += [Device("mps", "Apple GPU", 0, served=False)] * facts.apple_gpus
    return [
        *(dataclasses.replace(one, served=torch_trains_on(facts, one, vendor)) for one, vendor in found),
        *not_yet,
    ]


def _links(facts: Facts) -> tuple[Link, ...]:
    """Those between GPUs that a process sees, counted as torch counts them."""
    shown = visible(facts.nvidia.gpus, facts.hiding.get("CUDA_VISIBLE_DEVICES"))
    if any("mig" in gpu.device.features for gpu in shown):
        return ()
    places = {gpu.index: place for place, gpu in enumerate(shown)}
    return tuple(
        Link(min(ends), max(ends), link.by)
        for link in facts.nvidia.links
        if len(ends := [places[gpu] for gpu in (link.first, link.second) if gpu in places]) == 2
    )


def _versions(facts: Facts) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if facts.nvidia.driver:
        versions["driver"] = facts.nvidia.driver
    if facts.amd_gpus and facts.rocm:
        versions["rocm"] = facts.rocm
    return versions


def _missing(facts: Facts) -> list[str]:
    missing = []
    if not facts.nvidia.gpus:
        missing.append(f"no NVIDIA GPU: {facts.nvidia.error or 'the driver lists none'}")
    if facts.torch is None:
        missing.append("torch is not installed: training needs it; reports and advice do not")
    elif version_of(facts.torch.version) > NEWEST_TORCH:
        try:
            missing += torch_internals.missing()
        except Exception as error:  # a library of torch's that cannot be loaded
            missing.append(f"torch {facts.torch.version} cannot be imported: {reason_of(error)}")
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as inductor does
    if shutil.which(compiler) is None:
        missing.append(f"no C++ compiler ({compiler}): torch.compile cannot build CPU kernels")
    return missing


def _cpu_name(cpuinfo: str) -> str:
    """What the system calls it; on ARM, where that has no name, the core's, with the numbers that tell it."""
    for line in cpuinfo.splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    told = dict(re.findall(r"^CPU (implementer|part)\s*:\s*(\w+)", cpuinfo, re.MULTILINE))
    if len(told) == 2:
        numbers = f"implementer {told['implementer']}, part {told['part']}"
        return f"{ARM_CORES.get((told['implementer'], told['part']), platform.machine())} ({numbers})"
    return platform.processor() or platform.machine()


def _cpu_features(cpuinfo: str) -> tuple[str, ...]:
    for line in cpuinfo.splitlines():
        if line.lower().startswith(("flags", "features")):
            words = set(line.partition(":")[2].split())
            return tuple(feature for feature in CPU_FEATURES if feature in words)
    return ()
