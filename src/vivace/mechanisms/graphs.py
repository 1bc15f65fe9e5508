"""Forward functions of modules, traced by `torch.fx`, changed, and run in the place of a person's own.

Each module's forward is traced by itself, with the modules that it calls as leaves; plain Sequentials are
looked into. The changed function runs only where its trace holds: in training, or in evaluation without
gradients, as the change asks; for arguments such as were traced, while the module's own numbers and switches
are what they were, and nobody has hooked or replaced a module that it passes over. Everywhere else the
person's own forward runs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from vivace.mechanisms.beside import OF_MODULES
from vivace.mechanisms.blocks import is_fake
from vivace.mechanisms.reads import Reads
from vivace.tensors.modules import placed
from vivace.tensors.outside import Outside
from vivace.tensors.trees import tensors
from vivace.torch_internals.modules import form_of_output, has_hooks, is_compiled
from vivace.torch_internals.tensors import (
    Operator,
    OperatorMode,
    outside_modes,
    schema_of,
    storage_ids,
    tree_leaves,
    tree_unflatten,
)

AGAIN = "again"  # the name of the placeholder by which an edit says that its graph runs twice
MOST_TRACES = 64  # of one forward: where numbers that it reads change at every call, it then runs as it is
Signature = tuple[int, ...]  # an argument is a tensor (-1), or a list of so many tensors


class Untraceable(Exception):
    """A forward function cannot be followed without numbers, or would not do the same without Python."""


class AsksForTypes(Untraceable):
    """A forward function takes different ways for a tensor and for a list of some."""


class Replacement:
    """A forward that Vivace put in the place of a module's own, as an attribute of the instance.

    In a pickle stands the module's own again: who reads it need not have Vivace. A deep copy is one.
    """

    own: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.own,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = memo[id(self)] = object.__new__(type(self))
        vars(found).update(copy.deepcopy(vars(self), memo))
        return found


@dataclasses.dataclass(frozen=True)
class Change:
    """One way to change a graph: ``edit(graph, owner, passed_over)`` returns what it found, for the report,
    and adds the modules whose own calls disappear to `passed_over`.

    Several changes of one forward act in the order of their `order`. One that is not for `training` is for
    evaluation without gradients.
    """

    order: int
    edit: Callable[[fx.Graph, nn.Module, list[nn.Module]], list[Any]]
    report: Callable[[nn.Module, list[Any]], None]
    training: bool = True


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A changed forward function, called with the module and its flattened arguments.

    `twice`: it returns its result twice, and may be given its argument a second time. The two are in the same
    memory and have gradients of their own, which whoever made them adds up.
    """

    function: Callable[..., Any]
    passed_over: tuple[nn.Module, ...]
    twice: bool = False
    read: tuple[Any, ...] = ()  # what a trace takes for constants, see `Reads`


