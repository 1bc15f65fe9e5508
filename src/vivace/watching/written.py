"""What the job's own code may write: what else changes between two steps of a run, the plan has changed."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from vivace.session.opening import schedulers_of
from vivace.tensors.outside import PLAIN, of_library
from vivace.torch_internals.modules import inner_schedules

MOST_LOOKED_AT = 500  # functions, classes and objects
CALLED_ANYWAY = {"forward", "__call__", "step", "get_lr"}
THAWS, MODES = {"requires_grad_"}, {"train", "eval"}
WRITING = ("STORE_SUBSCR", "COPY", "GET_ITER")  # `[name] =`, `[name] +=`, `for name in`
TRAINED = (torch.Tensor, nn.Module, torch.optim.Optimizer)


class Code:
    """Of functions and objects of a person's, and of what these call as far as names tell; of the classes of
    `models`, what is called while they train. What modules define of which `skipped` is true is not read.
    """

    def __init__(
        self,
        things: Iterable[object],
        models: Iterable[nn.Module] = (),
        skipped: Callable[[str], bool] = of_library,
    ) -> None:
        self.names = set(CALLED_ANYWAY)
        self.stores: set[str] = set()  # attributes
        self.texts: set[str] = set()  # of the code itself
        self.items: set[str] = set()  # names of items that are written
        self.writes = False  # any attribute, or item of anything?
        self.may_freeze = False  # `requires_grad` of anything?
        self.reaches_training = False  # a model, a weight, an optimizer, or a group of its parameters?
        self.things = tuple(things)
        self._skipped = skipped
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

    def may_assign(self, name: str, value: object, of_torch: bool) -> bool:
        """May it give an attribute of that name such a value? What a container or a tensor holds, it changes
        by its methods. An attribute of one of torch's own modules is set by its name.
        """
        by_methods = not isinstance(value, PLAIN) and name in self.names
        by_text = "setattr" in self.names and (name in self.texts or not of_torch)
        return by_methods or name in self.stores or by_text

    @property
    def may_thaw(self) -> bool:
        """May it freeze weights, or let them train again?"""
        return bool(self.names & THAWS) or "requires_grad" in self.stores

    @property
    def may_turn_modes(self) -> bool:
        """May it set parts of a model to evaluation, or back?"""
        return bool(self.names & MODES) or "training" in self.stores

    def _look(self, thing: Any) -> None:
        if isinstance(thing, TRAINED) or (isinstance(thing, type) and issubclass(thing, TRAINED)):
            self.reaches_training = True
        if id(thing) in self._seen or isinstance(thing, (*PLAIN, torch.Tensor)):
            return
        if len(self._seen) >= MOST_LOOKED_AT:
            return
        self._seen.add(id(thing))
        if isinstance(thing, partial):
            self._look_at_all((thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, types.MethodType):
            self._look_at_all((thing.__func__, thing.__self__))
        elif isinstance(thing, (staticmethod, classmethod)):
            self._look(thing.__func__)
        elif isinstance(thing, types.FunctionType):
            if not self._skipped(thing.__module__ or ""):
                self._look_at_function(thing)
        elif isinstance(thing, type):
            self._kinds += [kind for kind in thing.__mro__ if not self._skipped(kind.__module__)]
        elif type(thing) is dict:
            self.reaches_training |= "params" in thing or any(isinstance(v, TRAINED) for v in thing.values())
        elif isinstance(thing, (list, tuple)):
            self._look_at_all(thing)
        elif not self._skipped(type(thing).__module__) or type(thing) is types.SimpleNamespace:
            self._look(type(thing))
            self._look_at_all(list(getattr(thing, "__dict__", {}).values()))

    def _look_at_all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self._look(thing)

    def _look_at_function(self, function: types.FunctionType) -> None:
        for code in _codes(function.__code__):
            self.names.update(code.co_names)
            self._look_at_steps(list(dis.get_instructions(code)), "update" in code.co_names)
            self._look_at_all(function.__globals__.get(name) for name in code.co_names)
        self._look_at_all(_contents(function))

    def _look_at_steps(self, steps: list[dis.Instruction], updates: bool) -> None:
        """`updates`: is any of their texts the name of an item that is written?"""
        last = steps[-1]
        for index, (step, following, after) in enumerate(
            zip(steps, [*steps[1:], last], [*steps[2:], last, last], strict=True)
        ):
            self.writes |= step.opname in ("STORE_ATTR", "STORE_SUBSCR")
            if step.opname == "STORE_ATTR":
                self.stores.add(str(step.argval))
                self.may_freeze |= step.argval == "requires_grad" and steps[index - 2].argval is not True
            elif step.argval == "requires_grad_":
                thaws = following.argval is True or "CALL" in following.opname
                self.may_freeze |= not thaws
            elif step.opname == "LOAD_CONST":
                texts = set(_texts(step.argval))
                self.texts |= texts
                if following.opname in WRITING or updates or (_reads_item(following) and _in_place(after)):
                    self.items |= texts


def code_of_schedules(scheduler: object) -> Code:
    """What a job's schedules do, and the functions that torch's own ask."""
    every = list(schedules_in(scheduler))
    return Code((*every, *(function for one in every for function in getattr(one, "lr_lambdas", ()))))


def code_of_optimizers(optimizers: list[torch.optim.Optimizer]) -> Code:
    """What optimizers do that are not torch's, and those that they hold, be they of a library or a person's;
    but for what makes them.
    """
    held = [value for one in optimizers for value in vars(one).values()]
    every = (*optimizers, *(value for value in held if isinstance(value, torch.optim.Optimizer)))
    kinds = {kind: None for one in every for kind in type(one).__mro__ if not _of_torch(kind.__module__)}
    methods = [value for kind in kinds for name, value in vars(kind).items() if name != "__init__"]
    return Code(methods, skipped=_of_torch)


def may_change_anything(scheduler: object) -> bool:
    """Is any of a job's schedules, or of those in them, no one of torch's, which change nothing but a few
    settings of the optimizer? One of torch's may ask a function of the person's, which writes, and not only
    into what is its own.
    """
    own = any(not type(one).__module__.startswith("torch.optim") for one in schedules_in(scheduler))
    code = code_of_schedules(scheduler)
    reaches = code.reaches_training or "param_groups" in code.names
    return own or (code.writes and reaches) or code.may_thaw


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


def _of_torch(module: str) -> bool:
    """Is it torch's, or Python's?"""
    top = module.partition(".")[0]
    return top in ("", "torch") or (top in sys.stdlib_module_names and top != "__main__")


def _texts(constant: object) -> Iterator[str]:
    """Those in a constant of a function's code."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for one in constant:
            yield from _texts(one)


def _reads_item(step: dis.Instruction) -> bool:
    """Does it take the item of the name just before it? Python's versions say it in two ways."""
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _in_place(step: dis.Instruction) -> bool:
    """Does it take a method that changes a tensor, as `mul_` does?"""
    return step.opname in ("LOAD_ATTR", "LOAD_METHOD") and str(step.argval).endswith("_")
