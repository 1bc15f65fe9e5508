"""What may be tried on a loop that Vivace does not run."""

from __future__ import annotations

import torch
from torch import nn

from vivace.machine import Machine
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.technique.registry import find

UNITS = {"avx512_bf16", "amx_bf16", "bf16"}


def additions(root: nn.Module, machine: Machine) -> list[list[Technique]]:
    """What may be added to the plan that acts, each only if the step is faster by it.

    Layout and precision also together: often neither helps alone.
    """
    device = next(p.device.type for p in root.parameters())
    images = any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in root.modules())
    layout = [find("channels_last")(weights=False)] if images else []  # type: ignore[call-arg]
    precision = [find("bf16_autocast")()] if device == "cuda" or UNITS & set(machine.device.features) else []
    found = [[find("host_allocator")()]] if device == "cpu" else []
    found += [layout, precision, [*layout, *precision] if layout else [], [find("fused_optimizer")()]]
    if torch.are_deterministic_algorithms_enabled():  # the person wants equal bits
        found = [group for group in found if all(t.card.numerics == Numerics.EXACT for t in group)]
    return [group for group in found if group]


def adding(base: Plan, group: list[Technique]) -> Plan:
    """The plan with the techniques of a group that it does not hold."""
    for technique in group:
        if technique.name not in base.names:
            base = base.adding(technique)
    return base
