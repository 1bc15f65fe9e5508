"""The blocks of a model: the repeated parts of its module tree, for which memory is decided one by one.

A technique claims blocks by name patterns and is called in place of each; no two can claim the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vivace.errors import Refused, forbids_hooks, hides_memory
from vivace.job import Batch
from vivace.technique import Build, Seam
from vivace.tensors.modules import Lent, patched
from vivace.torch_internals.modules import all_hooks, forward_hooks, own_tensors
from vivace.torch_internals.tensors import in_transform

FEW = 6  # fewer blocks than this are cut into the repeated parts inside of them

Around = Callable[["Block", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """One module that others of its class stand beside, or a run of consecutive ones of a plain Sequential.

    `kind` is equal for blocks that are built alike; `whole` is the Sequential of which it is a run.
    """

    name: str
    kind: str
    modules: tuple[nn.Module, ...]
    whole: nn.Sequential | None = None

    def tree(self) -> list[nn.Module]:
        """All modules of the block, inner ones too."""
        return [inner for module in self.modules for inner in module.modules()]


def find_blocks(models: Sequence[nn.Module]) -> list[Block]:
    """The blocks of all models, in the order of their module trees; disjoint, and never a whole model.

    The outermost repeated modules, unless these are fewer than `FEW` and have repeated modules inside, or one
    of them holds modules such as another is. Where nothing is repeated: the longest plain Sequential, cut
    into about the square root of its length.
    """
    found: list[Block] = []
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        found += repeated_blocks(model, prefix) or _runs(model, prefix)
    inside = {  # of a block that stands in a list of its own, too
        id(inner)
        for block in found
        for module in block.modules
        for inner in module.modules()
        if inner is not module
    }
    once = {id(block.modules[0]): block for block in reversed(found)}
    return [block for first, block in once.items() if first not in inside][::-1]


def blocks_of(build: Build) -> list[Block]:
    """The blocks of a build's models, as they were when it was first asked: what shards a block gives it
    another class.
    """
    if build not in _BLOCKS:
        _BLOCKS[build] = find_blocks(build.models)
        build.on_close(partial(_forget, build))
    return _BLOCKS[build]


def repeated_blocks(model: nn.Module, prefix: str = "") -> list[Block]:
    """The blocks of one model that are repeated modules, one module each; none where it has no such parts."""
    level = _evened(_repeated(model, prefix, _kinds(model)))
    while 0 < len(level) < FEW:
        inner = [
            b
            for name, module in level
            for b in _repeated(module, f"{name}.", _kinds(module)) or [(name, module)]
        ]
        if len(inner) <= len(level):
            break
        level = inner
    return [Block(name, _kind((module,)), (module,)) for name, module in level]


def claim(build: Build, patterns: Sequence[str], technique: str, around: Around) -> list[Block]:
    """Let ``around(block, call, arguments, keywords)`` stand in for the blocks whose names match `patterns`.

    `call` is what the block does itself. Acts while the forward seam, or an own step, runs. Raises Refused
    where a pattern matches no block, or another technique has the block already.
    """
    if build not in _CALLS:
        _CALLS[build] = _Calls(build)
    return _CALLS[build].claim(build, patterns, technique, around)


def _forget(build: Build) -> None:
    """What blocks are given may hold the build, which then would never go."""
    _CALLS.pop(build, None)
    _BLOCKS.pop(build, None)


def running_batch(build: Build) -> Any:
    """The batch of the forward pass or own step that runs now; it stays alive whatever a block keeps."""
    return _CALLS[build].batch if build in _CALLS else None


class _Calls:
    """The blocks of one build, and what stands in for each."""

    def __init__(self, build: Build) -> None:
        self.blocks = blocks_of(build)
        self.owners: dict[str, str] = {}
        self.batch: Any = None
        self.modules: list[nn.Module] = []
        self.forwards: list[Callable[..., Any]] = []
        build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, self._run)

    def claim(self, build: Build, patterns: Sequence[str], technique: str, around: Around) -> list[Block]:
        build.require(self.blocks, "no part of the model is repeated, and no nn.Sequential can be cut")
        names = [block.name for block in self.blocks]
        for pattern in patterns:
            hint = ", ".join(names[:4])
            build.require(fnmatch.filter(names, pattern), f"no block is called '{pattern}'; there are {hint}")
        chosen = [b for b in self.blocks if any(fnmatch.fnmatchcase(b.name, p) for p in patterns)]
        for block in chosen:
            owner = self.owners.setdefault(block.name, technique)
            build.require(owner == technique, f"'{owner}' already decides on the block '{block.name}'")
            self.modules += block.modules
            self.forwards += forwards(block, around)
        return chosen

    def _run(self, following: Callable[[Any], Any], batch: Batch) -> Any:
        self.batch = batch
        try:
            with patched(self.modules, "forward", self.forwards):
                return following(batch)
        finally:
            self.batch = None


_CALLS: weakref.WeakKeyDictionary[Build, _Calls] = weakref.WeakKeyDictionary()
_BLOCKS: weakref.WeakKeyDictionary[Build, list[Block]] = weakref.WeakKeyDictionary()


def forwards(block: Block, around: Around) -> list[Callable[..., Any]]:
    """What the modules do instead: the first runs the whole block, the others hand on what they are given."""
    if block.whole is not None:
        return _Run(block, block.whole, around).forwards()
    own = block.modules[0].forward

    def forward(*arguments: object, **keywords: object) -> Any:
        return around(block, own, arguments, keywords)

    return [Lent(block.modules[0], forward)]


class _Run:
    """A run of a Sequential's modules, for as long as it is the Sequential that calls them.

    A loop of the person's over them, a part that is cut out, and a hook would see the block's result where
    they ask for what comes between: Refused is raised, and without gradients each module does its own.
    """

    def __init__(self, block: Block, whole: nn.Sequential, around: Around) -> None:
        self.block, self.whole, self.around = block, whole, around
        self.own = [module.forward for module in block.modules]
        self.next = 0  # of the modules, to which `result` is handed on
        self.result: Any = None

    def forwards(self) -> list[Callable[..., Any]]:
        """What the modules do instead."""

        def later(number: int) -> Callable[..., Any]:
            return lambda *arguments, **keywords: self.later(number, arguments, keywords)

        functions = [self.first, *map(later, range(1, len(self.own)))]
        return [Lent(one, function) for one, function in zip(self.block.modules, functions, strict=True)]

    def call(self, *arguments: object, **keywords: object) -> Any:
        """What the modules do, one after the other."""
        result = self.own[0](*arguments, **keywords)
        for function in self.own[1:]:
            result = function(result)
        return result

    def first(self, *arguments: object, **keywords: object) -> Any:
        """The whole block."""
        if torch.compiler.is_compiling():
            return self.around(self.block, self.call, arguments, keywords)
        hooked = next(filter(_is_hooked, self.block.modules), None)
        if hooked is not None:
            return self._alone(0, arguments, keywords, f"the {type(hooked).__name__} in it has a hook")
        if not _calls(self.whole):
            return self._alone(0, arguments, keywords)
        self.result = self.around(self.block, self.call, arguments, keywords)
        self.next = 1
        return self.result

    def later(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, object]) -> Any:
        """The block's result, which has been through this module."""
        if torch.compiler.is_compiling():
            return arguments[0]
        if self.next != number or len(arguments) != 1 or arguments[0] is not self.result:
            return self._alone(number, arguments, keywords)
        self.next = (number + 1) % len(self.own)
        if not self.next:
            self.result = None
        return arguments[0]

    def _alone(
        self,
        number: int,
        arguments: tuple[object, ...],
        keywords: dict[str, object],
        reason: str = "the model calls its modules by themselves, and not their nn.Sequential",
    ) -> Any:
        if torch.is_grad_enabled():
            raise Refused(f"'{self.block.name}' cannot be one block: {reason}")
        return self.own[number](*arguments, **keywords)


