"""What keeps a device from training, with the next step: pure functions of `Facts`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from vivace.inspection.facts import AMD_HIDING, Facts, TorchBuild
from vivace.inspection.limits import LITTLE_SHARED_MEMORY, little_shared_memory
from vivace.inspection.nvidia import visible
from vivace.machine import NOT_YET, Device, Finding

# Oldest driver on Linux for each major CUDA; within a major, newer toolkits run on older drivers.
# https://docs.nvidia.com/deploy/cuda-compatibility/
OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
# Compute capabilities that a torch for a CUDA toolkit has code for, the newest toolkit's rule first. From
# 2.11 on those for 12.8 have none for Volta and older: https://github.com/pytorch/pytorch/issues/172352
CAPABILITIES = (((13, 0), (7, 5), (12, 1)), ((12, 8), (7, 5), (12, 1)), ((11, 8), (3, 5), (9, 0)))
FEW_OPEN_FILES = 1024


def diagnose(facts: Facts, limits: dict[str, object] | None = None) -> tuple[Finding, ...]:
    """All findings, those that keep a device from training first."""
    rules: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _nvidia_driver, _torch_for_nvidia, _lost, _hidden, _mig, _amd, _not_yet, _torchvision, _slow,
    )  # fmt: skip
    found = [finding for rule in rules for finding in rule(facts)]
    return (*found, *_limits(limits or {}))


def torch_trains_on(facts: Facts, device: Device, vendor: str) -> bool:
    """Can the installed torch train on this GPU? Where none is installed: could one that is built for it?"""
    if facts.torch is None:
        return True
    if vendor == "nvidia":
        usable = bool(facts.torch.cuda) and not [*_too_old(facts)]
        return usable and not _lacks_code(facts.torch, device)
    return facts.is_for_rocm and "kfd" in facts.nodes - facts.closed_nodes


def nvidia_is_out_of_reach(facts: Facts) -> bool:
    """Is there a GPU, NVIDIA's or one that Windows offers, that no driver names here? `diagnose` then says
    why, first of all.
    """
    return any(True for _ in _nvidia_driver(facts))


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version; 0 for what is not there."""
    numbers = [int(word) for word in re.findall(r"\d+", text)[:2]]
    return (numbers[0] if numbers else 0, numbers[1] if len(numbers) > 1 else 0)


def _nvidia_driver(facts: Facts) -> Iterator[Finding]:
    """The card is there and its driver does not answer."""
    error, present = facts.nvidia.error, facts.has_nvidia
    if not error:
        return
    if "dxg" in facts.nodes and "libcuda" not in facts.libraries:
        yield Finding(
            "Windows offers a GPU, and this Linux has no CUDA library for it",
            "if it is NVIDIA's, install its driver on Windows, then restart with: wsl --shutdown",
        )
    elif "ismatch" in error:
        yield Finding(
            f"the NVIDIA kernel module {facts.nvidia_module} and its libraries differ in version",
            "restart the machine, so that the new driver's module is loaded",
        )
    elif present and facts.nvidia_module and "nvidiactl" not in facts.nodes:
        yield Finding(
            "the machine has an NVIDIA GPU, and this container was not given it",
            "start the container with --gpus all (docker, podman: --device nvidia.com/gpu=all)",
        )
    elif present and "nvidiactl" in facts.closed_nodes:
        yield Finding(
            "this user may not open /dev/nvidiactl", "ask for the group that owns it (ls -l /dev/nvidiactl)"
        )
    elif facts.on_bus("nvidia") and not facts.nvidia_module:
        yield Finding(
            "an NVIDIA GPU is on the bus, and its driver is not loaded",
            "install NVIDIA's driver, or load it: sudo modprobe nvidia",
        )
    elif present and "Not Found" in error:
        yield Finding(
            "NVIDIA's management library (NVML), which names the GPUs, is not here",
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the whole driver",
        )
    elif present:
        yield Finding(
            f"the NVIDIA driver {facts.nvidia_module} does not answer: {error}",
            "run nvidia-smi; restart the machine if it fails too",
        )


