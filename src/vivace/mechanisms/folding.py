"""Which convolutions can take the BatchNorm behind them into their weights.

Source: https://arxiv.org/abs/1712.05877 (section 3.2)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from vivace.mechanisms.graphs import called_module, is_touched

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_norm(owner: nn.Module) -> bool:
    """Is there a BatchNorm anywhere inside?"""
    return any(type(module) in NORMS for module in owner.modules() if module is not owner)


def foldable(graph: fx.Graph, owner: nn.Module) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The calls of a convolution and of a BatchNorm with running statistics that has its result to itself."""
    for node in graph.nodes:
        norm, source = called_module(node, owner), node.args[0] if node.args else None
        if type(norm) not in NORMS or not isinstance(source, fx.Node) or len(source.users) > 1:
            continue
        convolution = called_module(source, owner)
        plain = all(len(each.args) == 1 and not each.kwargs for each in (node, source))
        if type(convolution) not in CONVOLUTIONS or not plain or norm is None or convolution is None:
            continue
        if norm.running_mean is None or is_touched(norm) or is_touched(convolution):
            continue
        yield source, node
