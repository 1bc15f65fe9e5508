"""What vendors promise for the ceilings, where it is known: pure functions. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Protocol

from vivace.inspection.limits import own_cores, read
from vivace.machine import Device

PCIE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes/s a lane and way
COPIES = ("host_to_device_pageable", "host_to_device_pinned", "device_to_host_pinned")

# Operations a core does in one cycle, a multiply-add counted as two, by what is known of its units.
# Intel with AMX: two 512-bit multiply-add units; a tile product of 16x16x32 bf16, a core's
# 16,384 operations, takes 16 cycles.
# Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX.
INTEL_AMX = {"fp32": 64, "bf16": 1024, "int8": 2048}
INTEL_AVX2 = {"fp32": 32}
# AMD by family: Software Optimization Guides of family 19h (Zen 3 and 4, 256 bits wide) and 1Ah (Zen 5, 512).
AMD = {25: {"fp32": 32}, 26: {"fp32": 64}}


class CatalogueEntry(Protocol):
    """What is read of a catalogue's entry: dense rates by dtype in FLOP/s, and bytes/s."""

    rates: dict[str, float]
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Processor:
    """What the peak of a CPU follows from; `clock` is the highest in Hz, 0 where the system hides it."""

    vendor: str
    family: int
    features: tuple[str, ...]
    num_cores: int
    clock: float


def gpu_figures(device: Device, entry: CatalogueEntry | None) -> dict[str, float]:
    """The vendor's rates by ceiling's key; a part of a GPU (MIG) and an unknown card have none."""
    if "mig" in device.features:
        return {}
    found: dict[str, float] = {}
    if entry is not None:
        for dtype in ("fp32", "tf32", "bf16", "fp16", "int8"):
            if dtype in entry.rates:
                found[f"matmul_{dtype}"] = entry.rates[dtype]
                if dtype != "int8":
                    found |= {
                        f"convolution_{dtype}_{layout}": entry.rates[dtype] for layout in ("nchw", "nhwc")
                    }
        found["copy_device"] = entry.bandwidth
    lane, lanes = PCIE_RATES.get(device.state.get("pcie_generation", 0)), device.state.get("pcie_lanes_most")
    if lane and lanes:
        found |= dict.fromkeys(COPIES, lane * lanes)
    return found


def cpu_figures(processor: Processor) -> dict[str, float]:
    """Cores x highest clock x operations a cycle, where the units are known; else nothing.

    A virtual machine hides the clock, and one at its base clock would be surpassed: then nothing is said.
    """
    per_cycle: dict[str, int] = {}
    if processor.vendor == "GenuineIntel" and "amx_bf16" in processor.features:
        per_cycle = INTEL_AMX
    elif processor.vendor == "GenuineIntel" and "avx2" in processor.features:
        per_cycle = {} if "avx512f" in processor.features else INTEL_AVX2
    elif processor.vendor == "AuthenticAMD":
        per_cycle = AMD.get(processor.family, {})
    found: dict[str, float] = {}
    for dtype, operations in per_cycle.items() if processor.clock else ():
        rate = processor.num_cores * processor.clock * operations
        found[f"matmul_{dtype}"] = rate
        if dtype != "int8":
            found |= {f"convolution_{dtype}_{layout}": rate for layout in ("nchw", "nhwc")}
    return found


def this_processor(device: Device, num_threads: int, root: Path = Path("/")) -> Processor:
    """The cores that this process may run on; threads of one count once. Where cores are of two kinds, which
    do not do as much in a cycle, the clock counts as hidden.
    """
    text = read(root / "proc/cpuinfo")
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    family = re.search(r"^cpu family\s*:\s*(\d+)", text, re.MULTILINE)
    folder = root / "sys/devices/system/cpu"
    mixed = (root / "sys/devices/cpu_atom").exists()  # beside cpu_core, in Intel's hybrid processors
    highest = "" if mixed else read(folder / "cpu0/cpufreq/cpuinfo_max_freq").strip()
    lists = (read(folder / f"cpu{core}/topology/core_cpus_list").strip() for core in own_cores())
    siblings = set(lists) - {""}
    return Processor(
        vendor[1] if vendor else "",
        int(family[1]) if family else 0,
        device.features,
        min(num_threads, len(siblings) or num_threads),
        float(highest) * 1e3 if highest.isdigit() else 0.0,
    )
