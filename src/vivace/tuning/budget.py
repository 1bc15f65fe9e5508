"""The memory budget: its words, and what to try where a job does not fit into memory as it is."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

from vivace.errors import InputError
from vivace.inspection import inspect
from vivace.inspection.limits import free_memory
from vivace.plan import Plan
from vivace.technique import Numerics, registry
from vivace.training.crew import num_ranks_here
from vivace.words import amount

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
MARGIN = 0.1  # of what is free: fragmentation, the context, and what others will want
ASKING = """
import sys, torch
try:
    print(torch.cuda.mem_get_info()[0])
except RuntimeError as error:
    sys.exit(str(error).partition(chr(10))[0])
"""


def parse_memory(memory: str | float | None) -> int | None:
    """Bytes of a size such as ``20GiB``; ``auto`` is what is free, less a margin. Raises InputError."""
    if memory is None:
        return None
    if isinstance(memory, str):
        if memory.strip().lower() == "auto":
            return int((1 - MARGIN) * free_bytes())
        found = amount(memory, UNITS)
    else:
        found = float(memory) if memory is not True and 1 <= memory < math.inf else None
    if found is None:
        raise InputError(f"the memory budget is '{memory}'; write a size such as 20GiB or 800MiB, or auto")
    return int(found)


def free_bytes() -> int:
    """What the training device has free now: the first visible GPU, else the host in its container, of which
    each rank here has its part.

    torch is asked, in a child process: it counts GPUs, and parts of them, as training does.

    Raises InputError where torch cannot use the GPU.
    """
    device = inspect().device
    if device.kind == "cuda":
        asked = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True, check=False)
        if asked.returncode:
            reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
            raise InputError(
                f"torch cannot say what is free on the {device.name} ({reason}): mend that, or set "
                'CUDA_VISIBLE_DEVICES="" to train on the processor'
            )
        return int(asked.stdout)
    return free_memory() // num_ranks_here()


def smaller_plans(device: str, allow: Numerics) -> Iterator[Plan]:
    """Plans under which a job may run that runs out of memory without any, what changes no number first.

    What has several settings is tried with each technique that changes no number and saves activations, too.
    """
    savers = registry.savers(device, allow)
    company = [
        c for c in savers if c.card.numerics == Numerics.EXACT and c.card.saves_memory == "activations"
    ]
    for cls in savers:
        settings = registry.rescues(cls)
        for technique in settings:
            yield Plan([technique])
            for other in company if len(settings) > 1 else ():
                both = Plan(registry.rescues(other)[:1]).adding(technique)
                if len(both) > 1:
                    yield both