class TracedForward(Replacement):
    """A module's forward, changed where the trace holds, and the person's own elsewhere."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner, self.own, self.reads = owner, owner.forward, Reads(owner)
        self.changes: list[Change] = []
        self.known: dict[Any, Rewritten | None] = {}
        self.by_signature: dict[Signature, Rewritten | None] = {}

    def learn(self, signature: Signature) -> Rewritten | None:
        """The changed function for arguments of a signature; None where there is none."""
        key = (signature, *facts_of(self.owner).items(), self.reads.now())
        if key not in self.known and len(self.known) < MOST_TRACES:
            try:
                self.known[key] = self._rewrite(signature)
            except Untraceable:
                self.known[key] = None
            if self.owner.training:
                self.by_signature[signature] = self.known[key]
        return self.known.get(key)

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        """What the module's own forward returns."""
        rewritten = None if keywords else self._that_holds(arguments)
        if rewritten is None:
            return self.own(*arguments, **keywords)
        flat = [item for a in arguments for item in (a if isinstance(a, list) else [a])]
        result = rewritten.function(self.owner, *flat)
        return result[0] if rewritten.twice else result

    def twice(self, x: torch.Tensor, again: torch.Tensor | None) -> Any:
        """The result twice, of an argument that may come twice; see `Rewritten`."""
        rewritten = self._that_holds((x,))
        if rewritten is None or not rewritten.twice:
            return (self.own(x),) * 2
        return rewritten.function(self.owner, x, again)

    def _that_holds(self, arguments: tuple[object, ...]) -> Rewritten | None:
        signature = signature_of(arguments)
        rewritten = None
        if signature is not None and self.owner.training == torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                rewritten = self.learn(signature)
            elif self.owner.training:
                rewritten = self.by_signature.get(signature)
                if rewritten is not None and rewritten.read != self.reads.now():  # which it guards
                    rewritten = None
        if rewritten is None or any(map(is_touched, rewritten.passed_over)):
            return None
        return rewritten

    def _rewrite(self, signature: Signature) -> Rewritten | None:
        changes = [change for change in self.changes if change.training == self.owner.training]
        if not changes:
            return None
        graph, passed_over = trace(self.owner, signature)
        found = [(change, change.edit(graph, self.owner, passed_over)) for change in changes]
        for change, those in found:
            change.report(self.owner, those)
        if not any(those for _, those in found):
            return None
        code = graph.python_code("self")
        names: dict[str, Any] = dict(code.globals)
        exec(code.src, names)
        twice = any(node.op == "placeholder" and node.target == AGAIN for node in graph.nodes)
        return Rewritten(names["forward"], tuple(passed_over), twice, self.reads.now())


def add_change(owner: nn.Module, change: Change) -> Callable[[], None]:
    """Change the forward of `owner` from now on; returns what undoes it."""
    forward = vars(owner).get("forward")
    if not isinstance(forward, TracedForward):
        forward = owner.forward = TracedForward(owner)
    own = forward

    def place(changes: list[Change]) -> None:
        own.changes = sorted(changes, key=lambda c: c.order)
        own.known.clear()
        own.by_signature.clear()

    def undo() -> None:
        place([c for c in own.changes if c is not change])
        if not own.changes:
            vars(owner).pop("forward", None)

    place([*own.changes, change])
    if (signature := tensors_only(owner)) is not None:
        own.learn(signature)
    return undo


def trace(owner: nn.Module, signature: Signature) -> tuple[fx.Graph, list[nn.Module]]:
    """The graph of a forward for arguments of `signature`, and the Sequentials that were looked into.

    Raises Untraceable with the reason.
    """
    if not isinstance(vars(owner).get("forward"), (type(None), TracedForward)):
        raise Untraceable("its forward is not its class's own")
    if isinstance(owner, torch.jit.ScriptModule):
        raise Untraceable("it is compiled by TorchScript")
    tracer = _Tracer()
    concrete = _concrete(owner, signature)
    graph = _without_traces(owner, lambda: tracer.trace(owner, concrete))
    form = form_of_output(graph)
    if form is not None:
        (output,) = graph.find_nodes(op="output")  # lists come flat; what is returned keeps its form
        output.args = (tree_unflatten(output.args[0], form),)
    graph.set_codegen(fx.graph.CodeGen())
    if tracer.asked and all(length < 0 for length in signature):
        raise AsksForTypes("its forward asks for the type of what it is given")
    if tracer.asked:
        raise Untraceable("its forward asks for the type of what it computes")
    return graph, tracer.inlined


def tensors_only(owner: nn.Module) -> Signature | None:
    """The signature of a call with tensors alone; None where a forward takes any number of arguments."""
    try:
        return (-1,) * len(_required(owner)[0])
    except Untraceable:
        return None


def runs_twice(module: nn.Module) -> bool:
    """Can this module be given a tensor twice, and return its result twice?"""
    forward = vars(module).get("forward")
    if not isinstance(forward, TracedForward) or is_touched(module):
        return False
    rewritten = forward.learn((-1,))
    return rewritten is not None and rewritten.twice