def _torch_for_nvidia(facts: Facts) -> Iterator[Finding]:
    """The driver answers, and the installed torch cannot use the card; one for ROCm is for an AMD GPU."""
    if facts.torch is None or not facts.nvidia.gpus or (facts.is_for_rocm and facts.amd_gpus):
        return
    newest = facts.nvidia.cuda[0] if facts.nvidia.cuda else max(OLDEST_DRIVER)
    build = f"install a build of torch for CUDA {min(newest, max(OLDEST_DRIVER))}"
    if not facts.torch.cuda:
        yield Finding(f"an NVIDIA GPU is here, and {facts.torch.words} was installed", build)
        return
    yield from _too_old(facts)
    kinds = {gpu.device.name: gpu.device for gpu in facts.nvidia.gpus}
    lacking = {name: lacks for name, device in kinds.items() if (lacks := _lacks_code(facts.torch, device))}
    for name, lacks in lacking.items():
        step = (
            "install an older torch, built for CUDA 12.6" if lacks < 0 else "install a torch for a newer CUDA"
        )
        if len(lacking) < len(kinds):
            step = "name the other GPUs in CUDA_VISIBLE_DEVICES, so that no job meets it"
        yield Finding(f"{facts.torch.words} has no code for {name} ({kinds[name].features[0]})", step)


def _lacks_code(build: TorchBuild, device: Device) -> int:
    """-1 where the GPU is older than the toolkit's code, 1 where it is newer, else 0."""
    found = re.match(r"sm_(\d+)(\d)$", device.features[0]) if device.features else None
    toolkit = version_of(build.cuda)
    rule = next((rule for rule in CAPABILITIES if toolkit >= rule[0]), None)
    if found is None or rule is None:
        return 0
    capability = (int(found[1]), int(found[2]))
    return (capability > rule[2]) - (capability < rule[1])


def _too_old(facts: Facts) -> Iterator[Finding]:
    """torch's CUDA is of a newer major version than the driver serves."""
    assert facts.torch is not None
    served, needed = facts.nvidia.cuda, version_of(facts.torch.cuda)
    if served is None or not needed[0] or served[0] >= needed[0]:
        return
    oldest = OLDEST_DRIVER.get(needed[0], "the newest")
    yield Finding(
        f"driver {facts.nvidia.driver} serves CUDA up to {served[0]}.{served[1]}, and {facts.torch.words} was"
        " installed",
        f"update the driver to {oldest} or newer, or install a build of torch for CUDA {served[0]}",
    )


def _lost(facts: Facts) -> Iterator[Finding]:
    for number, error in facts.nvidia.lost.items() if facts.nvidia.gpus else ():
        yield Finding(
            f"GPU {number} does not answer its driver: {error}",
            "restart the machine; if it fails again, look into the kernel's log (dmesg, for Xid)",
        )


def _hidden(facts: Facts) -> Iterator[Finding]:
    gpus = facts.nvidia.gpus
    choice = facts.hiding.get("CUDA_VISIBLE_DEVICES")
    if choice is not None and gpus:
        shown = len(visible(gpus, choice))
        asked = [word for word in choice.split(",") if word.strip() not in ("", "-1")]
        if not shown:
            yield Finding(
                f"CUDA_VISIBLE_DEVICES={choice!r} hides all {len(gpus)} GPUs",
                "unset it, or name GPUs from 0 on",
            )
        elif shown < len(asked):
            yield Finding(
                f"CUDA_VISIBLE_DEVICES={choice!r} names a GPU that is not here: CUDA shows {shown}",
                f"name GPUs from 0 to {max(gpu.index for gpu in gpus)}",
            )
    for name in AMD_HIDING:
        if facts.hiding.get(name) in ("", "-1") and facts.amd_gpus:
            yield Finding(f"{name}={facts.hiding[name]!r} hides all AMD GPUs", "unset it")


