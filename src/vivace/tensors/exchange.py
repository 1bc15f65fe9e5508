"""Tensors that one rank sends to all others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def spread(tensors: Iterable[torch.Tensor]) -> None:
    """Give these tensors, in place, the numbers that rank 0 has in its own; all ranks call it."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # gloo knows few types of numbers
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)
