"""Every way to reach a device, and what it reaches here: pure functions of `Facts`, and a probe.

The loaders of OpenCL, Vulkan and SYCL load every driver they find, which may be slow, and a broken one may
crash; torch takes seconds to import. They are asked in a child process, and only by `look_closer`.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable

from vivace.inspection.facts import Facts
from vivace.inspection.nvidia import PROBE, visible
from vivace.machine import NOT_YET, Backend, Device, Finding, Machine, trained_first

PROBE_SECONDS = 15.0
STARTING_SECONDS = 120.0  # torch's import from a cold disk, and CUDA's start on many GPUs


def backends(facts: Facts, devices: tuple[Device, ...]) -> tuple[Backend, ...]:
    """One row for each, in the order in which a person would want them; `devices` are the machine's."""
    rows: tuple[Callable[[Facts], Backend], ...] = (_mps, _directml, _opencl, _vulkan, _sycl)
    cpu = tuple(device.name for device in devices if device.kind == "cpu")
    served = {device.name for device in devices if device.served} if facts.torch else set[str]()
    gpus = [
        dataclasses.replace(row, torch=not served.isdisjoint(row.devices))
        for row in (_cuda(facts), _rocm(facts), _xpu(facts))
    ]
    return (*gpus, *(row(facts) for row in rows), Backend("cpu", cpu, torch=facts.torch is not None))


def look_closer(machine: Machine, seconds: float = PROBE_SECONDS) -> Machine:
    """The machine with the devices that OpenCL, Vulkan and SYCL name, each asked in a child process.

    Where torch cannot compute on the GPUs that the driver shows, they serve no more, and a finding says why.
    """
    found = tuple(_closer(backend, seconds) for backend in machine.backends)
    machine = dataclasses.replace(machine, backends=found)
    broken = next((b for b in found if b.name in ("cuda", "rocm") and b.torch and b.reason), None)
    if broken is None:
        return machine
    devices = [dataclasses.replace(d, served=d.served and d.kind != "cuda") for d in machine.devices]
    return dataclasses.replace(
        machine,
        devices=trained_first(devices),
        backends=tuple(dataclasses.replace(b, torch=b.torch and b is not broken) for b in found),
        findings=(
            Finding(
                f"torch cannot use the {broken.devices[0]} that the driver shows: {broken.reason}",
                'mend that, or set CUDA_VISIBLE_DEVICES="" to train on the processor; else training stops',
            ),
            *machine.findings,
        ),
    )


def _closer(backend: Backend, seconds: float) -> Backend:
    if backend.name in ("cuda", "rocm") and backend.torch:
        torch = _probed(dataclasses.replace(backend, name="cuda"), STARTING_SECONDS)
        return dataclasses.replace(backend, reason=torch.reason)
    if backend.name in ("opencl", "vulkan", "sycl") and not backend.reason:
        return _probed(backend, seconds)
    return backend


def ended(returncode: int) -> str:
    """How a child process ended, for which it has no words of its own."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return signal.strsignal(-returncode) or f"signal {-returncode}"


def _probed(backend: Backend, seconds: float) -> Backend:
    command = [sys.executable, "-P", str(PROBE), backend.name]
    try:
        done = subprocess.run(  # as bytes: a driver may write in any encoding
            command,
            stdin=subprocess.DEVNULL,  # standard input is the profiled script's
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dataclasses.replace(backend, reason=f"it did not answer within {seconds:.0f} s")
    except OSError as error:
        return dataclasses.replace(backend, reason=f"it could not be asked: {error}")
    except (ValueError, IndexError):
        how = ended(done.returncode)
        return dataclasses.replace(
            backend, reason=f"a driver crashed ({how}): {backend.version or 'unknown'}"
        )
    return dataclasses.replace(backend, devices=tuple(answer["devices"]), reason=answer["reason"])


def _cuda(facts: Facts) -> Backend:
    shown = visible(facts.nvidia.gpus, facts.hiding.get("CUDA_VISIBLE_DEVICES"))
    if facts.nvidia.gpus:
        reason = "" if shown else "none is visible"
        serves = f"driver {facts.nvidia.driver}" + (
            f", CUDA up to {facts.nvidia.cuda[0]}.{facts.nvidia.cuda[1]}" if facts.nvidia.cuda else ""
        )
        return Backend("cuda", tuple(g.device.name for g in shown), serves, reason=reason)
    if not facts.has_nvidia and "dxg" not in facts.nodes:
        return Backend("cuda", reason="no NVIDIA GPU")
    return Backend("cuda", reason=f"the driver does not answer: {facts.nvidia.error}")


def _rocm(facts: Facts) -> Backend:
    if facts.amd_gpus:
        reason = "" if facts.amd_shown else "none is visible"
        return Backend("rocm", tuple(device.name for device in facts.amd_shown), facts.rocm, reason=reason)
    reason = "the compute driver lists none" if facts.on_bus("amd") else "no AMD GPU"
    return Backend("rocm", reason=reason)


def _xpu(facts: Facts) -> Backend:
    if not facts.intel_gpus:
        return Backend("xpu", reason="no Intel GPU beside the processor's own")
    return Backend("xpu", ("Intel GPU",) * facts.intel_gpus, reason=NOT_YET["xpu"])


def _mps(facts: Facts) -> Backend:
    if facts.apple_gpus:
        return Backend("mps", ("Apple GPU",), reason=NOT_YET["mps"])
    return Backend("mps", reason="only on Apple silicon")


def _directml(facts: Facts) -> Backend:
    package = facts.packages.get("torch-directml", "")
    if "dxg" not in facts.nodes and facts.system != "Windows":
        return Backend("directml", reason="only on Windows and its Linux subsystem")
    if not package:
        return Backend("directml", ("DirectX 12 GPU",), reason="torch-directml is not installed")
    reason = "Vivace does not train through DirectML"
    return Backend("directml", ("DirectX 12 GPU",), f"torch-directml {package}", reason=reason)


def _opencl(facts: Facts) -> Backend:
    return _loader(facts, "opencl", "libOpenCL", facts.opencl_drivers, "pyopencl" in facts.packages)


def _vulkan(facts: Facts) -> Backend:
    return _loader(facts, "vulkan", "libvulkan", facts.vulkan_drivers, False)


def _sycl(facts: Facts) -> Backend:
    package = facts.packages.get("dpnp", "")
    if not package:
        return Backend("sycl", reason="no runtime of oneAPI (dpnp) is installed")
    return Backend("sycl", version=f"dpnp {package}")


def _loader(facts: Facts, name: str, library: str, drivers: tuple[str, ...], brought: bool) -> Backend:
    """A loader and the drivers it would load; the drivers stand where others have a version."""
    if library not in facts.libraries and not brought:
        return Backend(name, version=", ".join(drivers), reason=f"no loader ({library}) is installed")
    if not drivers:
        return Backend(name, reason="its loader is installed, and no driver")
    return Backend(name, version=", ".join(drivers))