def _mig(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.nvidia.gpus:
        if gpu.empty_mig:
            yield Finding(
                f"MIG mode is on for GPU {gpu.index}, {gpu.device.name}, and it has no instance",
                f"nvidia-smi mig -i {gpu.index} -cgi 0 -C makes one; nvidia-smi -mig 0 ends the mode",
            )
    if sum("mig" in gpu.device.features and not gpu.empty_mig for gpu in facts.nvidia.gpus) > 1:
        yield Finding(
            "a process sees one MIG instance, never several: they cannot train one model together",
            "choose one by CUDA_VISIBLE_DEVICES=MIG-..., or switch MIG mode off to train on the whole GPU",
        )


def _amd(facts: Facts) -> Iterator[Finding]:
    """Nothing beside an NVIDIA GPU, unless torch is built for ROCm: many AMD processors have a small GPU."""
    if not facts.on_bus("amd") and not facts.amd_gpus:
        return
    if facts.nvidia.gpus and not facts.is_for_rocm:
        return
    if not facts.amd_gpus:
        if facts.is_for_rocm:
            yield Finding(
                "an AMD GPU is on the bus, and the kernel's compute driver does not list it",
                "install the amdgpu driver with ROCm; not every AMD GPU is served",
            )
    elif "kfd" not in facts.nodes:
        yield Finding(
            "the machine has an AMD GPU, and this container was not given it",
            "start the container with --device /dev/kfd --device /dev/dri",
        )
    elif "kfd" in facts.closed_nodes:
        yield Finding(
            "this user may not open /dev/kfd", "sudo usermod -aG render,video $USER, then log in anew"
        )
    elif facts.torch is not None and not facts.torch.hip:
        yield Finding(
            f"an AMD GPU is here, and {facts.torch.words} was installed", "install a build of torch for ROCm"
        )
    elif facts.torch is not None and facts.amd_shown:
        yield Finding(
            "ROCm: untested: Vivace has not run on an AMD GPU yet",
            "ask vivace verify about a plan before a long training under it",
        )


def _not_yet(facts: Facts) -> Iterator[Finding]:
    """GPUs that no build of torch makes Vivace train on."""
    for kind, num in (("xpu", facts.intel_gpus), ("mps", facts.apple_gpus)):
        if num:
            yield Finding(NOT_YET[kind], "jobs train on the processor, or on a GPU of NVIDIA or AMD")


def _torchvision(facts: Facts) -> Iterator[Finding]:
    """Wheels for different toolkits: torchvision's operators are not registered."""
    vision = facts.packages.get("torchvision", "")
    if facts.torch is None or not vision:
        return
    here, there = (version.partition("+")[2] for version in (facts.torch.version, vision))
    if here and there and here != there:
        yield Finding(
            f"torch {facts.torch.version} and torchvision {vision} are built for different toolkits",
            "install both from the same index: import torchvision fails otherwise",
        )


def _slow(facts: Facts) -> Iterator[Finding]:
    """Settings of the card that cost speed."""
    for gpu in {gpu.index: gpu for gpu in facts.nvidia.gpus}.values():  # instances have their card's
        state = gpu.device.state
        lanes, most = state.get("pcie_lanes"), state.get("pcie_lanes_most")
        if lanes and most and lanes < most:
            yield Finding(
                f"GPU {gpu.index} is connected by {lanes} of its {most} PCIe lanes",
                "put it into a slot with all lanes, if it waits for copies",
            )
        limit, default = state.get("power_limit_watts"), state.get("power_default_watts")
        if limit and default and limit < 0.98 * default:
            yield Finding(
                f"GPU {gpu.index} is limited to {limit:.0f} of its {default:.0f} W",
                f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}, if that was not on purpose",
            )
        if state.get("compute_mode"):
            yield Finding(
                f"GPU {gpu.index} is in compute mode {state['compute_mode']}: one process at most can use it",
                f"sudo nvidia-smi -i {gpu.index} -c 0 ends it; until then plans are timed in turns",
            )
    names = {gpu.device.name for gpu in facts.nvidia.gpus}
    if len(names) > 1 and facts.hiding.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield Finding(
            f"GPUs of {len(names)} kinds: CUDA counts the fastest first, nvidia-smi by the bus",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID, so that the numbers agree",
        )


def _limits(limits: dict[str, object]) -> Iterator[Finding]:
    shared, files = limits.get("shared_memory_bytes"), limits.get("open_files")
    if isinstance(shared, int) and shared < LITTLE_SHARED_MEMORY:
        yield Finding(*little_shared_memory(shared))
    if isinstance(files, int) and 0 < files < FEW_OPEN_FILES:
        yield Finding(f"at most {files} files may be open at once", "ulimit -n 65536")
