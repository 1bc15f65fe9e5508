"""Weights of which each rank holds a part: put together, taken apart, and looked at by all ranks at once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from vivace.errors import JobError
from vivace.torch_internals.modules import without_hooks
from vivace.torch_internals.tensors import Operator, OperatorMode, read_number

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Shards:
    """What `torch.distributed.fsdp.fully_shard` has made of the modules in a tree.

    Every method but `local` is an exchange: all ranks call it at the same place, or wait for one another
    for ever.

    Args:
        root: the module that was sharded last, around the others.
    """

    def __init__(self, root: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._modules = list(root.modules())
        self._parts = [module for module in self._modules if isinstance(module, FSDPModule)]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the weights are plain whole tensors on every rank, which may use the model alone.

        For reading: what is written to them is lost. They take the memory of the whole model on each rank.
        """
        for part in self._parts:
            part.unshard()
        try:
            # A forward pass that they saw on one rank alone would change what it gathers ahead in the next
            # backward pass, and the ranks would wait for each other for ever.
            with without_hooks(self._modules, "torch.distributed.fsdp"):
                yield
        finally:
            for part in self._parts:
                part.reshard()

    def reading(self) -> WholeNumbers:
        """Inside, the person's own code reads whole numbers alone."""
        return WholeNumbers()  # type: ignore[no-untyped-call]

    def gathered(self, tree: Any, *, keep: bool) -> Any:
        """A copy of nested dictionaries, lists and tuples, such as a `state_dict`, with whole tensors on the
        CPU; None in their place on a rank that does not `keep` them.
        """
        if _is_parted(tree):
            found = whole(tree)
            return found.cpu() if keep else None
        return _copied(tree, lambda _, item: self.gathered(item, keep=keep))

    def parted(self, tree: Any, like: Any) -> Any:
        """A copy of `tree` in which each rank holds its part of those tensors of which it does in `like`,
        that have the same place and shape. Every rank hands in whole ones.
        """
        if _is_parted(like) and isinstance(tree, torch.Tensor) and tree.shape == like.shape:
            from torch.distributed.tensor import distribute_tensor

            return distribute_tensor(tree, like.device_mesh, like.placements, src_data_rank=None)
        if not isinstance(like, dict):
            return tree
        return _copied(tree, lambda key, item: self.parted(item, like.get(key)))

    def parted_optimizer(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same of an optimizer's `state_dict`: a tensor that has its weight's shape is parted as that."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        like = {
            number: dict.fromkeys(state["state"].get(number, ()), weight)
            for number, weight in zip(numbers, weights, strict=False)
        }
        return {**state, "state": self.parted(state["state"], like)}

    def product(self, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The sum of the products of a weight's numbers, of which this rank may hold a part, with others."""
        found = (weight * self.parted(other, weight)).sum()
        return found.full_tensor() if _is_parted(found) else found

    def mean(self, number: torch.Tensor) -> torch.Tensor:
        """The mean of a number over the ranks, which carries no gradient."""
        total = number.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a tensor, without an exchange."""
        return tensor.to_local() if _is_parted(tensor) else tensor

    def finite(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Which of these are finite, on all ranks and in all parts."""
        flags = [torch.isfinite(self.local(one)).all() for one in tensors]
        if not flags:
            return []
        found = torch.stack(flags).int()
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return [bool(flag) for flag in found.tolist()]


class WholeNumbers(OperatorMode):  # type: ignore[no-untyped-call]
    """While it is entered, nobody reads one number from a tensor of which this rank holds a part: PyTorch
    would give the part's own without a word, and another one on each rank.
    """

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator. Raises JobError where it reads such a number."""
        if function is read_number:
            (tensor,) = arguments
            if _is_parted(tensor) and not all(place.is_replicate() for place in tensor.placements):
                raise JobError(
                    "the Job's on_gradients reads a number (.item(), float(), an if) of a tensor of which "
                    "this rank holds a part: take it from tensor.full_tensor()"
                )
        return function(*arguments, **keywords)


def _is_parted(thing: object) -> TypeGuard[DTensor]:
    """May each rank hold a part of this? Of nothing, where the module of such tensors was not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, detached, or all of it where this rank holds a part: then all ranks call this together."""
    return tensor.full_tensor().detach() if _is_parted(tensor) else tensor.detach()


def _copied(tree: Any, function: Any) -> Any:
    """A copy with ``function(key, item)`` in the place of each item; what is no container as it is."""
    if isinstance(tree, dict):
        copied = copy.copy(tree)  # which keeps the `_metadata` of a module's state
        copied.update({key: function(key, item) for key, item in tree.items()})
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(function(number, item) for number, item in enumerate(tree))
    return tree
