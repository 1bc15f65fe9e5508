"""Convolutions that take the BatchNorm behind them into their weights, once and for all.

A model that is served keeps its running statistics, so that each BatchNorm is a factor and a shift a channel.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vivace.errors import Refused
from vivace.mechanisms.folding import foldable, has_norm
from vivace.mechanisms.graphs import Untraceable, called_module, tensors_only, trace


def folded(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode in which an identity stands for each BatchNorm that was folded.

    Each forward is traced by itself. Folded is a convolution whose result goes to one BatchNorm and nowhere
    else, where either is called once. Raises Refused where there is none.
    """
    found = copy.deepcopy(model).eval()
    count = sum([_fold_in(owner) for owner in list(found.modules()) if has_norm(owner)])
    if not count:
        raise Refused("no BatchNorm follows a convolution in a forward that can be traced: nothing to fold")
    return found


def _fold_in(owner: nn.Module) -> int:
    """Fold what the owner's own forward calls; how many."""
    signature = tensors_only(owner)
    if signature is None:
        return 0
    try:
        graph, _ = trace(owner, signature)
    except Untraceable:
        return 0
    calls = Counter(id(called_module(node, owner)) for node in graph.nodes)
    pairs = [
        (str(source.target), str(node.target))
        for source, node in foldable(graph, owner)
        if calls[id(called_module(source, owner))] == calls[id(called_module(node, owner))] == 1
    ]
    for source, place in pairs:
        convolution: Any = owner.get_submodule(source)
        norm: Any = owner.get_submodule(place)
        owner.set_submodule(source, fuse_conv_bn_eval(convolution, norm))
        owner.set_submodule(place, nn.Identity())
    return len(pairs)