def run_twice(module: nn.Module, x: torch.Tensor, again: torch.Tensor | None = None) -> Any:
    """Call a module that `runs_twice`, or that did before it was wrapped or compiled."""
    forward = vars(module).get("forward")
    if not isinstance(forward, TracedForward) or is_compiled(module):
        return (module(x),) * 2
    return forward.twice(x, again)


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that alone reads this one's result."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_free(node: fx.Node, root: nn.Module) -> bool:
    """Does a node call a function, or a module that is not touched?"""
    module = called_module(node, root)
    return module is None or not is_touched(module)


def target_of(node: fx.Node, root: nn.Module) -> Any:
    """What a node calls: a module's class, a function, or a method's name."""
    module = called_module(node, root)
    return node.target if module is None else type(module)


def called_module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a node calls."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def signature_of(arguments: tuple[Any, ...]) -> Signature | None:
    """What a trace has to know of arguments; None where one is neither a tensor nor a list of some."""
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
    """Has anybody but Vivace's traces replaced a module's forward, or hooked it?"""
    replaced = vars(module).get("forward")
    hooked = has_hooks(module)
    return hooked or not (replaced is None or isinstance(replaced, Replacement))


class InPlace(Replacement):
    """A forward in the place of a module's own; a deep copy of the module takes a copy that is its own."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], settings: tuple[Any, ...]) -> None:
        self.module, self.function, self.settings = module, function, settings
        self.own = module.forward

    def __call__(self, *arguments: object, **named: object) -> Any:
        """What ``function(module, own forward, *settings, *arguments)`` returns."""
        return self.function(self.module, self.own, *self.settings, *arguments, **named)


def put_in_place(
    modules: Sequence[nn.Module], function: Callable[..., Any], *settings: object
) -> Callable[[], None]:
    """Let ``function(module, own forward, *settings, *arguments)`` be each module's forward; returns what
    undoes it.
    """
    forwards = [InPlace(module, function, settings) for module in modules]
    give_back = placed(modules, "forward", forwards)

    def undo() -> None:
        give_back()
        for own in forwards:  # of another session, which came later and stays, one may be the own
            above = vars(own.module).get("forward")
            while isinstance(above, Replacement):
                if above.own is own:
                    above.own = own.own
                above = above.own

    return undo


class _Proxy(fx.Proxy):
    """Notices when a person's code asks for its type: the answer would not be the one of a run."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking != __name__ and asking.partition(".")[0] != "torch":
            self.tracer.asked = True  # type: ignore[attr-defined]
        return _Proxy

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):  # such as ``weight.data = ...``, which no trace holds
            raise Untraceable("its forward sets an attribute of a tensor")
        super().__setattr__(name, value)


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def record(self: _Proxy, other: object) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in ("iadd", "isub", "imul", "itruediv", "iand", "ior"):  # fx would trace them out of place
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # what a forward does to its buffers is recorded, not done

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.inlined: list[nn.Module] = []
        self.modes = _modes()

    def create_node(
        self,
        kind: str,
        target: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        if _modes() != self.modes:
            raise Untraceable("a part of its forward has gradients or autocast switched otherwise")
        return super().create_node(kind, target, args, kwargs, name, type_expr)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward
        if not plain or len(args) != 1 or kwargs or is_touched(m):
            return super().call_module(m, forward, args, kwargs)
        assert isinstance(m, nn.Sequential)
        self.inlined.append(m)
        value = args[0]
        for child in m:
            value = child(value)
        return value

    def create_arg(self, a: object) -> Any:
        if isinstance(a, torch.Tensor):
            held = (*self.root.parameters(), *self.root.buffers())
            if not any(a is tensor for tensor in held):
                raise Untraceable("its forward makes a tensor of its own")
        return super().create_arg(a)


def _modes() -> tuple[Any, ...]:
    """What decides on gradients and precision, and stands in no trace."""
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts)


@contextlib.contextmanager
def _without_own_functions() -> Iterator[None]:
    """Inside, an autograd.Function that is given no numbers says so: its backward would not be recorded."""
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, /, *arguments: object, **named: object) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((arguments, named))):
            raise Untraceable("its forward has an autograd.Function, whose backward pass is its own")
        return own.__get__(None, cls)(*arguments, **named)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own


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
            concrete[name] = [fx.PH] * length  # type: ignore[attr-defined]
    return concrete or None


