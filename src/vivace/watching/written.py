"""What the job's own code may write: what else changes between two steps of a run, the plan has changed."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from vivace.session.opening import schedulers_of
from vivace.tensors.outside import PLAIN, is_persons, of_library
from vivace.torch_internals.modules import inner_schedules

MOST_LOOKED_AT = 500  # functions, classes and objects
CALLED_ANYWAY = {"forward", "__call__", "step", "get_lr"}
THAWS, MODES = {"requires_grad_"}, {"train", "eval"}


class Code:
    """Of functions and objects of a person's, and of what these call as far as names tell; of the classes of
    `models`, what is called while they train.
    """

    def __init__(self, things: Iterable[object], models: Iterable[nn.Module] = ()) -> None:
        self.names = set(CALLED_ANYWAY)
        self.stores: set[str] = set()  # attributes
        self.writes = False  # any attribute, or item of anything?
        self.things = tuple(things)
        self._seen: set[int] = set()
        self._kinds: list[type] = []
        self._look_at_all(self.things)
        for kind in {type(part): None for model in models for part in model.modules()}:
            self._look(kind)
        known = -1
        while known != len(self._seen):  # methods by whose names somebody calls them
            known = len(self._seen)
            for kind in list(self._kinds):
                for name in self.names & vars(kind).keys():
                    self._look(vars(kind)[name])

    def may_assign(self, name: str, value: object) -> bool:
        """May it give an attribute of that name such a value? What a container or a tensor holds, it changes
        by its methods.
        """
        by_methods = not isinstance(value, PLAIN) and name in self.names
        return by_methods or name in self.stores or "setattr" in self.names

    @property
    def may_thaw(self) -> bool:
        """May it freeze weights, or let them train again?"""
        return bool(self.names & THAWS) or "requires_grad" in self.stores

    @property
    def may_turn_modes(self) -> bool:
        """May it set parts of a model to evaluation, or back?"""
        return bool(self.names & MODES) or "training" in self.stores

    def _look(self, thing: Any) -> None:
        if id(thing) in self._seen or len(self._seen) >= MOST_LOOKED_AT or isinstance(thing, PLAIN):
            return
        self._seen.add(id(thing))
        if isinstance(thing, partial):
            self._look_at_all((thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, types.MethodType):
            self._look_at_all((thing.__func__, thing.__self__))
        elif isinstance(thing, (staticmethod, classmethod)):
            self._look(thing.__func__)
        elif isinstance(thing, types.FunctionType):
            if not of_library(thing.__module__ or ""):
                self._look_at_function(thing)
        elif isinstance(thing, type):
            self._kinds += [kind for kind in thing.__mro__ if not of_library(kind.__module__)]
        elif isinstance(thing, (list, tuple)):
            self._look_at_all(thing)
        elif is_persons(thing):
            self._look(type(thing))
            self._look_at_all(getattr(thing, "__dict__", {}).values())

    def _look_at_all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self._look(thing)

    def _look_at_function(self, function: types.FunctionType) -> None:
        for code in _codes(function.__code__):
            self.names.update(code.co_names)
            for step in dis.get_instructions(code):
                self.writes |= step.opname in ("STORE_ATTR", "STORE_SUBSCR")
                if step.opname == "STORE_ATTR":
                    self.stores.add(str(step.argval))
            self._look_at_all(function.__globals__.get(name) for name in code.co_names)
        self._look_at_all(_contents(function))


def code_of_schedules(scheduler: object) -> Code:
    """What a job's schedules do, and the functions that torch's own ask."""
    every = list(schedules_in(scheduler))
    return Code((*every, *(function for one in every for function in getattr(one, "lr_lambdas", ()))))


def may_change_anything(scheduler: object) -> bool:
    """Is any of a job's schedules, or of those in them, no one of torch's, which change nothing but a few
    settings of the optimizer? One of torch's may ask a function of the person's, which writes.
    """
    own = any(not type(one).__module__.startswith("torch.optim") for one in schedules_in(scheduler))
    code = code_of_schedules(scheduler)
    return own or code.writes or code.may_thaw


def schedules_in(scheduler: object) -> Iterator[Any]:
    """A job's schedules, and those that they are made of."""
    for one in schedulers_of(scheduler):
        yield one
        yield from schedules_in(inner_schedules(one))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Of a function, and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _contents(function: types.FunctionType) -> Iterator[object]:
    """What its closure holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
