"""What validation does to the peak of memory after the profiled steps, until the script's end.

The profiled steps are the first ones, and validation often comes later. Watched is what a training loop calls
once a validation: `Module.eval`, and the first backward pass after it; a step pays nothing for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace.files import replace_text
from vivace.profiling.record import RECORD, facts
from vivace.profiling.record.guard import Guard, described
from vivace.profiling.record.hooks import Patches
from vivace.profiling.record.sites import calling_site

if TYPE_CHECKING:
    from vivace.profiling.record.recorder import Recorder

MOST_VALIDATIONS = 50  # a loop that calls eval() in each step is not asked for ever


class LatePeak:
    """Call `install` before the recorder's; at exit the record gets ``late``.

    ``late`` holds the peak in bytes, how much of it passes of validation raised, and whether gradients were
    on in one that did. What the profile itself
    took, its copies of the model and its trace, is in the peak that they have to surpass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.rise, self.num_validations = 0, 0
        self.place = ""  # the line that put a module into evaluation mode
        self.gradients = False
        self._without_gradients = False  # was something run without, since this validation began?
        self._before: int | None = None  # the peak when validation began; None while there is none
        self._problems: list[str] = []
        self._guard = Guard(lambda error: self._problems.append(described(error)))
        self._eval, self._backward = Patches(self._guard), Patches(self._guard)

    def install(self) -> None:
        """Begin to watch for modules that go into evaluation mode."""
        self._pid = os.getpid()
        self._eval.replace(torch.nn.Module, "eval", self._evaluating)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Add what was seen to a record that is finished; nothing is added where it is not there."""
        if os.getpid() != self._pid:  # a forked loader worker inherits this
            return
        atexit.unregister(self.finish)
        self._trains()
        self._eval.restore()
        path: Path = self.recorder.folder / RECORD
        if self.num_validations or self._problems:
            with contextlib.suppress(OSError, ValueError):  # a FolderError is a ValueError
                document = json.loads(path.read_text(encoding="utf-8"))
                if self._problems:
                    document["problems"] = [*document.get("problems", []), *self._problems]
                else:
                    document["late"] = {"peak": facts.peak_bytes(), "rise": self.rise, "at": self.place}
                    document["late"]["gradients"] = self.gradients
                replace_text(path, json.dumps(document))

    def _evaluating(self, original: Callable[..., Any]) -> Any:
        def evaluate(module: nn.Module) -> Any:
            if self.recorder.done and self._before is None and self.num_validations < MOST_VALIDATIONS:
                self._before = facts.peak_bytes()
                self._without_gradients = not torch.is_grad_enabled()
                for context in (torch.no_grad, torch.inference_mode):
                    self._backward.replace(context, "__enter__", self._entering)
                self.place = self.place or calling_site()
                self.num_validations += 1
                self._backward.replace(torch.autograd, "backward", self._first_backward)
            return original(module)

        return evaluate

    def _entering(self, original: Callable[..., Any]) -> Any:
        def enter(context: object) -> Any:
            self._without_gradients = True
            return original(context)

        return enter

    def _first_backward(self, original: Callable[..., Any]) -> Any:
        def backward(*arguments: object, **keywords: object) -> Any:
            self._trains()
            return original(*arguments, **keywords)

        return backward

    def _trains(self) -> None:
        """Training goes on, or the script ends: validation is over."""
        if self._before is not None:
            rise = max(0, facts.peak_bytes() - self._before)
            self.rise += rise
            self.gradients |= rise > 0 and not self._without_gradients
            self._before = None
        self._backward.restore()
