"""What training changes beside the `state_dict`s: a model's buffers that are not persistent, which of its
weights are trained, the modes of its modules, and attributes of modules and of optimizers, such as a counter
of steps or a running mean; and what a model and an optimizer that were built anew need before they take a
`state_dict`. A checkpoint holds them, and a resumed run goes on with them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import nn

from vivace.tensors.modules import named_parameters
from vivace.tensors.optimizers import inner_optimizers, unhanded
from vivace.tensors.outside import as_it_is, assign, attributes, changed, traces
from vivace.torch_internals.modules import EXTRA_STATE, loads_in_its_own_way, own_tensors
from vivace.torch_internals.tensors import version_of
from vivace.training.checkpoints import unstorable

_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, deque)}
_TABLES = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_MODE, _TRAINED = ":training", ":requires_grad"  # of a module, and behind a weight's name; no attribute's
_ROOM, _GROUPS = ":persistent", ":param_groups"  # behind a buffer's name, and of an optimizer

Key = tuple[int, str, str]  # model, module, name


class Beside:
    """Made before the first step of a process, of models as they were built.

    Args:
        models, optimizers: of the session.
        captured: replayed steps change buffers without counting versions, so that all are taken as changed.
        plain: attributes too (`vivace.tensors.outside.attributes`); of several ranks each may have its own.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        captured: bool,
        plain: bool,
    ) -> None:
        self._models, self._captured, self._plain = list(models), captured, plain
        self._optimizers = list(optimizers)
        inner = [pair for outer in optimizers for pair in inner_optimizers(outer).items()]
        self._inner = [name for name, _ in inner]
        self._owners: list[nn.Module | torch.optim.Optimizer] = [*models, *optimizers]
        self._owners += [one for _, one in inner]
        self._built = {key: (buffer, version_of(buffer)) for key, buffer in self._buffers()}
        self._switches_built = {key: getattr(owner, name) for key, owner, name in self._switches()}
        self._entries_built, self._groups_built = self._entries(), self._groups()
        begun = attributes(self._owners) if plain else {}  # in main memory, as it is only compared
        self._traced = traces(self._owners) if plain else {}
        self._attributes = {key: as_it_is(value, torch.Tensor.cpu) for key, value in begun.items()}

    def state(self) -> list[tuple[int, str, str, Any]]:
        """What is no more as it was built, and can be kept in a file that runs no code."""
        found: list[tuple[int, str, str, Any]] = [
            (*key, b.detach()) for key, b in self._buffers() if self._captured or self._has_changed(key, b)
        ]
        now = attributes(self._owners) if self._plain else {}
        for key in sorted(changed(now, self._attributes)):
            if key in now and not unstorable(kept := _kept(now[key])):
                found.append((*key, kept))
        found += [(*key, names) for key, names in self._groups().items() if names != self._groups_built[key]]
        found += [(index, name, key + _ROOM, now) for (index, name, key), now, fits in self._moved() if fits]
        switches = ((key, getattr(owner, name)) for key, owner, name in self._switches())
        return [*found, *((*key, on) for key, on in switches if on is not self._switches_built.get(key))]

    def unfit(self) -> str:
        """What a job built anew would not take of the present states, in words; empty where nothing."""
        for (index, name, key), _, fits in self._moved():
            if not fits and not loads_in_its_own_way(self._models[index]):
                told = ".".join(filter(None, (self._owner(index), name, key)))
                return f"training has made, removed or reshaped '{told}' of the model: let model() do that"
        for owner, groups in self._groups().items():
            if any("" in names for names in groups if names not in self._groups_built[owner]):
                return "a group that was added to the optimizer holds what is no weight of the model"
        return ""

    def anew(self) -> list[str]:
        """The names of attributes that are no more as they were built, and that `state` does not hold."""
        if not self._plain:
            return []
        kept, others = attributes(self._owners), traces(self._owners)
        found = [key for key in changed(kept, self._attributes) if unstorable(_kept(kept.get(key)))]
        built = {**self._attributes, **self._traced}  # others are made when they are first needed
        known = {key: built[key] for key in others if built.get(key) is not None}
        found += changed({key: others[key] for key in known}, known)
        named = [".".join(filter(None, (self._owner(index), name, key))) for index, name, key in found]
        made = unhanded(self._optimizers).difference(self._inner)  # by a step, before which nothing is loaded
        return sorted([*named, *(f"optimizer.{name}" for name in made)])

    def _owner(self, index: int) -> str:
        """What the name of an attribute begins with: of several models with the number."""
        if (place := index - len(self._models)) >= 0:
            names = ["optimizer"] * len(self._optimizers) + [f"optimizer.{name}" for name in self._inner]
            return names[place]
        return str(index) if len(self._models) > 1 else ""

    def load(self, state: list[tuple[int, str, str, Any]]) -> None:
        """Let the models and the groups of the optimizers hold it again."""
        on = self._switches_built | {(index, name, key): value for index, name, key, value in state}
        for place, owner, switch in self._switches():
            now = getattr(owner, switch)
            if (then := on.get(place, now)) is not now:
                setattr(owner, switch, then)
        found = {}
        for index, name, key, value in state:
            if key.endswith((_MODE, _TRAINED, _ROOM)):
                continue
            if key == _GROUPS:
                self._group(index, value)
                continue
            model = self._models[min(index, len(self._models) - 1)]
            module = model.get_submodule(name)
            own = next(chain(module.parameters(), model.parameters()), torch.empty(0))
            if not isinstance(value, torch.Tensor):
                found[index, name, key] = _given(value, own.device)
                continue
            now = own_tensors(module)[1].get(key)
            if now is None:
                module.register_buffer(key, value.to(own.device), persistent=False)
            elif now.shape == value.shape and now.dtype == value.dtype:
                with torch.no_grad():
                    now.copy_(value)
            else:
                setattr(module, key, value.to(now.device))
        assign(self._owners, found)

    def _group(self, index: int, groups: list[list[str]]) -> None:
        """Give an optimizer groups of the weights of these names."""
        optimizer, weights = self._owners[index], dict(named_parameters(self._models))
        assert isinstance(optimizer, torch.optim.Optimizer)
        has, built = optimizer.param_groups, self._groups_built[index, "", _GROUPS]
        del has[len(groups) :]
        for number, names in enumerate(groups):
            if names in built[number : number + 1]:
                continue
            given = [weights[name] for name in names]
            if number < len(has):
                has[number]["params"][:] = given
            else:  # its settings come with the optimizer's own state
                optimizer.add_param_group({**has[-1], "params": given})

    def _groups(self) -> dict[Key, list[list[str]]]:
        """Of each optimizer the names of the weights in its groups; empty ones of what no model holds."""
        names = {id(weight): name for name, weight in named_parameters(self._models)}
        return {
            (index, "", _GROUPS): [
                [names.get(id(p), "") for p in group["params"]] for group in one.param_groups
            ]
            for index, one in enumerate(self._owners)
            if isinstance(one, torch.optim.Optimizer)
        }

    def _entries(self) -> dict[Key, Any]:
        """Of each buffer in the models' `state_dict`s type and size, of any other tensor there the size."""
        found: dict[Key, Any] = {}
        for index, model in enumerate(self._models):
            modules = dict(model.named_modules(remove_duplicate=False))
            for entry, tensor in model.state_dict().items():
                name, _, key = entry.rpartition(".")
                if isinstance(tensor, torch.Tensor) and key != EXTRA_STATE:  # which takes any size
                    size = [*tensor.shape]
                    is_buffer = name in modules and key in own_tensors(modules[name])[1]
                    found[index, name, key] = {"dtype": tensor.dtype, "size": size} if is_buffer else size
        return found

    def _moved(self) -> Iterator[tuple[Key, Any, bool]]:
        """Of the models' `state_dict`s the entries that are no more as they were built: key, what `_entries`
        says now, and whether a model built anew can make room for it.
        """
        now, built = self._entries(), self._entries_built
        for key in {**built, **now}:
            if now.get(key) != built.get(key):
                are_buffers = isinstance(now.get(key, {}), dict) and isinstance(built.get(key, {}), dict)
                has_module = key in built or (*key[:2], _MODE) in self._switches_built
                yield key, now.get(key), are_buffers and has_module

    def _switches(self) -> Iterator[tuple[Key, nn.Module | nn.Parameter, str]]:
        """Every module's mode, and of every weight whether it is trained: whose attribute says that, and its
        name.
        """
        for index, model in enumerate(self._models):
            for name, module in model.named_modules():
                yield (index, name, _MODE), module, "training"
                for key, weight in module.named_parameters(recurse=False):
                    yield (index, name, key + _TRAINED), weight, "requires_grad"

    def _has_changed(self, key: Key, buffer: torch.Tensor) -> bool:
        built, version = self._built.get(key, (None, 0))
        return buffer is not built or version_of(buffer) != version

    def _buffers(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for index, model in enumerate(self._models):
            saved = model.state_dict().keys()
            for name, module in model.named_modules():
                for key, buffer in own_tensors(module)[1].items():
                    if buffer is not None and f"{name}.{key}".lstrip(".") not in saved:
                        yield (index, name, key), buffer


def make_room(models: Sequence[nn.Module], state: list[tuple[int, str, str, Any]]) -> None:
    """Let models that were built anew have the persistent buffers that the state of a `Beside` names: before
    they load their own `state_dict`s.
    """
    for index, name, key, value in state:
        model, own = models[min(index, len(models) - 1)], key.removesuffix(_ROOM)
        module = dict(model.named_modules(remove_duplicate=False)).get(name) if key.endswith(_ROOM) else None
        if module is None:  # loading tells what does not fit
            continue
        device = next(chain(module.parameters(), model.parameters()), torch.empty(0)).device
        buffer = None if value is None else torch.empty(**value, device=device)
        if own in own_tensors(module)[1]:
            setattr(module, own, buffer)
        else:
            module.register_buffer(own, buffer)


def _kept(thing: Any) -> Any:
    """An attribute in Python's own numbers, texts, lists and dicts, and tensors; else as it is."""
    kind = type(thing).__name__
    if isinstance(thing, torch.Tensor):
        return {"kind": "tensor", "parts": thing, "on_host": thing.device.type == "cpu"}
    if isinstance(thing, (numpy.generic, numpy.ndarray)):
        return {"kind": "numpy", "parts": _numbers(thing), "dtype": thing.dtype.str, "shape": [*thing.shape]}
    if type(thing) is complex:
        return {"kind": kind, "parts": [thing.real, thing.imag]}
    if type(thing) is bytes:
        return {"kind": kind, "parts": [*thing]}
    if type(thing) is defaultdict or type(thing) is _TABLES.get(kind):
        return {"kind": kind, "parts": [(_kept(key), _kept(value)) for key, value in thing.items()]}
    if type(thing) is _CONTAINERS.get(kind):
        limit = {"most": thing.maxlen} if isinstance(thing, deque) else {}
        return {"kind": kind, "parts": [*map(_kept, thing)], **limit}
    return thing


def _numbers(thing: numpy.generic | numpy.typing.NDArray[Any]) -> Any:
    """A tensor of an array of which torch has the type; else Python's numbers or texts."""
    try:
        return torch.from_numpy(numpy.array(thing).reshape(-1))
    except (TypeError, ValueError):  # texts, or numbers of another machine's order
        return thing.tolist()


def _given(kept: Any, device: torch.device) -> Any:
    """The inverse of `_kept`; tensors that were not in main memory come to `device`."""
    if not isinstance(kept, dict):
        return kept
    kind, parts = kept["kind"], kept["parts"]
    if kind == "tensor":
        return parts if kept["on_host"] else parts.to(device)
    if kind == "numpy":
        array = numpy.array(parts, dtype=kept["dtype"]).reshape(kept["shape"])
        return array[()]  # of no dimensions, the number
    if kind in ("complex", "bytes"):
        return complex(*parts) if kind == "complex" else bytes(parts)
    if kind == "defaultdict" or kind in _TABLES:
        table = {_given(key, device): _given(value, device) for key, value in parts}
        return defaultdict(None, table) if kind == "defaultdict" else _TABLES[kind](table)
    given = (_given(part, device) for part in parts)
    return deque(given, kept["most"]) if kind == "deque" else _CONTAINERS[kind](given)
