"""BatchNorm, what is added to it and the activation behind it: found in forward functions, and run as one.

`torch.fx` traces the forward of each module by itself, with the modules that it calls as leaves; plain
Sequentials are looked into. The rewritten function runs only where its trace holds: in training, for
arguments such as were traced, while the module's own numbers and switches are what they were, and nobody has
hooked or replaced a module that it passes over. Everywhere else the person's own forward runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_unflatten

from vivace.kernels.batch_norm import apply_activation, fused

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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Signature = tuple[int, ...]  # an argument is a tensor (-1), or a list of so many tensors


class Untraceable(Exception):
    """A forward function cannot be followed without numbers, or would not do the same without Python."""


class AsksForTypes(Untraceable):
    """A forward function takes different ways for a tensor and for a list of some."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """One BatchNorm by its path below the traced module, whether something is added, and what follows."""

    norm: str
    adds: bool
    activation: str

    def __str__(self) -> str:
        parts = ("BatchNorm", "addition" if self.adds else "none", self.activation)
        return " + ".join(part for part in parts if part != "none")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A forward function in which each chain is one call, ``norm(x, other, activation)``."""

    function: Callable[..., Any]
    chains: tuple[Chain, ...]
    passed_over: tuple[nn.Module, ...]


def rewrite(owner: nn.Module, signature: Signature) -> Rewritten:
    """Trace the forward of `owner` for arguments of `signature`. Raises Untraceable with the reason."""
    own = isinstance(vars(owner).get("forward"), (type(None), FusedForward))
    if not own or isinstance(owner, torch.jit.ScriptModule):
        raise Untraceable("its forward is not its class's own")
    tracer = _Tracer()
    concrete = _concrete(owner, signature)
    graph = _without_traces(owner, lambda: tracer.trace(owner, concrete))
    if isinstance(
        graph._codegen, fx.graph._PyTreeCodeGen
    ):  # lists come flat; what is returned keeps its form
        (output,) = graph.find_nodes(op="output")
        form: Any = graph._codegen.pytree_info.out_spec
        output.args = (tree_unflatten(output.args[0], form),)  # type: ignore[arg-type]
    graph.set_codegen(fx.graph.CodeGen())
    if tracer.asked and all(length < 0 for length in signature):
        raise AsksForTypes("its forward asks for the type of what it is given")
    if tracer.asked:
        raise Untraceable("its forward asks for the type of what it computes")
    chains, skipped = [], list(tracer.inlined)
    for node in list(graph.nodes):
        chain = _fuse(graph, node, tracer.root, skipped)
        if chain is not None:
            chains.append(chain)
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    exec(code.src, names)
    return Rewritten(names["forward"], tuple(chains), tuple(skipped))


def install(model: nn.Module, report: dict[int, Chain]) -> tuple[Callable[[], None], bool]:
    """Fuse what can be fused anywhere in `model`; `report` grows by the chains, a BatchNorm's identity each.

    Returns what undoes it, and whether more may come: modules that take different ways for tensors and lists
    are traced when they are first called.
    """
    placed: list[nn.Module] = []
    owners = [
        owner
        for owner in model.modules()
        if type(owner) not in NORMS and any(type(inner) in NORMS for inner in owner.modules())
    ]
    for norm in [m for m in model.modules() if type(m) in NORMS and not is_touched(m)]:
        norm.forward = FusedNorm(norm)
        placed.append(norm)
    waiting = False
    for owner in owners:
        try:
            signature = (-1,) * len(_required(owner)[0])
            found = rewrite(owner, signature)
        except AsksForTypes:
            found, waiting = None, True
        except Untraceable:
            continue
        if found is not None and not found.chains:
            continue
        owner.forward = forward = FusedForward(owner, report)
        if found is not None:
            forward.remember(signature, found)
        placed.append(owner)

    def undo() -> None:
        for module in placed:
            vars(module).pop("forward", None)

    return undo, waiting


