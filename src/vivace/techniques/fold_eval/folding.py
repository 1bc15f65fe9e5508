"""Convolutions that take the BatchNorm behind them into their weights, in evaluation and nowhere else.

With running statistics a BatchNorm is a factor and a shift a channel. Both are worked out anew in each call,
from the weights as they are: that costs a pass over the weights, spares two over the feature map, and cannot
be out of date. Parameters and buffers stay what they are. (`vivace.serving.folding` folds a copy for good.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from vivace.mechanisms.folding import foldable, has_norm
from vivace.mechanisms.graphs import (
    AsksForTypes,
    Change,
    Untraceable,
    add_change,
    tensors_only,
    trace,
)
from vivace.tensors.modules import patched
from vivace.torch_internals.modules import Convolution, convolution_with


def install(model: nn.Module, report: set[str]) -> tuple[Callable[[], None], bool]:
    """Fold what can be folded anywhere in `model`; `report` grows by the names of the BatchNorms.

    Returns what undoes it, and whether more may come, as fused_batchnorm's `install` does.
    """
    names = {id(module): name for name, module in model.named_modules()}
    undone = contextlib.ExitStack()
    waiting = False

    def note(owner: nn.Module, found: list[str]) -> None:
        report.update(names.get(id(owner.get_submodule(path)), path) for path in found)

    modules = list(model.modules())
    with patched(modules, "training", [False] * len(modules)):
        for owner in modules:
            signature = tensors_only(owner)
            if signature is None or not has_norm(owner):
                continue
            try:
                graph, passed_over = trace(owner, signature)
                if not (found := fold(graph, owner, passed_over)):
                    continue
                note(owner, found)
            except AsksForTypes:
                waiting = True
            except Untraceable:
                continue
            undone.callback(add_change(owner, Change(0, fold, note, training=False)))
    return undone.close, waiting


def fold(graph: fx.Graph, owner: nn.Module, passed_over: list[nn.Module]) -> list[str]:
    """Make each convolution whose result goes to a BatchNorm and nowhere else one call with it."""
    found = []
    for source, node in list(foldable(graph, owner)):
        with graph.inserting_before(node):
            parts = [graph.get_attr(str(n.target)) for n in (source, node)]
            folded = graph.call_function(convolve, (*parts, source.args[0]))
        node.replace_all_uses_with(folded)
        graph.erase_node(node)
        graph.erase_node(source)
        passed_over += [owner.get_submodule(str(each.target)) for each in (source, node)]
        found.append(str(node.target))
    return found


def convolve(convolution: Convolution, norm: Any, x: torch.Tensor) -> torch.Tensor:
    """``norm(convolution(x))`` as one convolution; a norm that is training runs by itself."""
    if norm.training:
        plain: torch.Tensor = norm(convolution(x))
        return plain
    factor = torch.rsqrt(norm.running_var + norm.eps)
    shift = -norm.running_mean
    if convolution.bias is not None:
        shift = convolution.bias + shift
    if norm.weight is not None:
        factor = factor * norm.weight
    shift = shift * factor if norm.bias is None else shift * factor + norm.bias
    weight = convolution.weight * factor.view(-1, *(1,) * (convolution.weight.dim() - 1))
    dtype = convolution.weight.dtype
    folded: torch.Tensor = convolution_with(convolution, x, weight.to(dtype), shift.to(dtype))
    return folded
