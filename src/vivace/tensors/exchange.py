"""What ranks that train one model together agree on and exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vivace.errors import Refused


def exchanges_itself(model: nn.Module) -> str:
    """The class by which a model, or a part of it, exchanges gradients in its backward pass; or empty."""
    found = (type(m).__name__ for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    return next(found, "")


def require_ranks(model: nn.Module) -> int:
    """The number of ranks, which all call this. Raises Refused for one alone, where models differ, or for one
    that exchanges its gradients itself.
    """
    if own := exchanges_itself(model):
        raise Refused(f"the model exchanges its gradients by {own} already: hand over the one inside of it")
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        raise Refused("only one process runs: start with torchrun --nproc-per-node N")
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, [(name, list(p.shape)) for name, p in model.named_parameters()])
    if any(other != shapes[0] for other in shapes):
        raise Refused("the ranks have different models: build one on all")
    return len(shapes)


def mean_over_ranks(following: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    """Around the seam `gradients`: the loss as the mean of all ranks'."""
    loss = following(batch) / dist.get_world_size()
    dist.all_reduce(loss)
    return loss


def spread(tensors: Iterable[torch.Tensor]) -> None:
    """Give these tensors, in place, the numbers that rank 0 has in its own; all ranks call it."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # gloo knows few types of numbers
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)
