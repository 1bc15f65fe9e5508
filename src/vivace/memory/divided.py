"""What a step holds where ranks divide the weights: reckoned from the step of one process that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from vivace.mechanisms.blocks import find_blocks
from vivace.memory.watching import Watch
from vivace.tensors.trees import bytes_of

DIVIDED = ("parameters", "gradients", "optimizer")
OF_A_BLOCK = 4  # weights that were and are gathered, their gradients, and these as they are sent


def divide(watch: Watch, parts: Mapping[int, str], ranks: int) -> None:
    """Leave one rank 1/`ranks` of the weights, their gradients and all that the update makes of them."""
    for key, size in watch.sizes.items():
        if parts.get(key) in DIVIDED or watch.made_in[key] == "update":
            watch.sizes[key] = -(-size // ranks)
    watch.moves = [(key, watch.sizes[key] if size >= 0 else size) for key, size in watch.moves]


def gather(watch: Watch, models: Sequence[nn.Module], begin: int, end: int) -> None:
    """From move `begin` of a step to move `end`, hold what is whole at a time: what lies outside of blocks,
    with its gradients, and the largest block in as many forms as `OF_A_BLOCK`.
    """
    blocks = [_bytes(block.modules) for block in find_blocks(models)]
    outside = _bytes(models) - sum(blocks)
    key = len(watch.sizes)
    watch.sizes[key] = max(2 * outside + OF_A_BLOCK * max(blocks, default=0), OF_A_BLOCK * outside)
    watch.made_in[key] = "gathered"
    watch.moves.insert(end, (key, -1))
    watch.moves.insert(begin, (key, watch.sizes[key]))


def _bytes(modules: Sequence[nn.Module]) -> int:
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    return bytes_of(weights.values())
