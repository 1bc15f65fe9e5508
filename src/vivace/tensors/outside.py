"""What a training keeps in Python, outside of its weights and buffers: counters, temperatures, running means.

A repeated step must begin with what the real one began with, and leave the person's own as the real one left
it. Looked at are the variables that the person's functions hold or name, the objects and small containers in
them, and attributes of modules. What cannot be copied (a generator, an open file) is not looked at.
"""

from __future__ import annotations

import builtins
import copy
import csv
import dis
import io
import random
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vivace.torch_internals.modules import is_compiled, is_compiled_function
from vivace.torch_internals.tensors import dense_parts, storage_ids

MOST_ENTRIES = 1000  # of a container that is looked into
MOST_NUMBERS = 2**18  # of a tensor, an array or a list
MOST_LOOKED_AT = 2000  # objects
MOST_OBJECTS = 100  # of a model's modules
MOST_DEPTH = 100  # of containers in containers
TRACE = 2**14  # numbers, by which it is seen that a larger tensor has changed
_UNKNOWN = object()  # whether it has changed
PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic)
_OF_MODULES = frozenset(vars(nn.Module()))  # weights, buffers, parts, hooks and the mode
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults", *torch.optim.Optimizer.__annotations__})
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, Counter, deque, set)
_STREAMS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_NOT_STATE = (nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)
_ONE_WAY = (Iterator, csv.DictWriter, type(csv.writer(io.StringIO())))
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sys.stdlib_module_names - {"__main__"}
INSTALLED = ("site-packages", "dist-packages")  # folders, also a user's own and a distribution's
Attributes = dict[tuple[int, str, str], Any]
Owners = Sequence[nn.Module | torch.optim.Optimizer]


