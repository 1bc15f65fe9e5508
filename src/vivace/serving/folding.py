"""Convolutions that take the BatchNorm behind them into their weights, once and for all.

A model that is served keeps its running statistics, so that each BatchNorm is a factor and a shift a channel.
Source: https://arxiv.org/abs/1712.05877 (section 3.2)
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vivace.errors import Refused
from vivace.mechanisms.graphs import Untraceable, called_module, is_touched, tensors_only, trace

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def folded(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode in which an identity stands for each BatchNorm that was folded.

    Each forward is traced by itself. Folded is a convolution whose result goes to one BatchNorm and nowhere
    else, where either is called once. Raises Refused where there is none.
    """
    found = copy.deepcopy(model).eval()
    count = sum([_fold_in(owner) for owner in list(found.modules()) if _has_norm(owner)])
    if not count:
        raise Refused("no BatchNorm follows a convolution in a forward that can be traced: nothing to fold")
    return found


def _has_norm(owner: nn.Module) -> bool:
    return any(type(module) in NORMS for module in owner.modules() if module is not owner)


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
    pairs = [pair for node in graph.nodes if (pair := _pair(node, owner, calls)) is not None]
    for source, place in pairs:
        convolution: Any = owner.get_submodule(source)
        norm: Any = owner.get_submodule(place)
        owner.set_submodule(source, fuse_conv_bn_eval(convolution, norm))
        owner.set_submodule(place, nn.Identity())
    return len(pairs)


def _pair(node: fx.Node, owner: nn.Module, calls: Counter[int]) -> tuple[str, str] | None:
    """The places of a convolution and of the BatchNorm that a node calls with its result alone."""
    norm, source = called_module(node, owner), node.args[0] if node.args else None
    if type(norm) not in NORMS or not isinstance(source, fx.Node) or len(source.users) > 1:
        return None
    convolution = called_module(source, owner)
    plain = all(len(each.args) == 1 and not each.kwargs for each in (node, source))
    if type(convolution) not in CONVOLUTIONS or not plain or norm is None or convolution is None:
        return None
    once = calls[id(norm)] == calls[id(convolution)] == 1
    if not once or norm.running_mean is None or is_touched(norm) or is_touched(convolution):
        return None
    return str(source.target), str(node.target)