def signature_of(arguments: tuple[Any, ...]) -> Signature | None:
    """What `rewrite` wants to know of arguments; None where one is neither a tensor nor a list of some."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(-1)
        elif isinstance(argument, list) and all(isinstance(item, torch.Tensor) for item in argument):
            found.append(len(argument))
        else:
            return None
    return tuple(found)


def facts_of(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers, texts and switches, which a trace takes for constants."""
    return {k: v for k, v in vars(module).items() if v is None or isinstance(v, (bool, int, float, str))}


def is_touched(module: nn.Module) -> bool:
    """Has anybody but this file replaced a module's forward, or hooked it?"""
    replaced = vars(module).get("forward")
    return not (replaced is None or isinstance(replaced, (FusedForward, FusedNorm))) or _is_hooked(module)


def _is_hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


class FusedNorm:
    """A BatchNorm's forward that can add and activate: ``(x)`` as ever, ``(x, other, activation)`` fused."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm: Any = norm
        self.own = norm.forward

    def __call__(
        self, x: torch.Tensor, other: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """``activation(norm(x) + other)``; the bookkeeping of running statistics is PyTorch's."""
        norm = self.norm
        if activation is None:
            alone: torch.Tensor = self.own(x)
            return alone
        if not norm.training or (other is not None and other.shape != x.shape):
            z = self.own(x)
            return apply_activation(z if other is None else z + other, activation)
        momentum, tracked = norm.momentum, norm.track_running_stats
        if tracked and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:  # the average over all batches
                momentum = 1.0 / float(norm.num_batches_tracked)
        means = (norm.running_mean, norm.running_var) if tracked else (None, None)
        rest = (momentum or 0.0, norm.eps, activation)
        return fused(x, other, norm.weight, norm.bias, means[0], means[1], *rest)


class FusedForward:
    """A module's forward with its chains fused where the trace holds, and the person's own elsewhere."""

    def __init__(self, owner: nn.Module, report: dict[int, Chain]) -> None:
        self.owner, self.report = owner, report
        self.own = owner.forward
        self.known: dict[Any, Rewritten | None] = {}
        self.by_signature: dict[Signature, Rewritten | None] = {}

    def remember(self, signature: Signature, found: Rewritten | None) -> None:
        """Keep what a trace found under the facts of now, and report its chains."""
        useful = found if found is not None and found.chains else None
        self.known[(signature, *facts_of(self.owner).items())] = self.by_signature[signature] = useful
        for chain in useful.chains if useful is not None else ():
            self.report.setdefault(id(self.owner.get_submodule(chain.norm)), chain)

    def learn(self, signature: Signature) -> Rewritten | None:
        """The rewritten function for arguments of a signature; None where there is none."""
        key = (signature, *facts_of(self.owner).items())
        if key not in self.known:
            try:
                found: Rewritten | None = rewrite(self.owner, signature)
            except Untraceable:
                found = None
            self.remember(signature, found)
        return self.known[key]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module's own forward returns."""
        signature = None if keywords else signature_of(arguments)
        rewritten = None
        if signature is not None and self.owner.training and torch.is_grad_enabled():
            compiling = torch.compiler.is_compiling()  # which guards the module's facts itself
            rewritten = self.by_signature.get(signature) if compiling else self.learn(signature)
        if rewritten is None or any(map(is_touched, rewritten.passed_over)):
            return self.own(*arguments, **keywords)
        flat = [item for a in arguments for item in (a if isinstance(a, list) else [a])]
        return rewritten.function(self.owner, *flat)


class _Proxy(fx.Proxy):
    """Notices when a person's code asks for its type: the answer would not be the one of a run."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking != __name__ and asking.partition(".")[0] != "torch":
            self.tracer.asked = True  # type: ignore[attr-defined]
        return _Proxy


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in ("iadd", "isub", "imul", "itruediv", "iand", "ior"):  # fx would trace them out of place
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.inlined: list[nn.Module] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        plain = isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward
        if not plain or len(args) != 1 or kwargs or is_touched(m):
            return super().call_module(m, forward, args, kwargs)
        assert isinstance(m, nn.Sequential)
        self.inlined.append(m)
        value = args[0]
        for child in m:
            value = child(value)
        return value

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            held = (*self.root.parameters(), *self.root.buffers())
            if not any(a is tensor for tensor in held):
                raise Untraceable("its forward makes a tensor of its own")
        return super().create_arg(a)


def _required(owner: nn.Module) -> tuple[list[str], dict[str, Any]]:
    """The names of a forward's required arguments, and the defaults of the others."""
    parameters = list(inspect.signature(type(owner).forward).parameters.values())[1:]
    if any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise Untraceable("its forward takes any number of arguments")
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return [p.name for p in parameters if p.name not in defaults], defaults


