"""The machine at hand as an entry of the catalogue: what is quoted of it, and what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vivace.advising.catalogue import DTYPES, Gpu, find_gpu
from vivace.errors import InputError
from vivace.machine import Machine

SOURCE = "Measured on this machine by vivace inspect"
OTHER_MEMORY = 0.1  # of the catalogue's, from which this is another size of the card: drivers keep less


def this_machine(machine: Machine, catalogue: Mapping[str, Gpu] | None = None) -> Gpu:
    """The machine's training device: the catalogue's entry with what was measured, or measurements alone.

    A device that the catalogue does not know (a processor, a new card) has its measured rates and bandwidth
    in place of quoted ones. Raises `InputError` where it is not known and was not measured either.
    """
    device, ceilings = machine.device, machine.ceilings
    keys = {dtype: f"matmul_{dtype}" for dtype in DTYPES}
    rates = {dtype: ceilings[key] for dtype, key in keys.items() if key in ceilings}
    measured = rates | ({"bandwidth": ceilings["copy_device"]} if "copy_device" in ceilings else {})
    try:
        gpu = find_gpu(device.name, catalogue)
    except InputError:
        if not rates or "bandwidth" not in measured:
            raise InputError(
                f"{device.name!r} is not in the catalogue and was not measured; run vivace inspect --measure"
            ) from None
    else:
        cited = gpu.sources | ({"measured": SOURCE} if measured else {})
        here = device.memory_bytes or gpu.memory_bytes
        memory = here if abs(here / gpu.memory_bytes - 1) > OTHER_MEMORY else gpu.memory_bytes
        ecc = gpu.inline_ecc and memory == gpu.memory_bytes  # what is shown here, it has been taken from
        return dataclasses.replace(
            gpu, measured=measured or gpu.measured, sources=cited, memory_bytes=memory, inline_ecc=ecc
        )
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Gpu))
    for name in ("vendor", "architecture", "family", "release", "link", "compute_capability", "note"):
        fields[name] = ""
    fields |= {
        "name": device.name,
        "form": "host" if device.kind == "cpu" else "pcie",
        "apis": (device.kind,),
    }
    fields |= {"memory_bytes": device.memory_bytes, "bandwidth": measured["bandwidth"], "rates": rates}
    fields |= {"measured": measured, "pytorch": "the one installed"}
    fields |= {"link_bandwidth": 0.0, "link_group": 2, "pcie_lanes": 16}
    fields |= {"derived": (), "aliases": (), "per_clock": {}, "disputed": {}, "sources": {"rates": SOURCE}}
    return Gpu(**fields)
