"""What torch's caching allocator tells of a GPU whose memory is full."""

from __future__ import annotations

import torch


def retries(device: torch.device) -> int:
    """How often the allocator found no memory so far, gave back what it kept, and got some then; 0 on a CPU.

    Each waits for the GPU and costs milliseconds: a step that fits in this way only is slow.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
