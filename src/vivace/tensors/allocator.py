"""What torch's caching allocator tells of a GPU whose memory is full."""

from __future__ import annotations

import torch

from vivace import words


def retries(device: torch.device) -> int:
    """How often the allocator found no memory so far, gave back what it kept, and got some then; 0 on a CPU.

    Each waits for the GPU and costs milliseconds: a step that fits in this way only is slow.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


class FullMemory:
    """Tells once in a run that its steps are slow for want of memory, and which command helps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._told = device, retries(device), False

    def sentence(self, step: int) -> str:
        """That the memory was full by this step; empty where it was not, or was told before."""
        full = 0 if self._told else retries(self._device) - self._before
        if not full:
            return ""
        self._told = True
        return (
            f"the GPU's memory was full {words.count(full, 'time')} by step {step}: torch gave back what it "
            "kept and asked anew, which slows steps; vivace tune --memory finds what needs less"
        )
