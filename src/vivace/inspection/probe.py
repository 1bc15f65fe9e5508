"""Ask OpenCL, Vulkan, SYCL, torch or CUDA for its devices; run as a script: a broken driver may crash it.

Prints one JSON line, ``{"devices": [...], "reason": "..."}``. Uses Python's own library, and torch for CUDA.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

# https://registry.khronos.org/OpenCL: cl.h
ALL_DEVICES = 0xFFFFFFFF
DEVICE_NAME, DEVICE_MEMORY, DEVICE_UNITS, PLATFORM_NAME = 0x102B, 0x101F, 0x1002, 0x0902
FULL = 2  # cudaErrorMemoryAllocation: others use the memory of a card that works
# https://registry.khronos.org/vulkan: vulkan_core.h
VULKAN_KINDS = {0: "other", 1: "integrated GPU", 2: "discrete GPU", 3: "virtual GPU", 4: "CPU"}
PROPERTIES_BYTES, NAME_OFFSET, NAME_BYTES = 4096, 20, 256


class InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo with nothing asked for."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("following", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


def opencl() -> tuple[list[str], str]:
    """Every platform's devices, as ``name (platform, compute units, GiB)``."""
    library = load("libOpenCL.so.1", "pyopencl", "libOpenCL*")
    found: list[str] = []
    for platform in _handles(library.clGetPlatformIDs):
        name = _opencl_text(library.clGetPlatformInfo, platform, PLATFORM_NAME)
        for device in _handles(library.clGetDeviceIDs, platform, ctypes.c_uint64(ALL_DEVICES)):
            what = _opencl_text(library.clGetDeviceInfo, device, DEVICE_NAME)
            memory = _opencl_number(library.clGetDeviceInfo, device, DEVICE_MEMORY)
            units = _opencl_number(library.clGetDeviceInfo, device, DEVICE_UNITS)
            found.append(f"{what} ({name}, {units} compute units, {memory / 2**30:.3g} GiB)")
    return found, "" if found else "its drivers name no device"


def vulkan() -> tuple[list[str], str]:
    """Every physical device, as ``name (kind)``."""
    library = load("libvulkan.so.1")
    instance = ctypes.c_void_p()
    info = InstanceInfo(kind=1)
    code = library.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance))
    if code:
        return [], f"its loader finds no driver that works (VkResult {code})"
    count = ctypes.c_uint32()
    library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (ctypes.c_void_p * count.value)()
    library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    found = []
    for device in devices:
        memory = ctypes.create_string_buffer(PROPERTIES_BYTES)
        library.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), memory)
        kind = int.from_bytes(memory.raw[16:20], sys.byteorder)
        name = memory.raw[NAME_OFFSET : NAME_OFFSET + NAME_BYTES].split(b"\0")[0].decode(errors="replace")
        found.append(f"{name} ({VULKAN_KINDS.get(kind, 'other')})")
    return found, "" if found else "its drivers name no device"


def sycl() -> tuple[list[str], str]:
    """Every device of SYCL's runtime, as ``name (API below it)``."""
    import dpctl

    found = [f"{device.name} ({device.backend.name})" for device in dpctl.get_devices()]
    return found, "" if found else "its runtime names no device"


def cuda() -> tuple[list[str], str]:
    """The GPUs that torch can compute on, as CUDA and ROCm name them; the reason is torch's own."""
    gc.disable()  # of what torch is made nothing is garbage
    import torch

    found = []
    try:
        for number in range(max(1, torch.cuda.device_count())):
            try:
                torch.ones(1, device=f"cuda:{number}")
            except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                if getattr(error, "error_code", FULL) != FULL:
                    raise
            found.append(torch.cuda.get_device_name(number))
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        return found, str(error).partition("\n")[0]
    return found, ""


def order() -> tuple[list[str], str]:
    """The identifiers of all GPUs, as NVML writes them, in the order in which CUDA counts them."""
    library = load("libcuda.so.1")
    count, device, found = ctypes.c_int(), ctypes.c_int(), []
    if code := library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return [], f"CUDA does not start (CUresult {code})"
    for number in range(count.value):
        bits = ctypes.create_string_buffer(16)
        library.cuDeviceGet(ctypes.byref(device), number)
        library.cuDeviceGetUuid_v2(bits, device)
        found.append(f"GPU-{uuid.UUID(bytes=bits.raw)}")
    return found, ""


def load(name: str, package: str = "", pattern: str = "") -> Any:
    """The system's library, or the one that a package brings."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        spec = importlib.util.find_spec(package) if package else None
        if spec is None or spec.origin is None:
            raise
        folder = Path(spec.origin).parent
        os.environ.setdefault("PYOPENCL_HOME", str(folder))  # its loader looks for drivers there
        for driver in folder.glob(".libs/libpocl*"):
            ctypes.CDLL(str(driver))  # named without a folder in its file, so it is found once it is loaded
        return ctypes.CDLL(str(next(folder.glob(f".libs/{pattern}"), name)))


def _handles(function: Callable[..., Any], *before: object) -> list[ctypes.c_void_p]:
    """Call an enumerating function twice, for the count and for the handles; no handles where it fails."""
    count = ctypes.c_uint32()
    if function(*before, 0, None, ctypes.byref(count)) or not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    function(*before, count.value, found, None)
    return [ctypes.c_void_p(handle) for handle in found]


def _opencl_text(function: Callable[..., Any], handle: ctypes.c_void_p, what: int) -> str:
    memory = ctypes.create_string_buffer(1024)
    function(handle, what, ctypes.c_size_t(1024), memory, None)
    return memory.value.decode(errors="replace").strip()


def _opencl_number(function: Callable[..., Any], handle: ctypes.c_void_p, what: int) -> int:
    number = ctypes.c_uint64()
    function(handle, what, ctypes.c_size_t(4 if what == DEVICE_UNITS else 8), ctypes.byref(number), None)
    return number.value


def main() -> None:
    """Ask the loader that the first argument names."""
    try:
        verbs = {"opencl": opencl, "vulkan": vulkan, "sycl": sycl, "cuda": cuda, "order": order}
        devices, reason = verbs[sys.argv[1]]()
    except (OSError, AttributeError, ImportError) as error:
        devices, reason = [], f"its loader cannot be used: {error}"
    print(json.dumps({"devices": devices, "reason": reason}), flush=True)
    os._exit(0)  # to take torch apart would take half as long as to import it


if __name__ == "__main__":
    main()
