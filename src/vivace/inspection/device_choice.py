"""`--device`: the device that a person names, chosen before anything asks CUDA or ROCm what there is."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, MutableMapping

from vivace.errors import InputError
from vivace.inspection.diagnosis import diagnose, torch_trains_on
from vivace.inspection.facts import AMD_HIDING, Facts, gather_facts
from vivace.inspection.nvidia import number_of, visible

CUDA, ROCM = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def of_launch(name: str, default: int | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """A number that torchrun gives each rank in its environment, such as ``WORLD_SIZE``.

    Raises InputError where it is none, or missing and without a `default`.
    """
    text = environment.get(name, "").strip()
    if text.isdecimal():
        return int(text)
    if not text and default is not None:
        return default
    found = f"{name} is '{text}'" if text else f"WORLD_SIZE is set, and {name} is not"
    raise InputError(f"in the environment {found}: let torchrun start the ranks, or unset WORLD_SIZE for one")


def train_on(
    name: str, environment: MutableMapping[str, str] = os.environ, facts: Facts | None = None
) -> None:
    """Let this process and those that it starts see only the device `name`: ``cpu``, ``cuda`` or ``cuda:1``.

    Acts through `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES` for AMD): call it before torch looks for
    devices. Numbers count as torch counts them, within what these variables show already.

    Raises InputError for a device that Vivace does not train on, that is not here or that the installed torch
    cannot use, and where several ranks train, each on a device of its own.
    """
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise InputError(f"the device is '{name}'; Vivace trains on cpu, cuda, or one of several, as cuda:1")
    if of_launch("WORLD_SIZE", 1, environment) > 1 and name != "cpu":
        raise InputError(f"--device {name} names one device, but several ranks train, each on its own")
    if name == "cpu":
        environment[CUDA] = environment[ROCM] = ""
        return
    facts = gather_facts() if facts is None else facts
    nvidia = bool(facts.nvidia.gpus) and not facts.is_for_rocm
    variable = CUDA if nvidia or (CUDA in environment and ROCM not in environment) else ROCM
    choice = environment.get(variable)
    if nvidia:
        shown = tuple(gpu.device for gpu in visible(facts.nvidia.gpus, choice))
    else:
        hiding = {each: environment[each] for each in AMD_HIDING if each in environment}
        shown = dataclasses.replace(facts, hiding=hiding).amd_shown
        shown = shown if choice is None else shown[: len(choice.split(","))]
    wanted = int(match[1] or 0)
    if wanted >= len(shown):
        here = ", ".join(["cpu", *(f"cuda:{number}" for number in range(len(shown)))])
        raise InputError(
            f"there is no device {name} here: this machine shows {here} (vivace inspect says why)"
        )
    if not torch_trains_on(facts, shown[wanted], "nvidia" if nvidia else "amd"):
        why = diagnose(facts)[0]
        raise InputError(
            f"torch cannot train on {name}, the {shown[wanted].name}: {why.problem}; next: {why.next}"
        )
    if choice is not None:
        environment[variable] = choice.split(",")[wanted].strip()
    elif nvidia:
        gpu = visible(facts.nvidia.gpus, None)[wanted]
        # A number means a GPU, which may have several instances, or MIG mode on and none.
        number = number_of(gpu, facts.nvidia.gpus)
        environment[variable] = gpu.uuid if "mig" in gpu.device.features else number
    else:
        environment[variable] = str(wanted)