class Outside:
    """The Python state that functions of a person's and the code of `models` reach, as it is now; `put_back`
    lets it be so again.

    Copies of tensors are kept on the device `store`, or else where each tensor is.
    """

    def __init__(
        self, functions: Iterable[object], models: Iterable[nn.Module], store: str | None = None
    ) -> None:
        models, self._store = list(models), store
        self._seen: set[int] = set()
        self._cells: list[tuple[Any, Any]] = []
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []  # some names of each
        self._objects: list[tuple[dict[str, Any], frozenset[str]]] = []  # all names of each
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._streams: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._classes: list[tuple[type, str, Any]] = []
        self._slots: list[tuple[object, str, Any]] = []
        self.files: list[Any] = []  # that are open, or were
        self.one_way: list[Any] = []  # iterators and writers, which nothing puts back
        self.compiled = False  # by the person: a function, or a module that is no part of the models?
        self.large: list[torch.Tensor] = []  # that are not put back
        self.shares = False  # a tensor the memory of the models' own, which is not this one's to put back?
        self._storages = _storages_of(models)
        parts = [module for model in models for module in model.modules()]
        self._parts = set(map(id, parts))
        self._look_at_all(functions)
        for kind in {type(module): None for module in parts}:
            self._look_at_class(kind)
        held = chain.from_iterable(vars(module).values() for module in parts)
        self.one_way += [value for value in held if isinstance(value, _ONE_WAY) and not is_persons(value)]

    def put_back(self) -> None:
        """Let all be as it was when this was made. What cannot be written leaves the rest put back, and is
        raised after it.
        """
        for cell, value in self._cells:
            cell.cell_contents = value
        for space, values in self._spaces:
            space.update(values)
        for space, names in self._objects:
            for name in space.keys() - names:
                del space[name]
        waiting = [partial(_refill, *pair) for pair in self._containers]
        waiting += [partial(set_state, state) for _, set_state, state in self._streams]
        waiting += [partial(_rewrite, *pair) for pair in self._tensors]
        waiting += [partial(_rewrite_array, *pair) for pair in self._arrays]
        for kind, name, value in self._classes:
            if vars(kind).get(name) is not value:
                waiting.append(partial(setattr, kind, name, value))
        for owner, name, value in self._slots:
            if getattr(owner, name, None) is not value:  # also of one that says it is frozen
                waiting.append(partial(object.__setattr__, owner, name, value))
        failed: list[Exception] = []
        for write in waiting:
            try:
                write()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def moved(self) -> bool:
        """Has any of it, beside random streams, another value than when this was made?"""
        pairs: list[tuple[Any, Any]] = [(cell.cell_contents, value) for cell, value in self._cells]
        pairs += [(space.get(name), value) for space, then in self._spaces for name, value in then.items()]
        pairs += [(vars(kind).get(name), value) for kind, name, value in self._classes]
        pairs += [(getattr(owner, name, None), value) for owner, name, value in self._slots]
        pairs += [*((_plain_copy(container), then) for container, then in self._containers), *self._arrays]
        more = any(space.keys() - names for space, names in self._objects)
        more = more or not all(_same(*pair) for pair in self._tensors)
        return more or not all(alike(*pair) for pair in pairs)

    def drew(self) -> bool:
        """Has any generator of random numbers moved since this was made?"""
        return not all(alike(state(), then) for state, _, then in self._streams)

    def _look(self, value: object) -> None:
        if isinstance(value, nn.Module):
            self._look_at_module(value)
        if isinstance(value, (*PLAIN, *_NOT_STATE, types.ModuleType)) or id(value) in self._seen:
            return
        if len(self._seen) >= MOST_LOOKED_AT:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Generator):
            self._streams.append((value.get_state, value.set_state, value.get_state()))
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            self._streams.append((value.getstate, value.setstate, value.getstate()))
        elif isinstance(value, numpy.random.RandomState):
            self._streams.append((value.get_state, value.set_state, value.get_state()))
        elif isinstance(value, numpy.random.Generator):
            stream: Any = value.bit_generator
            self._streams.append((lambda: stream.state, partial(setattr, stream, "state"), stream.state))
        else:
            self._look_inside(value)

    def _look_inside(self, value: object) -> None:
        if isinstance(value, numpy.ndarray):
            if value.size <= MOST_NUMBERS and value.flags.writeable:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self._look_at_tensor(value)
        elif isinstance(value, partial):
            self._look_at_all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._look_at_all((value.__self__, value.__func__))
        elif isinstance(value, types.BuiltinMethodType):
            self._look(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif isinstance(value, (dict, list, set, deque)):
            if _is_of_modules(value):
                return
            if len(value) <= MOST_NUMBERS and (type(value) in _CONTAINERS or is_persons(value)):
                self._containers.append((value, _plain_copy(value)))
            if len(value) <= MOST_ENTRIES:
                self._look_at_all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._look_at_all(value)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, io.IOBase):
            self.files.append(value)
        elif isinstance(value, _ONE_WAY) and not is_persons(value):
            self.one_way.append(value)
        elif is_persons(value):
            space = _space_of(value)
            self._spaces.append((space, dict(space)))
            self._objects.append((space, frozenset(space)))
            self._look_at_all(space.values())
            self._look_at_slots(value)
            self._look(vars(type(value)).get("__call__"))

    def _look_at_all(self, values: Iterable[object]) -> None:
        for value in list(values)[:MOST_ENTRIES]:
            self._look(value)

    def _look_at_tensor(self, tensor: torch.Tensor) -> None:
        if not is_storable(tensor):
            return
        if _storages(tensor) & self._storages:
            self.shares = True
        elif _num_stored(tensor) <= MOST_NUMBERS:
            then = tensor.detach().to(self._store or tensor.device, copy=True)
            self._tensors.append((tensor, then))
        else:
            self.large.append(tensor)

    def _look_at_module(self, module: nn.Module) -> None:
        """What changes of one that is no part of the models, such as a teacher's weights, which follow the
        model's, and its statistics.
        """
        for part in module.modules():
            if id(part) not in self._parts and len(self._seen) < MOST_LOOKED_AT:
                self._parts.add(id(part))
                self._seen.add(id(part))
                self.compiled |= is_compiled(part)
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    self._look_at_tensor(tensor)
                own = vars(part)
                plain = {k: v for k, v in own.items() if isinstance(v, PLAIN) and not k.startswith("_")}
                self._spaces.append((own, plain))

    def _look_at_class(self, kind: type) -> None:
        """What a class of the person's holds for all of its kind, and what its methods reach."""
        for base in (base for base in kind.__mro__ if not of_library(base.__module__)):
            for name, value in vars(base).items():
                if name.startswith("__") and name != "__call__":
                    continue
                if isinstance(value, (*PLAIN, torch.Tensor)):
                    self._classes.append((base, name, value))
                self._look(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)

    def _look_at_function(self, function: types.FunctionType) -> None:
        if of_library(function.__module__ or ""):
            return
        self.compiled |= is_compiled_function(function)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self._cells.append((cell, value))
            self._look(value)
        self._look_at_names(function.__globals__, set(names_of(function.__code__)), set())
        self._look_at_all((function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function)))

    def _look_at_names(self, space: dict[str, Any], names: set[str], seen: set[int]) -> None:
        """What a function finds by these names in its own module, and in others of the person's."""
        seen.add(id(space))
        found = {name: space[name] for name in names if name in space}
        plain = {k: v for k, v in found.items() if isinstance(v, (*PLAIN, torch.Tensor))}
        self._spaces.append((space, plain))
        self._look_at_all(found.values())
        for value in found.values():
            own = isinstance(value, types.ModuleType) and not of_library(value.__name__)
            if own and id(vars(value)) not in seen:
                self._look_at_names(vars(value), names, seen)

    def _look_at_slots(self, value: object) -> None:
        """Attributes of an object whose class names them all."""
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__weakref__", "__dict__") and hasattr(value, name):
                    self._slots.append((value, name, getattr(value, name)))
                    self._look(getattr(value, name))


