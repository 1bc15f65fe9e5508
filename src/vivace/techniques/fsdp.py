"""Data parallelism with parts: each rank holds a part of the weights, gradients and optimizer state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RMSprop")
"""Of `torch.optim`: those that update each number of a weight by itself, and have been tried on parts."""


@dataclasses.dataclass(frozen=True)
class FSDP(Technique):
    """FSDP2 (`fully_shard`): a rank has a block's weights whole only while that block runs.

    Blocks are the repeated modules of the model; what lies outside stays whole during a step. Between steps a
    rank holds 1/N of the weights and of the optimizer's state. The numbers are those of `ddp`: ranks start
    from rank 0's weights, rank 0's buffers are sent before each forward pass, gradients and the loss are
    means over the ranks. Each piece of `micro_batches` is exchanged, so that no rank holds whole gradients.
    For the metric and the Job's pictures every rank has the weights whole. A step that runs out of memory
    ends the run, and the last checkpoint stands.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PARALLEL,
        numerics=Numerics.ROUNDING,
        summary="weights, gradients and optimizer state divided among the ranks, which average gradients",
        source="https://arxiv.org/abs/2304.11277",
        slot="ranks",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu",),
        averages_ranks=True,
        shards_weights=True,
    )

    def apply(self, build: Build) -> None:
        """Shard the blocks and what is around them, give the optimizer the parts, and average the loss."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from vivace.mechanisms.blocks import blocks_of
        from vivace.tensors.exchange import mean_over_ranks, require_ranks, spread
        from vivace.tensors.modules import Shell, has_batch_norm
        from vivace.tensors.shards import Shards
        from vivace.tensors.trees import bytes_of

        model, optimizer = build.model, build.optimizer
        num_ranks = require_ranks(model)
        groups = [block.modules for block in blocks_of(build) if _weights(block.modules)]
        reason = _unfit(model, groups) or _unfit_optimizer(optimizer, model)
        build.require(not reason, reason)
        if has_batch_norm(model, over_ranks=True):
            build.declare(Numerics.SEMANTICS, "BatchNorm takes its statistics over one rank's samples")
        spread([*model.parameters(), *model.buffers()])
        shell = Shell(model, lambda _: torch.zeros((), device=build.device))
        before = dict(model.named_parameters(remove_duplicate=False))
        mesh = init_device_mesh(build.device.type, (num_ranks,))
        for group in groups:
            build.on_close(group[-1].register_forward_hook(_own_memory).remove)
            fully_shard(list(group), mesh=mesh) if len(group) > 1 else fully_shard(group[0], mesh=mesh)
        root = fully_shard(shell, mesh=mesh)
        _hand_over(optimizer, before, dict(model.named_parameters(remove_duplicate=False)))
        build.shards = Shards(shell)
        with torch.no_grad():
            shell(None)  # the module that is called first is the root from then on
        root.reshard()

        def forward(following: Callable[[Any], torch.Tensor], batch: Batch) -> torch.Tensor:
            shell.function = following
            spread(model.buffers())
            return shell(batch)  # type: ignore[no-any-return]

        build.wrap(Seam.FORWARD, forward)
        build.wrap(Seam.GRADIENTS, mean_over_ranks)
        inside = bytes_of({id(weight): weight for group in groups for weight in _weights(group)}.values())
        # A ring's all-gather or reduce-scatter is half of an all-reduce, and a block has three of them.
        build.facts.exchanged_share = 1.0 + 0.5 * inside / bytes_of(model.parameters())
        build.facts.ranks = num_ranks
        build.facts.sharded_blocks = len(groups)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of ranks, and of blocks that are gathered one at a time."""
        found = [name for name in seen.operators if "reducescatter" in name.replace("_", "").lower()]
        if not found:
            raise Refused("it changed nothing: no gradients were exchanged")
        return f"{seen.facts['ranks']} ranks, {seen.facts['sharded_blocks']} blocks gathered one at a time"

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """It exchanges more than `ddp` does, for memory. Faster it is at most by what each rank does not have
        to update.
        """
        ranks = profile.features.get("ranks", 1)
        return (0.5, 1 / (1 - profile.shares.get("update", 0.0) * (1 - 1 / ranks)))


def _own_memory(module: nn.Module, inputs: object, output: Any) -> Any:
    """What a block returns, with copies of views: a view that is changed in place loses the hook by which the
    block's weights are gathered for the backward pass.
    """
    from vivace.tensors.trees import map_tensors, tensors
    from vivace.torch_internals.tensors import base_of

    if all(base_of(tensor) is None for tensor in tensors(output)):
        return output
    return map_tensors(output, lambda tensor: tensor if base_of(tensor) is None else tensor.clone())


def _weights(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters()]


def _unfit(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> str:
    """Why a model cannot be sharded; empty where it can."""
    from torch import nn

    from vivace.tensors.modules import has_sparse_gradients, modules_of

    named = dict(model.named_parameters())
    if not any(weight.requires_grad for weight in named.values()):
        return "no parameter is trained"
    if modules_of(model, nn.RNNBase):
        return "a recurrent layer holds its weights in a list of its own"
    if has_sparse_gradients([model]):
        return "an embedding has sparse gradients, which cannot be divided among ranks"
    if len(kinds := {str(weight.dtype) for weight in named.values()}) > 1:
        return f"the weights are of several types ({', '.join(sorted(kinds))})"
    for name, weight in named.items():
        if not weight.dim():
            return f"the weight '{name}' is a single number without a dimension, which cannot be divided"
        if not weight.is_contiguous():
            return f"the weight '{name}' does not lie in memory in its own order"
    holders = Counter(key for group in groups for key in {id(weight) for weight in _weights(group)})
    inside = {id(module) for group in groups for one in group for module in one.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    holders.update({id(weight) for module in outside for weight in module.parameters(recurse=False)})
    tied = [name for name, weight in named.items() if holders[id(weight)] > 1]
    return f"the weight '{tied[0]}' is shared between two blocks of the model" if tied else ""


def _unfit_optimizer(optimizer: Any, model: nn.Module) -> str:
    """Why an optimizer cannot work on parts of weights; empty where it can."""
    import torch

    from vivace.tensors.optimizers import coupled

    able = [getattr(torch.optim, name) for name in OPTIMIZERS]
    name = type(optimizer).__name__
    if type(optimizer) not in able or coupled(optimizer):
        tried = ", ".join(OPTIMIZERS)
        return coupled(optimizer) or f"{name} has not been tried on parts of weights: {tried} have"
    if optimizer.state:
        return f"{name} has taken steps already"
    own = {id(weight) for weight in model.parameters()}
    if any(id(weight) not in own for group in optimizer.param_groups for weight in group["params"]):
        return "the optimizer updates tensors outside of the model"
    return ""


def _hand_over(optimizer: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Let the optimizer update the parts in the place of the whole weights, group by group."""
    parts = {id(weight): after[name] for name, weight in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [parts[id(weight)] for weight in group["params"]]
