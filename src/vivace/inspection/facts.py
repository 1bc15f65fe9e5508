"""Facts about devices, drivers and the installed torch, from files and environment; nothing raises.

`Facts` is plain data, so that `diagnosis` and `backends` are functions that a test can hand any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vivace.inspection.limits import read
from vivace.inspection.nvidia import Nvidia, ask
from vivace.machine import Device

DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")  # VGA, 3D, other display
ACCELERATOR = "0x1200"  # AMD's larger GPUs; Intel's neural processors and FPGAs, which are none
VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
INTEGRATED = "0000:00:02.0"  # where Intel's processors keep their own graphics
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
    "/usr/local/cuda/compat", "/usr/lib/wsl/lib", "/opt/rocm/lib", "/opt/intel/oneapi/lib",
)  # fmt: skip
NODES = ("nvidiactl", "kfd", "dxg")  # below /dev
LIBRARIES = ("libcuda", "libOpenCL", "libvulkan")
VULKAN_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
AMD_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
HIDING = (*AMD_HIDING, "CUDA_DEVICE_ORDER")

Result = TypeVar("Result")
NOT_ASKED = Nvidia(error="not asked")


@dataclasses.dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for: its version, and the toolkit's where it was built with one."""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    @property
    def words(self) -> str:
        """The build in words, such as ``torch 2.15.0 for CUDA 13.2``."""
        toolkits = {"CUDA": self.cuda, "ROCm": self.hip, "Intel XPU": self.xpu}
        built = next((f"{name} {version}" for name, version in toolkits.items() if version), "the CPU alone")
        return f"torch {self.version.partition('+')[0]} for {built}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that decides which devices serve: what the system has, and what torch was built for."""

    torch: TorchBuild | None = None
    nvidia: Nvidia = NOT_ASKED
    bus: tuple[tuple[str, str], ...] = ()  # vendor and address of each GPU on the PCI bus
    nvidia_module: str = ""  # version of the loaded kernel module
    amd_gpus: tuple[Device, ...] = ()
    rocm: str = ""
    nodes: frozenset[str] = frozenset()  # device nodes that exist
    closed_nodes: frozenset[str] = frozenset()  # and of these, those this user may not open
    libraries: frozenset[str] = frozenset()
    opencl_drivers: tuple[str, ...] = ()
    vulkan_drivers: tuple[str, ...] = ()
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    hiding: dict[str, str] = dataclasses.field(default_factory=dict)
    system: str = "Linux"
    processor: str = "x86_64"

    def on_bus(self, vendor: str) -> int:
        """How many GPUs of a vendor the bus has, the processor's own graphics not counted."""
        return sum(found == vendor and address != INTEGRATED for found, address in self.bus)

    @property
    def has_nvidia(self) -> bool:
        """Does the system show an NVIDIA GPU, or a driver for one? Windows' Linux shows neither."""
        return bool(self.on_bus("nvidia") or self.nvidia_module or "nvidiactl" in self.nodes)

    @property
    def is_for_rocm(self) -> bool:
        """Is the installed torch built for ROCm? No build serves NVIDIA's GPUs and AMD's."""
        return self.torch is not None and bool(self.torch.hip)

    @property
    def amd_shown(self) -> tuple[Device, ...]:
        """The AMD GPUs that ROCm shows a process: ROCR_VISIBLE_DEVICES chooses first, and among its choice
        HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES without it.
        """
        if any(self.hiding.get(name) in ("", "-1") for name in AMD_HIDING):
            return ()
        hip = self.hiding.get("HIP_VISIBLE_DEVICES", self.hiding.get("CUDA_VISIBLE_DEVICES"))
        return _chosen(_chosen(self.amd_gpus, self.hiding.get("ROCR_VISIBLE_DEVICES")), hip)

    @property
    def intel_gpus(self) -> int:
        """How many there are; the processor's own graphics count where torch is built for them."""
        own = self.torch is not None and self.torch.xpu and "intel" in dict(self.bus)
        return self.on_bus("intel") or int(bool(own))

    @property
    def apple_gpus(self) -> int:
        """One in each of Apple's own processors."""
        return int(self.system == "Darwin" and self.processor == "arm64")


def _chosen(gpus: tuple[Device, ...], choice: str | None) -> tuple[Device, ...]:
    """Those that a variable's numbers name, up to the first that names none; all where it has identifiers."""
    numbers = [word.strip() for word in choice.split(",")] if choice is not None else []
    if not numbers or not all(number.isdigit() for number in numbers):
        return gpus
    return tuple(gpus[place] for place in itertools.takewhile(lambda at: at < len(gpus), map(int, numbers)))