def _calls(whole: nn.Sequential) -> bool:
    """Is it this Sequential that calls the module whose forward asks?"""
    frame, between = sys._getframe(2), (nn.Module.__module__, Lent.__module__)
    while frame.f_globals.get("__name__") in between and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is nn.Sequential.forward.__code__ and frame.f_locals.get("self") is whole


def _repeated(root: nn.Module, prefix: str, kinds: Counter[Any]) -> list[tuple[str, nn.Module]]:
    """The outermost modules below `root` that have children and of whose class `kinds` counts several."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in root.named_children():
        if kinds[_class(child)] > 1:
            found.append((f"{prefix}{name}", child))
        else:
            found += _repeated(child, f"{prefix}{name}.", kinds)
    return found


def _evened(level: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Plain Sequentials that hold modules of another block's class give way to these: one stage of a ResNet
    may look like another, whose neighbours were cut.
    """
    kinds = Counter(_class(module) for _, module in level)
    even = []
    for name, module in level:
        inner = _repeated(module, f"{name}.", kinds + kinds) if type(module) is nn.Sequential else []
        even += inner or [(name, module)]
    return even


def _kinds(root: nn.Module) -> Counter[Any]:
    """How often each class of composed modules stands below `root`; not those that hold their own kind."""
    composed = [module for module in root.modules() if module is not root and _is_composed(module)]
    nested = {
        _class(module)
        for module in composed
        if any(inner is not module and _class(inner) == _class(module) for inner in module.modules())
    }
    return Counter(kind for kind in map(_class, composed) if kind not in nested)


