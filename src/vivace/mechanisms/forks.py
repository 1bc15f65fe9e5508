"""Forks of feature maps: the backward pass of a fused BatchNorm adds the gradients of both its readers.

A residual block reads its input twice, and autograd would add the two gradients in a pass of its own. The
result of a fused call comes twice instead, and a block hands both copies to the next one, if that reads each
of its inputs without changing it: a convolution, or an addition that is itself fused.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from vivace.mechanisms.graphs import AGAIN, called_module, is_touched, run_twice, runs_twice

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def share_forks(
    graph: fx.Graph, owner: nn.Module, passed_over: list[nn.Module], norms: tuple[type[nn.Module], ...]
) -> list[str]:
    """Let forks of fused results have a gradient each: in this graph, and between modules that it calls.

    Returns the names of the modules that are called with, or for, both copies.
    """
    for node in list(graph.nodes):
        if _is_fused(node, owner, norms) and (users := _readers(node, owner, norms)):
            for user, copy in zip(users, _twice(graph, node), strict=True):
                user.replace_input_with(node, copy)
    _open(graph, owner, norms)
    return _hand_on(graph, owner, passed_over)


def _open(graph: fx.Graph, owner: nn.Module, norms: tuple[type[nn.Module], ...]) -> None:
    """Give a block that forks its only input, and returns a fused result, both twice."""
    inputs, (output,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    result = output.args[0]
    users = _readers(inputs[0], owner, norms) if len(inputs) == 1 else None
    if users is None or not _is_fused(result, owner, norms) or len(result.users) > 1:
        return
    with graph.inserting_after(inputs[0]):
        again = graph.placeholder(AGAIN, default_value=None)
    with graph.inserting_after(again):
        second = graph.call_function(_second, (inputs[0], again))
    users[1].replace_input_with(inputs[0], second)
    output.args = (_twice(graph, result),)


def _hand_on(graph: fx.Graph, owner: nn.Module, passed_over: list[nn.Module]) -> list[str]:
    """Let blocks that follow each other hand both copies on."""
    able = {
        node: module
        for node in graph.nodes
        if (module := called_module(node, owner)) and len(node.args) == 1 and not node.kwargs
        if runs_twice(module)
    }
    givers = [node for node in able if len(node.users) == 1 and next(iter(node.users)) in able]
    takers = [next(iter(node.users)) for node in givers]
    pairs, names = dict[fx.Node, fx.Node](), list[str]()
    for node in dict.fromkeys([n for n in able if n in givers or n in takers]):
        with graph.inserting_before(node):
            block = graph.get_attr(str(node.target))
            again = (pairs[node.args[0]],) if node in takers else ()
            pair = graph.call_function(run_twice, (block, *node.args, *again))
            first, second = (graph.call_function(operator.getitem, (pair, place)) for place in (0, 1))
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        pairs[first] = second
        passed_over.append(able[node])
        names.append(str(node.target))
    return names


def _twice(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two results of a fused call."""
    node.kwargs = {"twice": True}
    with graph.inserting_after(node):
        second = graph.call_function(operator.getitem, (node, 1))
        return graph.call_function(operator.getitem, (node, 0)), second


def _is_fused(node: object, owner: nn.Module, norms: tuple[type[nn.Module], ...]) -> bool:
    called = called_module(node, owner) if isinstance(node, fx.Node) else None
    return type(called) in norms and isinstance(node, fx.Node) and len(node.args) > 1 and not node.kwargs


def _readers(
    node: fx.Node, owner: nn.Module, norms: tuple[type[nn.Module], ...]
) -> tuple[fx.Node, fx.Node] | None:
    """The two users of a node, where neither changes it."""

    def reads(user: fx.Node) -> bool:
        module = called_module(user, owner)
        if isinstance(module, _CONVOLUTIONS) and type(module) in _CONVOLUTIONS:
            return user.args[:1] == (node,) and not is_touched(module)
        return _is_fused(user, owner, norms) and user.args[0] is not node is user.args[1]

    users = list(node.users)
    return (users[0], users[1]) if len(users) == 2 and all(map(reads, users)) else None


def _second(x: torch.Tensor, again: torch.Tensor | None) -> torch.Tensor:
    return x if again is None else again
