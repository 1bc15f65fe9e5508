"""BatchNorm, what is added to it and the activation behind it: found in forward functions, and run as one.

A 1x1 convolution in front of it may run as a product that leaves the statistics that it begins with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from vivace.mechanisms.forks import share_forks
from vivace.mechanisms.graphs import (
    AsksForTypes,
    Change,
    Replacement,
    Untraceable,
    add_change,
    called_module,
    is_free,
    is_touched,
    only_user,
    target_of,
    tensors_only,
    trace,
)
from vivace.techniques.fused_batchnorm.kernels.batch_norm import Norm, apply_activation, fused_twice
from vivace.techniques.fused_batchnorm.kernels.product import product
from vivace.techniques.fused_batchnorm.kernels.splits import split_rows
from vivace.tensors.modules import is_product, modules_of, placed

NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_IN_PLACE = (operator.iadd, "add_")
_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "relu": (nn.ReLU, functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"),
    "relu6": (nn.ReLU6, functional.relu6),
    "silu": (nn.SiLU, functional.silu),
    "hardswish": (nn.Hardswish, functional.hardswish),
}
_BESIDE_A_RESIDUAL = ("relu", "relu6")


@dataclasses.dataclass(frozen=True)
class Chain:
    """One BatchNorm by its path below the traced module, whether something is added, what follows, whether
    a convolution leaves statistics, and the BatchNorm that what is added goes through.
    """

    norm: str
    adds: bool
    activation: str
    product: bool = False
    other: str = ""

    def __str__(self) -> str:
        first = "product" if self.product else "none"
        addition = "addition of BatchNorm" if self.other else "addition" if self.adds else "none"
        parts = (first, "BatchNorm", addition, self.activation)
        return " + ".join(part for part in parts if part != "none")


def install(
    model: nn.Module, report: dict[int, Chain], *, products: bool = False
) -> tuple[Callable[[], None], bool]:
    """Fuse what can be fused anywhere in `model`; `report` grows by the chains, a BatchNorm's identity each.

    `products`: 1x1 convolutions that only a BatchNorm follows leave its statistics.

    Returns what undoes it, and whether more may come: modules that take different ways for tensors and lists
    are traced when they are first called.
    """
    norms = [m for m in model.modules() if _may_be_fused(m) and not is_touched(m)]
    undone = contextlib.ExitStack()
    undone.callback(placed(norms, "forward", [FusedNorm(norm) for norm in norms]))
    convolutions = [m for m in modules_of(model, nn.Conv2d) if products and _may_leave_statistics(m)]
    replaced = [Product(convolution) for convolution in convolutions]
    undone.callback(placed(convolutions, "forward", replaced))
    held = {id(norm) for norm in norms}
    waiting = False

    def note(owner: nn.Module, found: list[Chain | str]) -> None:
        for chain in (one for one in found if isinstance(one, Chain)):
            report[id(owner.get_submodule(chain.norm))] = chain  # of the outermost module that sees it
            if chain.other:
                report.pop(id(owner.get_submodule(chain.other)), None)

    for owner in reversed(list(model.modules())):  # a fork is shared between parts that are known to be able
        signature = tensors_only(owner)
        if signature is None or id(owner) in held or held.isdisjoint(map(id, owner.modules())):
            continue
        try:
            graph, passed_over = trace(owner, signature)
            wanted = bool(find_chains(graph, owner, passed_over))
        except AsksForTypes:
            wanted = waiting = True
        except Untraceable:
            wanted = False
        if wanted:
            undone.callback(add_change(owner, Change(0, find_chains, note)))
    return undone.close, waiting


def _may_leave_statistics(module: nn.Module) -> bool:
    """Can the product of this convolution leave the statistics that its BatchNorm needs?

    The numbers of channels are multiples of eight: then rows begin at addresses that the kernels can load
    from, and the layer is not the first one, whose channels `padded_stem` fills up.
    """
    if type(module) is not nn.Conv2d or module.bias is not None or is_touched(module):
        return False
    unit = module.stride == (1, 1)  # the kernel reads every row
    return is_product(module) and unit and module.in_channels % 8 == module.out_channels % 8 == 0


def find_chains(graph: fx.Graph, owner: nn.Module, passed_over: list[nn.Module]) -> list[Chain | str]:
    """Make each chain of a graph one call, ``norm(x, other, activation)``; whose results are handed on twice,
    those modules' names come behind the chains.
    """
    found = [_fuse(graph, node, owner, passed_over) for node in list(graph.nodes)]
    return [chain for chain in found if chain is not None] + share_forks(graph, owner, passed_over, NORMS)


class Product(Replacement):
    """A 1x1 convolution's forward that can leave statistics: ``(x)`` as ever, ``(x, True)`` with them."""

    def __init__(self, convolution: nn.Module) -> None:
        self.convolution: Any = convolution
        self.own = convolution.forward

    def __call__(self, x: torch.Tensor, with_statistics: bool = False) -> Any:
        """The feature map, or that and its statistics."""
        if not with_statistics:
            return self.own(x)
        weight, device = self.convolution.weight, x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        return product(x, weight)