def gather_facts(root: Path = Path("/")) -> Facts:
    """Read them all; each that fails is as if it were not there."""
    nodes = [name for name in NODES if (root / "dev" / name).exists()]
    return Facts(
        torch=_or(None, torch_build),
        nvidia=ask(),
        bus=_or((), bus_gpus, root),
        nvidia_module=_module_version(read(root / "proc/driver/nvidia/version")),
        amd_gpus=_or((), amd_gpus, root),
        rocm=read(root / "opt/rocm/.info/version").strip(),
        nodes=frozenset(nodes),
        closed_nodes=frozenset(
            name for name in nodes if not os.access(root / "dev" / name, os.R_OK | os.W_OK)
        ),
        libraries=_or(frozenset(), libraries, root),
        opencl_drivers=_or((), opencl_drivers, root),
        vulkan_drivers=_or((), vulkan_drivers, root),
        packages=_packages("torchvision", "torch-directml", "pyopencl", "dpnp"),
        hiding={name: os.environ[name] for name in HIDING if name in os.environ},
        system=platform.system(),
        processor=platform.machine(),
    )


def torch_build() -> TorchBuild | None:
    """What the installed torch was built for, read from its `version.py` without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("torch")  # a package at the top level is found, not imported
    text = read(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    found = dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))
    return TorchBuild(
        found.get("__version__", version), found.get("cuda", ""), found.get("hip", ""), found.get("xpu", "")
    )


def bus_gpus(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Vendor and address of every GPU on the PCI bus."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = VENDORS.get(read(folder / "vendor").strip())
        kind = read(folder / "class").strip()[:6]
        if vendor and (kind in DISPLAY_CLASSES or (kind == ACCELERATOR and vendor != "intel")):
            found.append((vendor, folder.name))
    return tuple(found)


def amd_gpus(root: Path = Path("/")) -> tuple[Device, ...]:
    """AMD GPUs that the kernel's compute driver lists."""
    found = []
    for node in sorted(
        (root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: path.name.zfill(4)
    ):
        facts = _numbers(read(node / "properties"))
        if not facts.get("simd_count"):
            continue  # a processor
        version = facts.get("gfx_target_version", 0)
        target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        card = root / f"sys/class/drm/renderD{facts.get('drm_render_minor', 0)}/device"
        memory = _numbers(read(node / "mem_banks/0/properties")).get("size_in_bytes", 0)
        name = read(card / "product_name").strip() or f"AMD GPU ({target})"
        found.append(Device("cuda", name, memory, (target,)))  # torch calls ROCm's devices cuda
    return tuple(found)


def libraries(root: Path = Path("/")) -> frozenset[str]:
    """Which of the drivers' libraries lie where the loader looks; nothing is loaded."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [root / folder.lstrip("/") for folder in (*LIBRARY_FOLDERS, *filter(None, named))]
    return frozenset(
        name for name in LIBRARIES if any(next(folder.glob(f"{name}.so*"), None) for folder in folders)
    )


def opencl_drivers(root: Path = Path("/")) -> tuple[str, ...]:
    """The libraries that OpenCL's loader would load, and the one that pyopencl brings."""
    named = os.environ.get("OCL_ICD_VENDORS", "")
    folder = Path(named) if named else root / "etc/OpenCL/vendors"
    files = [folder] if folder.suffix == ".icd" else sorted(folder.glob("*.icd"))
    spec = importlib.util.find_spec("pyopencl")
    if spec and spec.origin:
        files += sorted(Path(spec.origin).parent.glob(".libs/*.icd"))
    return tuple(Path(read(file).strip()).name for file in files if read(file).strip())


def vulkan_drivers(root: Path = Path("/")) -> tuple[str, ...]:
    """The libraries that Vulkan's loader would load, by their manifests."""
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if named:
        files = [Path(name) for name in named.split(":")]
    else:
        files = [f for folder in VULKAN_FOLDERS for f in sorted((root / folder[1:]).glob("*.json"))]
    found = []
    for file in files:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(Path(json.loads(read(file))["ICD"]["library_path"]).name)
    return tuple(found)


def _module_version(text: str) -> str:
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    return found[1] if found else ""


def _numbers(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) == 2 and words[1].isdigit()}


def _packages(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _or(default: Result, function: Callable[..., Result], *arguments: object) -> Result:
    """What a function returns, or `default` where the system's files are not as they should be."""
    try:
        return function(*arguments)
    except Exception:
        return default