def _concrete(owner: nn.Module, signature: Signature) -> dict[str, Any] | None:
    """What fx is told of arguments: defaults stay, lists have so many places."""
    required, concrete = _required(owner)
    if len(signature) != len(required):
        raise Untraceable("it was called with other than its required arguments")
    for name, length in zip(required, signature, strict=True):
        if length >= 0:
            concrete[name] = [fx._symbolic_trace.PH] * length
    return concrete or None


def _without_traces(owner: nn.Module, trace: Callable[[], fx.Graph]) -> fx.Graph:
    """A trace that drew no random numbers and changed no attribute of the module; both are put back."""
    streams = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    before = dict(vars(owner))
    contents = {k: list(v) for k, v in before.items() if isinstance(v, list)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = trace()
    except Untraceable:
        raise
    except Exception as error:  # a person's code, on values without numbers
        raise Untraceable(f"torch.fx cannot follow its forward: {error}") from error
    finally:
        drew = not torch.equal(torch.get_rng_state(), streams[0]) or random.getstate() != streams[1]
        drew = drew or any(
            numpy.any(a != b) for a, b in zip(numpy.random.get_state(), streams[2], strict=True)
        )
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        numpy.random.set_state(streams[2])
        kept = before.keys() == vars(owner).keys() and all(vars(owner)[k] is v for k, v in before.items())
        kept = kept and all(_same(before[name], items) for name, items in contents.items())
        vars(owner).clear()
        vars(owner).update(before)
        for name, items in contents.items():
            before[name][:] = items
    if drew:
        raise Untraceable("its forward draws random numbers")
    if not kept:
        raise Untraceable("its forward changes its attributes")
    return graph


def _fuse(graph: fx.Graph, node: fx.Node, root: nn.Module, skipped: list[nn.Module]) -> Chain | None:
    """Make a BatchNorm and what follows it one call; None where nothing does, or others need its result."""
    norm = _module(node, root)
    if norm is None or type(norm) not in NORMS or is_touched(norm) or len(node.args) != 1 or node.kwargs:
        return None
    last, other = node, None
    addition = _only_user(node)
    if addition is not None and _target(addition, root) in _ADDITIONS and not addition.kwargs:
        mutated = addition.args[0] if _target(addition, root) in _IN_PLACE else node
        operands = [a for a in addition.args if a is not node]
        if (
            len(addition.args) == 2
            and isinstance(operands[0] if operands else None, fx.Node)
            and mutated is node
        ):
            last, other = addition, operands[0]
    activation, following = "none", _only_user(last)
    if following is not None and following.args and following.args[0] is last and _is_free(following, root):
        name = next((k for k, v in _ACTIVATIONS.items() if _target(following, root) in v), "none")
        if other is None or name in _BESIDE_A_RESIDUAL:
            activation, last = (name, following) if name != "none" else ("none", last)
    if last is node:
        return None
    if (module := _module(last, root)) is not None:
        skipped.append(module)
    skipped.append(norm)
    with graph.inserting_before(last):
        fused = graph.call_module(str(node.target), (node.args[0], other, activation))
    last.replace_all_uses_with(fused)
    passed = [last, node] if other is None or addition is None else [last, addition, node]
    for old in dict.fromkeys(passed):
        graph.erase_node(old)
    return Chain(str(node.target), other is not None, activation)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_free(node: fx.Node, root: nn.Module) -> bool:
    module = _module(node, root)
    return module is None or not is_touched(module)


def _target(node: fx.Node, root: nn.Module) -> Any:
    """What a node calls: a module's class, a function, or a method's name."""
    module = _module(node, root)
    return node.target if module is None else type(module)
