"""By which method a loop calls a module, where it does not call the module itself: ``model.loss(batch)``, or
the `training_step` of a LightningModule.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from types import FrameType, FunctionType, ModuleType
from weakref import WeakValueDictionary as Held

from torch import nn

from vivace.live.frames import variables

# What a method may use beside functions and classes: a copy of it is run again, which nobody else may notice.
SILENT = {"torch", "torchvision", "torchaudio", "torchmetrics", "numpy", "math", "cmath", "random", "einops"}
SILENT |= {"functools", "itertools", "operator", "collections", "typing", "time", "copy", "warnings"}


@dataclasses.dataclass
class Methods:
    """Seen of a step: of which module what method called the parts, and how often."""

    owners: Held[tuple[int, str], nn.Module] = dataclasses.field(default_factory=Held)
    calls: int = 0
    is_whole: bool = True  # was every call made by a method, and no backward pass inside?
    _running: FrameType | None = None

    def called(self, module: nn.Module) -> None:
        """A module was called that no other module's call holds."""
        found = _outermost(inspect.currentframe(), module)
        if found is None:
            self.is_whole, self._running = False, None
            return
        owner, frame = found
        self.owners[id(owner), frame.f_code.co_name] = owner
        self.calls += frame is not self._running
        self._running = frame

    def backward(self) -> None:
        """A backward pass begins."""
        frame = inspect.currentframe()
        while frame is not None and self._running is not None:
            if frame is self._running:
                self.is_whole = False
            frame = frame.f_back
        self._running = None

    def only(self) -> tuple[nn.Module, str] | None:
        """The module and the name of its method, where one method makes every call."""
        if len(self.owners) != 1 or not self.is_whole:
            return None
        (((_, name), owner),) = self.owners.items()
        function = inspect.getattr_static(type(owner), name)
        return (owner, name) if isinstance(function, FunctionType) and _is_silent(function) else None


def _outermost(frame: FrameType | None, module: nn.Module) -> tuple[nn.Module, FrameType] | None:
    """The method farthest out that holds the call; none in which a backward pass or an update began it."""
    found = None
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(("torch.optim", "torch.autograd")):
            break
        code = frame.f_code
        owner = variables(frame).get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and any(part is module for part in owner.modules()):
            function = inspect.getattr_static(type(owner), code.co_name, None)
            if getattr(function, "__code__", None) is code:
                found = owner, frame
        frame = frame.f_back
    return found


def _is_silent(function: FunctionType) -> bool:
    """Does it name no module or logger that somebody else would hear of?"""
    used = (function.__globals__.get(name) for name in function.__code__.co_names)
    return not any(
        isinstance(thing, logging.Logger)
        or (isinstance(thing, ModuleType) and thing.__name__.partition(".")[0] not in SILENT)
        for thing in used
    )