def _is_composed(module: nn.Module) -> bool:
    lists = (nn.ModuleList, nn.ModuleDict)
    return not isinstance(module, lists) and any(True for _ in module.children())


def _class(module: nn.Module) -> Any:
    """A module's class; plain Sequentials are alike where their modules' classes are."""
    return (nn.Sequential, *map(type, module)) if type(module) is nn.Sequential else type(module)


def _runs(model: nn.Module, prefix: str) -> list[Block]:
    """Runs of the longest plain Sequential whose modules stand in it alone and once; one that somebody has
    hooked is a run by itself, around which the hook stands.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    plain = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Sequential and all(uses[id(m)] == 1 for m in module)
    ]
    name, longest = max(plain, key=lambda item: len(item[1]), default=("", nn.Sequential()))
    if len(longest) < 2:
        return []
    parts: list[list[nn.Module]] = []
    size = math.ceil(len(longest) / math.ceil(math.sqrt(len(longest))))
    for module in longest:
        if parts and len(parts[-1]) < size and not any(map(_is_hooked, (module, parts[-1][-1]))):
            parts[-1].append(module)
        else:
            parts.append([module])
    found, start = list[Block](), 0
    for part in parts:
        where = f"{prefix}{name}{'.' if name else ''}{start}-{start + len(part) - 1}"
        found.append(Block(where, _kind(tuple(part)), tuple(part), longest if len(part) > 1 else None))
        start += len(part)
    return found


def _is_hooked(module: nn.Module) -> bool:
    """Does a hook of the person's stand around this module? Others gather its weights from other ranks."""
    homes = [getattr(hook, "__module__", None) or "" for hook in all_hooks(module)]
    return not all(home.startswith(("torch.distributed.fsdp", "vivace.")) for home in homes)


def _kind(modules: tuple[nn.Module, ...]) -> str:
    shapes = [(type(m).__qualname__, [tuple(p.shape) for p in m.parameters()]) for m in modules]
    return repr(shapes)


def held(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The ``(parameters, buffers)`` that each module holds now, for `holding`."""
    return [(dict(parameters), dict(buffers)) for parameters, buffers in map(own_tensors, modules)]


def foreign_hook(block: Block) -> str:
    """Which forward hook of a person's stands inside of a block; empty where there is none.

    Those of a block that is one module stand around what the block does.
    """
    for module in block.tree():
        if (module,) == block.modules:
            continue
        if any(not type(hook).__module__.startswith("torch.nn.utils") for hook in forward_hooks(module)):
            return f"the {type(module).__name__} inside of '{block.name}' has a forward hook"
    return ""


@contextlib.contextmanager
def without_transforms(technique: str) -> Iterator[None]:
    """Raise Refused where what runs inside meets a transform of torch.func, such as vmap or jacrev.

    They forbid hooks of saved tensors, or hide the memory of tensors.
    """
    reason = "the job uses a transform of torch.func, such as vmap or jacrev, under which it cannot act"
    refused = Refused(f"{reason}: leave it out of the plan").by(technique)
    if not torch.compiler.is_compiling() and in_transform():
        raise refused
    try:
        yield
    except RuntimeError as error:
        frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
        own = str(frame.f_globals.get("__name__")).startswith("vivace.")
        if forbids_hooks(error) or (hides_memory(error) and own):
            raise refused from error
        raise


def is_fake(tensor: torch.Tensor) -> bool:
    """Has this tensor no numbers, because memory is being predicted?"""
    return type(tensor).__name__ == "FakeTensor"
