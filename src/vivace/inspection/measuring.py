"""What `vivace inspect --measure` does: survey the training device and the CPU, and keep both."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace import words
from vivace.inspection import store
from vivace.inspection.ceilings import Progress, Survey, survey
from vivace.inspection.figures import CatalogueEntry, cpu_figures, gpu_figures, this_processor
from vivace.inspection.quiet import TOLERATED_SHARE, ForeignLoad
from vivace.inspection.table import facts_of
from vivace.machine import TRAINED_ON, Machine

SECONDS = 45.0
CPU_SHARE = 0.3  # of the time, where there is another device
COMPUTED = ("matmul_", "convolution_", "copy_device")  # ceilings that repeat where nobody else computes
TOLERATED_SPREAD = 0.3  # of one of those
STEADY = "steady"  # among the absent keys: why a survey is not stored


def measure(
    machine: Machine, seconds: float = SECONDS, progress: Progress | None = None
) -> dict[str, Survey]:
    """Survey each kind of device that torch trains on, and store what was found on an idle machine.

    An interruption ends it. Where nothing is stored, the reason stands among the absent keys.
    """
    kinds = [kind for kind in TRAINED_ON if any(d.kind == kind and d.served for d in machine.devices)]
    found: dict[str, Survey] = {}
    for kind in kinds:
        share = 1.0 if len(kinds) == 1 else CPU_SHARE if kind == "cpu" else 1 - CPU_SHARE
        found[kind] = survey_and_keep(machine, kind, seconds * share, progress)
        if found[kind].interrupted:
            break
    return found


def survey_and_keep(machine: Machine, kind: str, seconds: float, progress: Progress | None = None) -> Survey:
    """A survey, which is stored unless it read nothing, others used the processor, or readings lie far apart.

    Of the last two, and where the store cannot be written, the reason stands among the absent keys.
    """
    others = ForeignLoad([])
    found = survey(kind, seconds=seconds, progress=progress)
    others.disturb()
    if not found.ceilings:  # interrupted, or torch does not open the device: what is stored stays
        return found
    apart = {key: one.spread for key, one in found.ceilings.items() if key.startswith(COMPUTED)}
    widest = max(apart, key=lambda key: apart[key], default="")
    found = with_spread_since(store.load(machine.measured_as, kind), found)
    if others.largest > TOLERATED_SHARE:
        why = f"other processes used {words.percent(others.largest)} of the processor meanwhile"
    elif apart and apart[widest] > TOLERATED_SPREAD:
        why = f"readings of {widest.replace('_', ' ')} lie {words.percent(apart[widest])} apart"
    else:
        try:
            store.save(machine.measured_as, kind, found)
        except OSError as error:
            found.absent["store"] = f"{store.path_of(machine.measured_as)}: {error.strerror or error}"
        return found
    found.absent[STEADY] = f"{why}; measure again when the machine is idle"
    return found


def with_spread_since(before: Survey, now: Survey) -> Survey:
    """The spread of a ceiling is at least its distance from the stored one: minutes later a shared disk, or a
    neighbour on the same host, makes another figure out of readings that agreed with each other. What was
    seen so fades by half with each measurement.
    """
    for key in before.ceilings.keys() & now.ceilings.keys():
        ceiling = now.ceilings[key]
        earlier = before.ceilings[key]
        apart = abs(ceiling.value - earlier.value) / ceiling.value
        now.ceilings[key] = dataclasses.replace(
            ceiling, spread=max(ceiling.spread, apart, earlier.spread / 2)
        )
    return now


def stored(machine: Machine) -> dict[str, Survey]:
    """What earlier measurements found for each kind of device."""
    found = {
        kind: store.load(machine.measured_as, kind) for kind in dict.fromkeys(d.kind for d in machine.devices)
    }
    return {kind: survey for kind, survey in found.items() if survey.ceilings}


def known(machine: Machine, surveys: dict[str, Survey]) -> dict[str, float]:
    """The ceilings of the device that a job trains on: those stored, and those that could not be stored."""
    kind = machine.device.kind
    return store.cached_ceilings(machine.measured_as, kind) | surveys.get(kind, Survey()).values


def vendor_figures(machine: Machine, kind: str, entry: CatalogueEntry | None) -> dict[str, float]:
    """What the vendor promises for the first device of a kind; `entry` is its catalogue's, if it has one."""
    device = next(device for device in machine.devices if device.kind == kind)
    if kind == "cpu":
        return cpu_figures(this_processor(device, machine.num_cores))
    return gpu_figures(device, entry)


def document(
    machine: Machine, surveys: dict[str, Survey], figures: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """The JSON document: the machine's, and for each kind of device what was measured and what was not.

    ``ceilings`` are those of the training device in SI units, as `Machine` keeps them.
    """
    return {
        **machine.to_dict(),
        "ceiling_facts": {kind: facts_of(survey, figures[kind]) for kind, survey in surveys.items()},
        "unmeasured": {kind: survey.absent for kind, survey in surveys.items()},
    }