def alike(now: object, then: object, above: tuple[tuple[int, int], ...] = ()) -> bool:
    """Are two values, or what two containers hold, the same? Of what cannot be compared: one thing.

    `above` are the containers that they are in.
    """
    pair = id(now), id(then)
    if now is then or pair in above:
        return True
    if type(now) is not type(then) or len(above) > MOST_DEPTH:
        return False
    inner = partial(alike, above=(*above, pair))
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
        return _same(now, then)
    if isinstance(now, dict) and isinstance(then, dict):
        return list(now) == list(then) and all(map(inner, now.values(), then.values()))
    if isinstance(now, (list, deque, tuple)) and isinstance(then, (list, deque, tuple)):
        return len(now) == len(then) and all(map(inner, now, then))
    if isinstance(now, numpy.ndarray) and isinstance(then, numpy.ndarray):
        return (now.dtype, now.shape) == (then.dtype, then.shape) and now.tobytes() == then.tobytes()
    return isinstance(now, (*PLAIN, set)) and bool(now == then)


def _same(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Are two tensors, of whatever layout and wherever they are, of one kind and equal?"""
    if not (is_storable(now) and is_storable(then)):
        return now is then
    if (now.layout, now.dtype, now.shape) != (then.layout, then.dtype, then.shape):
        return False
    pairs = list(zip(dense_parts(now.detach()), dense_parts(then.detach()), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return False
    bits = [(_bits(a), _bits(b.to(a.device))) for a, b in pairs]  # of which a number that is none is itself
    return all(torch.equal(*pair) for pair in bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _rewrite(tensor: torch.Tensor, then: torch.Tensor) -> None:
    if not _same(tensor, then):
        with torch.no_grad():
            tensor.copy_(then)


def _rewrite_array(array: numpy.typing.NDArray[Any], then: numpy.typing.NDArray[Any]) -> None:
    if array.tobytes() != then.tobytes():  # which may be a file
        array[...] = then


def as_it_is(thing: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """A copy of what may be changed later: containers, at every depth, arrays, and generators of random
    numbers.
    """
    if isinstance(thing, torch.Tensor):
        return of_tensor(thing)
    if isinstance(thing, torch.Generator):
        return thing.clone_state()
    if isinstance(thing, _STREAMS) and not isinstance(thing, random.SystemRandom):
        return copy.deepcopy(thing)
    if type(thing) is numpy.ndarray:
        return thing.copy() if thing.size <= MOST_NUMBERS else thing
    if type(thing) not in _CONTAINERS or len(thing) > MOST_ENTRIES:
        return thing
    if isinstance(thing, set):
        return set(thing)
    if isinstance(thing, dict):
        found = copy.copy(thing)  # with what makes the missing entries of a defaultdict
        for name, value in thing.items():
            found[name] = as_it_is(value, of_tensor)
        return found
    parts = (as_it_is(value, of_tensor) for value in thing)
    return deque(parts, thing.maxlen) if isinstance(thing, deque) else type(thing)(parts)


def attributes(owners: Owners) -> Attributes:
    """Numbers, texts, tensors, and containers of such that modules, and objects of the person's in them, keep
    beside weights and buffers, by model, module and name: ``count``, or ``state.count`` of an object. Of an
    optimizer, in the place of a model, what it keeps beside its state and groups.
    """
    found: Attributes = {}
    own = _storages_of(owner for owner in owners if isinstance(owner, nn.Module))
    for (index, name, path), (space, keys) in _spaces(owners).items():
        for key in keys:
            value = space[key]
            if isinstance(value, PLAIN) or _is_plain(value, own):
                found[index, name, path + key] = as_it_is(value, lambda tensor: tensor.detach().clone())
    return found


def traces(owners: Owners) -> Attributes:
    """Of what `attributes` leaves out, as it is too large or a generator: some of its numbers, by which it is
    seen that it has changed. Of a person's own classes alone: others may keep what they make anew whenever
    they need it.
    """
    found: Attributes = {}
    own = _storages_of(owner for owner in owners if isinstance(owner, nn.Module))
    for (index, name, path), (space, keys) in _spaces(owners).items():
        owner = owners[index]
        part = owner.get_submodule(name) if isinstance(owner, nn.Module) else owner
        for key in keys if path or is_persons(part) else ():
            value = space[key]
            if not (isinstance(value, PLAIN) or _is_plain(value, own)):
                leaves = islice(_leaves(value), MOST_ENTRIES)
                size = len(value) if type(value) in _CONTAINERS else 1
                traced = [_trace(leaf, own) for leaf in leaves]
                if all(one is not _UNKNOWN for one in traced):
                    found[index, name, path + key] = [size, *traced]
    return found


def _trace(leaf: Any, own: set[int]) -> Any:
    """What tells that a part of an attribute has changed; `_UNKNOWN` where nothing does. What has a gradient
    is of one step.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.requires_grad or not is_storable(leaf) or _storages(leaf) & own:
            return _UNKNOWN
        parts = (part.detach().reshape(-1) for part in dense_parts(leaf))
        return [part[:: 1 + part.numel() // TRACE].to("cpu", copy=True) for part in parts]
    if isinstance(leaf, numpy.ndarray):
        return leaf.flat[:: 1 + leaf.size // TRACE]  # a copy
    if isinstance(leaf, (torch.Generator, numpy.random.RandomState)):
        return leaf.get_state()
    if isinstance(leaf, random.Random) and not isinstance(leaf, random.SystemRandom):
        return leaf.getstate()
    if isinstance(leaf, numpy.random.Generator):
        return leaf.bit_generator.state
    return leaf if isinstance(leaf, PLAIN) else _UNKNOWN


def changed(now: Attributes, before: Attributes) -> Iterator[tuple[int, str, str]]:
    """The model, module and name of each attribute that is not what it was, or is new or gone."""
    return (key for key in now.keys() | before.keys() if not alike(now.get(key), before.get(key)))


def assign(owners: Owners, values: Attributes) -> None:
    """Give the modules of these models, these optimizers, and the objects in them, copies of these values."""
    spaces = _spaces(owners)
    for (index, name, path), value in values.items():
        inside, _, key = path.rpartition(".")
        place = (index, name, inside and f"{inside}.")
        if place not in spaces:
            continue
        space, given = spaces[place][0], as_it_is(value, torch.clone)
        now: Any = space.get(key)
        if isinstance(given, (list, dict, set, deque)) and type(now) is type(given):
            _refill(now, given)  # several modules may share it
        else:
            space[key] = given


def _spaces(owners: Owners) -> dict[tuple[int, str, str], tuple[dict[str, Any], list[str]]]:
    """The ``__dict__`` of each module or optimizer, and of the objects of the person's in it, with the names
    that are not torch's or a library's own, by model, module and the path from there.
    """
    found: dict[tuple[int, str, str], tuple[dict[str, Any], list[str]]] = {}
    seen, no_objects = set[int](), (*PLAIN, *_NOT_STATE, *_CONTAINERS, torch.Tensor)

    def look(index: int, name: str, path: str, thing: object) -> None:
        space, own = _space_of(thing), is_persons(thing)
        keys = [k for k, v in space.items() if own or not k.startswith("_") or isinstance(v, torch.Tensor)]
        left_out = _OF_OPTIMIZERS if isinstance(thing, torch.optim.Optimizer) else _OF_MODULES
        keys = [key for key in keys if key not in left_out]
        found[index, name, path] = space, keys
        for key in keys:
            value = space[key]
            known = isinstance(value, no_objects) or id(value) in seen or len(seen) >= MOST_OBJECTS
            if not known and is_persons(value):
                seen.add(id(value))
                look(index, name, f"{path}{key}.", value)

    for index, owner in enumerate(owners):
        if isinstance(owner, torch.optim.Optimizer) and not is_persons(owner):
            continue  # a library's may say by them what it has made, and would not make it again
        for name, part in owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]:
            look(index, name, "", part)
    return found


def _is_plain(value: object, own: set[int]) -> bool:
    """Does it consist of numbers, texts, arrays and tensors alone, not too many to be copied? Of a tensor in
    one of the model's `own` storages a copy would be another one.
    """

    def is_plain(leaf: object) -> bool:
        if isinstance(leaf, torch.Tensor):
            return is_storable(leaf) and _num_stored(leaf) <= MOST_NUMBERS and not _storages(leaf) & own
        if isinstance(leaf, numpy.ndarray):
            return leaf.size <= MOST_NUMBERS and leaf.dtype != object
        return isinstance(leaf, PLAIN)

    leaves = list(islice(_leaves(value), MOST_ENTRIES + 1))
    return len(leaves) <= MOST_ENTRIES and all(map(is_plain, leaves))


def _leaves(thing: object, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """What a container holds at every depth, with None for each container, so that empty ones count; one that
    is too deep, or in itself, as it is.
    """
    if type(thing) in _CONTAINERS and id(thing) not in above and len(above) < MOST_DEPTH:
        yield None
        for part in thing.values() if isinstance(thing, dict) else thing:  # type: ignore[attr-defined]
            yield from _leaves(part, (*above, id(thing)))
    else:
        yield thing


def is_storable(tensor: torch.Tensor) -> bool:
    """Has it numbers that can be copied, compared and written?"""
    kinds = tensor.is_quantized, tensor.is_meta, tensor.is_nested, tensor.is_inference()
    return not (is_lazy(tensor) or any(kinds))


def _storages_of(models: Iterable[nn.Module]) -> set[int]:
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()) if not is_lazy(t))
    return set().union(*map(_storages, tensors))


def _storages(tensor: torch.Tensor) -> set[int]:
    """Equal for tensors that share memory."""
    return storage_ids(dense_parts(tensor.detach()))


def _num_stored(tensor: torch.Tensor) -> int:
    """How many numbers it takes in memory, if sparse with their places."""
    return sum(part.numel() for part in dense_parts(tensor.detach()))


def _space_of(thing: object) -> dict[str, Any]:
    """Its attributes, where it keeps such."""
    space = getattr(thing, "__dict__", None)
    return space if isinstance(space, dict) else {}


def _is_of_modules(value: Collection[Any]) -> bool:
    """Are these the names of Python's own or of a library's module, which a script's names may hold?"""
    if value is sys.modules or type(value) is not dict:
        return value is sys.modules
    name = value.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and vars(module) is value and (module is builtins or of_library(str(name)))


def _base(container: object) -> Any:
    """What a container is below the person's own methods, which may do anything."""
    kinds = (OrderedDict, dict, list, set, deque)
    return next(kind for kind in kinds if isinstance(container, kind))


def _flat(container: Collection[Any]) -> Iterator[Any]:
    base = _base(container)
    return chain.from_iterable(base.items(container)) if "items" in vars(base) else base.__iter__(container)


def _plain_copy(container: Collection[Any]) -> Any:
    base = _base(container)
    return base(base.items(container)) if "items" in vars(base) else base(base.__iter__(container))


def _refill(container: Collection[Any], values: Collection[Any]) -> None:
    """Let it hold these; one that does is not touched, as other threads may read it."""
    base = _base(container)
    pairs = zip(_flat(container), _flat(values), strict=False)
    if base.__len__(container) == len(values) and all(now is then for now, then in pairs):
        return
    base.clear(container)
    if isinstance(values, dict):
        for key, value in values.items():
            base.__setitem__(container, key, value)
    elif isinstance(values, set):
        base.update(container, values)
    else:
        base.extend(container, values)


def names_of(code: types.CodeType) -> Iterator[str]:
    """All names that a function's code looks up, functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)


def globals_of(code: types.CodeType) -> Iterator[str]:
    """The names among them that are its file's variables."""
    yield from (
        one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from globals_of(constant)


def is_persons(thing: object) -> bool:
    """Is it an object of a person's own class, or of that which has nothing but the person's names?"""
    if isinstance(thing, type):  # a class, whatever its own class is
        return False
    return type(thing) is types.SimpleNamespace or not of_library(type(thing).__module__)


def own_streams() -> list[object]:
    """The generators of random numbers that modules of the person's hold by a name."""
    theirs = [module for name, module in list(sys.modules.items()) if not of_library(name)]
    spaces = [dict(getattr(module, "__dict__", {})) for module in theirs]  # any object may stand there
    return [value for space in spaces for value in space.values() if isinstance(value, _STREAMS)]


def of_library(module: str) -> bool:
    """Is what a module defines no code of the person's?"""
    top = module.partition(".")[0]
    if top in ("", "vivace") or top in _STANDARD:
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return file.startswith(_PACKAGES) or any(f"/{name}/" in file for name in INSTALLED)
