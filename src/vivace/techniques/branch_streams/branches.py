"""Independent branches of a module's forward, such as Inception's, each on a CUDA stream of its own.

Where a node of a traced forward joins results that share nothing but their inputs, all branches but the
largest run on side streams: these wait for the main stream first, and the main stream for them at the join.
The backward pass follows by itself, since autograd runs each operator on the stream of its forward. In a
captured graph the branches become parallel paths.
Sources: https://arxiv.org/abs/2012.02732 (Nimble), https://arxiv.org/abs/2011.01302 (IOS).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from vivace.mechanisms.graphs import Change, Untraceable, add_change, called_module, tensors_only, trace

MOST_BRANCHES = 8
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_mains: list[Any] = []  # the streams to return to


def install(model: nn.Module, report: dict[int, list[int]]) -> Callable[[], None]:
    """Let branches anywhere in `model` run side by side; `report` gets the number of branches at each join,
    by the identity of the module whose forward holds them. Returns what undoes it.
    """
    undone = contextlib.ExitStack()
    covered: set[int] = set()  # Sequentials that a module around them has looked into
    for owner in model.modules():
        signature = tensors_only(owner)
        if signature is None or id(owner) in covered or not any(True for _ in owner.children()):
            continue
        try:
            graph, inlined = trace(owner, signature)
        except Untraceable:
            continue
        if find_branches(graph, owner, inlined):
            change = Change(1, find_branches, lambda o, n: report.update({id(o): n}))
            undone.callback(add_change(owner, change))
            covered.update(map(id, inlined))
    return undone.close


def find_branches(graph: fx.Graph, owner: nn.Module, passed_over: list[nn.Module]) -> list[int]:
    """Put the branches of each join on streams, the outermost joins first; how many there are at each."""
    found: list[int] = []
    taken: set[fx.Node] = set()
    for join in reversed(list(graph.nodes)):
        operands = join.all_input_nodes
        if join in taken or len(operands) < 2:
            continue
        branches = [b for b in _exclusive(join, operands) if _weight(b, owner)]
        if not 2 <= len(branches) <= MOST_BRANCHES or not _are_independent(branches, owner):
            continue
        _schedule(graph, join, sorted(branches, key=lambda b: _weight(b, owner)))
        taken.update(node for branch in branches for node in branch)
        found.append(len(branches))
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fork(count: int, *inputs: torch.Tensor | None) -> None:
    """Let `count` side streams begin where the main stream is now, and read those `inputs` that are given."""
    main = torch.cuda.current_stream()
    given = [tensor for tensor in inputs if tensor is not None]
    for side in _sides(torch.cuda.current_device())[:count]:
        side.wait_stream(main)
        for tensor in given:
            tensor.record_stream(side)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def enter(number: int) -> None:
    """Switch to this branch's side stream."""
    _mains.append(torch.cuda.current_stream())
    torch.cuda.set_stream(_sides(torch.cuda.current_device())[number])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def leave() -> None:
    """Go back to the stream before."""
    torch.cuda.set_stream(_mains.pop())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def join(count: int, *outputs: torch.Tensor) -> None:
    """Let the main stream wait for the side streams, whose `outputs` it reads from now on."""
    main = torch.cuda.current_stream()
    for side in _sides(torch.cuda.current_device())[:count]:
        main.wait_stream(side)
    for tensor in outputs:
        tensor.record_stream(main)


def come_back() -> None:
    """After an error in a branch: return to the main stream."""
    if _mains:
        torch.cuda.set_stream(_mains[0])
        _mains.clear()


@cache
def _sides(device: int) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(MOST_BRANCHES)]  # type: ignore[no-untyped-call]


def _exclusive(node: fx.Node, operands: list[fx.Node]) -> list[list[fx.Node]]:
    """For each operand what only it needs and nobody else uses, in the order of the graph."""
    above = {operand: _ancestors(operand) for operand in operands}
    result = []
    for operand, those in above.items():
        others = set[fx.Node]().union(*(a for o, a in above.items() if o is not operand))
        mine = [n for n in those if n not in others and n.op.startswith("call_")]
        kept = set(mine)
        for one in sorted(mine, reverse=True):  # a node that somebody else needs stays, and what it needs
            if not all(user in kept or user is node for user in one.users):
                kept.discard(one)
        result.append(sorted(kept))
    return result


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def _weight(branch: list[fx.Node], owner: nn.Module) -> int:
    """Parameters of the modules that a branch calls."""
    modules = [called_module(node, owner) for node in branch]
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def _are_independent(branches: list[list[fx.Node]], owner: nn.Module) -> bool:
    """Do no two branches call one module, does none draw random numbers or write what it was given?"""
    called = [{id(m) for n in b if (m := called_module(n, owner)) is not None} for b in branches]
    if len(set[int]().union(*called)) < sum(map(len, called)):
        return False
    for branch in branches:
        inside = set(branch)
        for node in branch:
            module = called_module(node, owner)
            inner = list(module.modules()) if module is not None else []
            if "dropout" in str(node.target) or any("Drop" in type(m).__name__ for m in inner):
                return False
            writes = _is_in_place(node) or any(map(_writes, inner))
            if writes and not set(node.all_input_nodes[:1]) <= inside:
                return False
    return True


def _is_in_place(node: fx.Node) -> bool:
    named = str(getattr(node.target, "__name__", node.target)).endswith("_")
    return node.target in _IN_PLACE or named or bool(node.kwargs.get("inplace"))


def _writes(module: nn.Module) -> bool:
    """Does a module's own forward write into what it is given? True where nobody can tell."""
    if type(module).__module__.startswith("torch.nn."):
        return bool(getattr(module, "inplace", False))
    signature = tensors_only(module)
    if signature is None:
        return True
    try:
        graph, _ = trace(module, signature)
    except Untraceable:
        return True
    given = [node.all_input_nodes[:1] for node in graph.nodes if _is_in_place(node)]
    return any(one.op != "call_module" for nodes in given for one in nodes)


def _schedule(graph: fx.Graph, node: fx.Node, branches: list[list[fx.Node]]) -> None:
    """Order the graph: fork, each side branch on its stream, the last branch on the main one, join."""
    sides, everything = branches[:-1], {n for branch in branches for n in branch}
    given = {i: None for n in sorted(everything) for i in n.all_input_nodes if i not in everything}
    read = [n for branch in sides for n in branch if node in n.users]

    def call(function: Callable[..., None], *arguments: Any) -> None:
        with graph.inserting_before(node):
            graph.call_function(function, arguments)

    call(fork, len(sides), *given)
    for number, branch in enumerate(branches):
        if number < len(sides):
            call(enter, number)
        for one in branch:
            node.prepend(one)
        if number < len(sides):
            call(leave)
    call(join, len(sides), *read)
