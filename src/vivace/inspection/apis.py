"""The rates of each compute API that reaches a device here, each measured in a child process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from vivace.inspection import store
from vivace.inspection.backends import ended
from vivace.inspection.ceilings import Ceiling, Progress, Survey, best_half
from vivace.inspection.table import facts_of
from vivace.machine import Backend, Machine

SCRIPT = Path(__file__).with_name("compute_apis.py")
SECONDS = 3.0  # of readings; drivers compile kernels before
LONGEST_SECONDS = 600.0  # drivers that compile kernels on a loaded processor
PACKAGES = {"opencl": "pyopencl", "vulkan": "wgpu", "sycl": "dpnp"}
INSTALL = {
    "opencl": "pip install 'vivace[opencl]'",
    "vulkan": "pip install 'vivace[vulkan]'",
    "sycl": "pip install dpnp (3 GB)",
}
# What brings loader and driver, by the API that the card's maker has; without a card for the processor.
DRIVERS = {
    "opencl": {
        "cuda": "NVIDIA's driver with its compute libraries (in a container: "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        "rocm": "ROCm's package rocm-opencl-runtime",
        "xpu": "the package intel-opencl-icd",
        "cpu": "which brings a loader, and PoCL as a driver for the processor",
    },
    "vulkan": {
        "cuda": "the package libvulkan1 and NVIDIA's driver with its graphics libraries (in a container: "
        "NVIDIA_DRIVER_CAPABILITIES=all)",
        "rocm": "the package mesa-vulkan-drivers",
        "xpu": "the package mesa-vulkan-drivers",
        "cpu": "the package mesa-vulkan-drivers, whose lavapipe drives the processor",
    },
    "sycl": {
        "cuda": "and Codeplay's oneAPI plugin for NVIDIA GPUs",
        "rocm": "and Codeplay's oneAPI plugin for AMD GPUs",
        "xpu": "and the packages intel-opencl-icd and intel-level-zero-gpu",
        "cpu": "and OCL_ICD_FILENAMES set to the libintelocl.so that it brings, which drives processors",
    },
}
NEEDED = {
    "cuda": "an NVIDIA GPU and its driver",
    "rocm": "an AMD GPU and ROCm's driver",
    "xpu": "an Intel GPU and its Level Zero driver",
    "directml": "Windows",
    "mps": "a Mac with Apple silicon",
}


def measure_apis(machine: Machine, seconds: float, progress: Progress | None = None) -> dict[str, Survey]:
    """What devices reach through OpenCL, Vulkan and SYCL, by ``opencl: NAME OF DEVICE``.

    `machine` is one that `look_closer` has seen. CUDA, ROCm and the processor itself are torch's, and
    measured by `survey`.
    """
    found: dict[str, Survey] = {}
    for _, surveys in _each_api(machine, seconds, progress):
        found |= surveys
    return found


def measure_and_keep(
    machine: Machine, seconds: float = SECONDS, progress: Progress | None = None
) -> tuple[dict[str, Survey], bool]:
    """The same, and whether it came to its end. What is found of an API is stored at once, in the place of
    what was known of it; where the store cannot be written, it is only returned.
    """
    found: dict[str, Survey] = {}
    try:
        for api, surveys in _each_api(machine, seconds, progress):
            found |= surveys
            gone = {name: Survey() for name in stored(machine) if name.partition(":")[0] == api}
            with contextlib.suppress(OSError):
                for name, survey in (gone | surveys).items():
                    store.save(machine.measured_as, name, survey)
    except KeyboardInterrupt:
        return found, False
    return found, True


def stored(machine: Machine) -> dict[str, Survey]:
    """What earlier measurements found through each API."""
    names = [name for name in store.names(machine.measured_as) if name.partition(":")[0] in PACKAGES]
    found = {name: store.load(machine.measured_as, name) for name in names}
    return {name: survey for name, survey in found.items() if survey.ceilings or survey.absent}


def next_steps(machine: Machine) -> dict[str, str]:
    """For each API that reaches nothing here: why, and what to install, or what it needs instead."""
    served = {backend.name for backend in machine.backends if backend.devices}
    maker = next((name for name in ("cuda", "rocm", "xpu") if name in served), "cpu")
    found = {}
    for backend in machine.backends:
        name = backend.name
        if name in PACKAGES and backend.devices and not importlib.util.find_spec(PACKAGES[name]):
            found[name] = f"the package {PACKAGES[name]} is not installed; next: {INSTALL[name]}"
        elif name in PACKAGES and not backend.devices:
            reason = backend.reason or "its drivers were not asked"
            found[name] = f"{reason}; next: {INSTALL[name]}, {DRIVERS[name][maker]}"
        elif name in NEEDED and not backend.devices:
            found[name] = f"{backend.reason}; it needs {NEEDED[name]}"
    return found


def document(surveys: dict[str, Survey], steps: dict[str, str]) -> dict[str, object]:
    """The part of the JSON document: rates by API and device, what was not measured, and next steps."""
    return {
        "apis": {name: facts_of(survey, {}) for name, survey in surveys.items()},
        "apis_unmeasured": {name: survey.absent for name, survey in surveys.items() if survey.absent},
        "apis_next": steps,
    }


def _each_api(
    machine: Machine, seconds: float, progress: Progress | None
) -> Iterator[tuple[str, dict[str, Survey]]]:
    """Each API of these, and what was found; nothing of one that reaches no device."""
    for backend in machine.backends:
        if backend.name in PACKAGES:
            if progress is not None and backend.devices:
                progress(0.0, backend.name)
            yield backend.name, _surveys(backend, seconds) if backend.devices else {}


def _surveys(backend: Backend, seconds: float) -> dict[str, Survey]:
    """One for each of its devices; a broken driver's reason under the API's own name."""
    command = [sys.executable, "-P", str(SCRIPT), backend.name, str(seconds)]
    reason = ""
    try:
        done = subprocess.run(  # as bytes: a driver may write in any encoding
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LONGEST_SECONDS + seconds,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        reason = answer["reason"]
    except subprocess.TimeoutExpired:
        answer, reason = {"devices": []}, f"it did not end within {LONGEST_SECONDS + seconds:.0f} s"
    except OSError as error:
        answer, reason = {"devices": []}, f"it could not be measured: {error}"
    except (ValueError, IndexError):
        answer, reason = {"devices": []}, f"a driver crashed ({ended(done.returncode)})"
    if reason:
        return {backend.name: Survey(absent={backend.name: reason})}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = {}
    for device in answer["devices"]:
        survey = Survey(absent=dict(device["absent"]))
        for key, values in device["readings"].items():
            value, spread = best_half(values)
            survey.ceilings[key] = Ceiling(value, spread, len(values), now)
        found[f"{backend.name}: {device['name']}"] = survey
    return found
