"""The GPUs that a loop uses, whichever of them is CUDA's current device: a loop's own model may be on any."""

from __future__ import annotations

import torch


def used() -> list[int]:
    """The numbers of those on which torch holds memory. Asks nothing where CUDA has not been started."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return []
    return [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]


def wait() -> None:
    """Until all of them have done what they were given."""
    for number in used():
        torch.cuda.synchronize(number)