class _NoWrites(OperatorMode):  # type: ignore[misc]
    """Inside, no operator writes to a tensor that was made outside: one that would raises Untraceable.

    What a forward does with tensors that it is not given, such as weights of a part, fx runs, and does not
    record.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted = False  # even if the person's code catches the exception
        self.made: set[int] = set()  # storages
        self.alive: list[torch.Tensor] = []  # so that each keeps its own

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator, unless it would write."""
        expected = schema_of(function).arguments
        given = dict(zip((one.name for one in expected), arguments, strict=False)) | keywords
        written = [given.get(a.name) for a in expected if a.alias_info is not None and a.alias_info.is_write]
        if storage_ids(tensors(written)) - self.made:
            self.wanted = True
            raise Untraceable("its forward writes to a tensor that it is not given")
        result = function(*arguments, **keywords)
        self.alive += (found := list(tensors(result)))
        self.made |= storage_ids(found) - storage_ids(tensors((arguments, keywords)))
        return result


class _Kept:
    """What a forward may change of a module, of its parts, and of what its code reaches, as it is now."""

    def __init__(self, owner: nn.Module) -> None:
        spaces = [vars(part) for part in owner.modules()]
        self.spaces = [(space, dict(space)) for space in spaces]
        values = [value for space in spaces for value in space.values()]
        self.contents = [(v, v.copy()) for v in values if type(v) in (list, dict)]  # parameters, too
        kept = [v for space in spaces for k, v in space.items() if k not in OF_MODULES]
        held = [*owner.parameters(), *owner.buffers(), *(v for v in kept if isinstance(v, torch.Tensor))]
        self.data = [(tensor, tensor.data) for tensor in held if not is_lazy(tensor)]
        self.outside: Outside | None = None
        if not any(map(is_fake, held)):  # which have no numbers
            with outside_modes():
                self.outside = Outside(kept, [owner])

    def put_back(self) -> bool:
        """Let all be as it was; was it otherwise?"""
        others = [(space, then) for space, then in self.spaces if not _same(space, then)]
        contents = [(items, then) for items, then in self.contents if not _same(items, then)]
        moved = [pair for pair in self.data if storage_ids(pair[:1]) != storage_ids(pair[1:])]
        for items, then in (*others, *contents):
            items.clear()
            getattr(items, "update" if isinstance(items, dict) else "extend")(then)
        for tensor, then in moved:
            tensor.data = then
        with outside_modes():
            outside = self.outside is not None and (self.outside.moved() or self.outside.drew())
            if self.outside is not None and outside:
                self.outside.put_back()
        return bool(others or contents or moved or outside)


def _without_traces(owner: nn.Module, trace: Callable[[], fx.Graph]) -> fx.Graph:
    """A trace that drew no random numbers and changed nothing else either; all is put back."""
    streams = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    kept, writes = _Kept(owner), _NoWrites()
    try:
        with warnings.catch_warnings(), _without_own_functions(), writes:
            warnings.simplefilter("ignore")
            graph = trace()
    except Untraceable:
        raise
    except Exception as error:  # a person's code, on values without numbers
        raise Untraceable(f"torch.fx cannot follow its forward: {error}") from error
    finally:
        with outside_modes():  # such as one of fake tensors, which have no numbers
            drew = not torch.equal(torch.get_rng_state(), streams[0]) or random.getstate() != streams[1]
        drew = drew or any(
            numpy.any(a != b) for a, b in zip(numpy.random.get_state(), streams[2], strict=True)
        )
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        numpy.random.set_state(streams[2])
        changed = kept.put_back()
    if drew:
        raise Untraceable("its forward draws random numbers")
    if changed or writes.wanted:
        raise Untraceable("its forward changes something that stays")
    return graph


def _same(one: list[Any] | dict[str, Any], other: list[Any] | dict[str, Any]) -> bool:
    mine, theirs = ([*v.keys(), *v.values()] if isinstance(v, dict) else v for v in (one, other))
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))