class FusedNorm(Replacement):
    """A BatchNorm's forward that can add and activate: ``(x)`` as ever, ``(x, other, activation)`` fused.

    `statistics` are those of `x` that a product has left; `second` is the BatchNorm that `other` has yet to
    go through, and `other`'s statistics.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.norm: Any = norm
        self.own = norm.forward

    def __call__(
        self,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        activation: str | None = None,
        statistics: torch.Tensor | None = None,
        second: tuple[nn.Module, torch.Tensor | None] | None = None,
        twice: bool = False,
    ) -> Any:
        """``activation(norm(x) + other)``, or that twice; bookkeeping of running statistics is PyTorch's."""
        if activation is None:
            return self.own(x)
        if second is not None and other is not None and not self._joins(x, other, second[0]):
            other, second = second[0](other), None
        if not self.norm.training or (other is not None and other.shape != x.shape):
            z = self.own(x)
            alike = apply_activation(z if other is None else z + other, activation)
            return (alike, alike) if twice else alike
        added = None if second is None or other is None else _counted(second[0], other, second[1])
        pair = fused_twice(x, other, _counted(self.norm, x, statistics), activation, added)
        return pair if twice else pair[0]

    def _joins(self, x: torch.Tensor, other: torch.Tensor, second: Any) -> bool:
        """May both norms run in one kernel?"""
        affine = (self.norm.weight is None) == (second.weight is None)
        return self.norm.training and second.training and other.shape == x.shape and affine


def _counted(norm: Any, x: torch.Tensor, statistics: torch.Tensor | None) -> Norm:
    """A BatchNorm whose counter of batches has moved."""
    momentum, tracked = norm.momentum, norm.track_running_stats
    if tracked and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # the average over all batches
            momentum = 1.0 / float(norm.num_batches_tracked)
    spared = None if statistics is None else (statistics, split_rows(x.numel() // x.shape[1], x.shape[1]))
    mean, variance = (norm.running_mean, norm.running_var) if tracked else (None, None)
    return Norm(norm.weight, norm.bias, mean, variance, momentum or 0.0, norm.eps, spared)


def _fuse(graph: fx.Graph, node: fx.Node, root: nn.Module, skipped: list[nn.Module]) -> Chain | None:
    """Make a BatchNorm and what follows it one call; None where nothing does, or others need its result."""
    if not _is_norm(node, root) or not node.users:
        return None
    last, other = node, None
    addition = only_user(node)
    if addition is not None and target_of(addition, root) in _ADDITIONS and not addition.kwargs:
        mutated = addition.args[0] if target_of(addition, root) in _IN_PLACE else node
        operands = [a for a in addition.args if a is not node]
        joins = len(addition.args) == 2 and isinstance(operands[0] if operands else None, fx.Node)
        if joins and mutated is node:
            last, other = addition, operands[0]
    activation, following = "none", only_user(last)
    if following is not None and following.args and following.args[0] is last and is_free(following, root):
        name = next((k for k, v in _ACTIVATIONS.items() if target_of(following, root) in v), "none")
        if other is None or name in _BESIDE_A_RESIDUAL:
            activation, last = (name, following) if name != "none" else ("none", last)
    before = _product_before(node, root)
    if last is node and (before is None or _joins_later(node, root)):
        return None
    skipped.extend(m for m in (called_module(last, root), called_module(node, root)) if m is not None)
    passed = [last, node] if other is None or addition is None else [last, addition, node]
    x, statistics = _input_of(graph, node, before, root, skipped)
    second: tuple[fx.Node, fx.Node | None] | None = None
    left = statistics
    joined = other if isinstance(other, fx.Node) and _is_norm(other, root) else None
    if joined is not None and only_user(joined) is not addition:
        joined = None
    if joined is not None:
        passed.append(joined)
        skipped.append(root.get_submodule(str(joined.target)))
        other, its = _input_of(graph, joined, _product_before(joined, root), root, skipped)
        with graph.inserting_before(last):
            second = (graph.get_attr(str(joined.target)), its)
        left = left or its
    with graph.inserting_before(last):
        fused = graph.call_module(str(node.target), (x, other, activation, statistics, second))
    last.replace_all_uses_with(fused)
    for old in dict.fromkeys(passed):
        graph.erase_node(old)
    name = str(joined.target) if joined is not None else ""
    return Chain(str(node.target), other is not None, activation, left is not None, name)


def _is_norm(node: fx.Node, root: nn.Module) -> bool:
    """Is it the call of a BatchNorm that may be fused?"""
    norm = called_module(node, root)
    return _may_be_fused(norm) and len(node.args) == 1 and not node.kwargs and is_free(node, root)


def _may_be_fused(module: nn.Module | None) -> bool:
    """Is it a BatchNorm with both weight and bias, or with neither?"""
    if not isinstance(module, NORMS) or type(module) not in NORMS:
        return False
    return (module.weight is None) == (module.bias is None)


def _joins_later(node: fx.Node, root: nn.Module) -> bool:
    """Is this BatchNorm's result all that another's is added to?"""
    addition = only_user(node)
    if addition is None or target_of(addition, root) not in _ADDITIONS:
        return False
    others = [a for a in addition.args if isinstance(a, fx.Node) and a is not node]
    return any(_is_norm(a, root) and only_user(a) is addition for a in others)


def _input_of(
    graph: fx.Graph, node: fx.Node, before: fx.Node | None, root: nn.Module, skipped: list[nn.Module]
) -> tuple[Any, fx.Node | None]:
    """What a BatchNorm is given, and its statistics where the product before it leaves them."""
    if before is None:
        return node.args[0], None
    skipped.append(root.get_submodule(str(before.target)))
    before.args = (*before.args, True)
    with graph.inserting_before(node):
        x, statistics = (graph.call_function(operator.getitem, (before, place)) for place in (0, 1))
    return x, statistics


def _product_before(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The call of a convolution that can leave statistics, and that only this BatchNorm follows."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or only_user(source) is not node:
        return None
    module = called_module(source, root)
    able = module is not None and isinstance(vars(module).get("forward"), Product) and not is_touched(module)
    return source if able and len(source.args) == 1 and not source.kwargs else None
