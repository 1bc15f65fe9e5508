"""Notes the operators of torch that multiply, with the number format that they multiply in."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

from vivace.operators import MATRIX_CLASSES, class_of
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import TorchDispatchMode

NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `found` notes of each operator the module that it stands in (the class of the
    outermost one, then names), its own name, and ``fp32``, ``bf16`` and so on. `tracker` is entered too.
    """

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str, str]] = []
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and note it where it multiplies."""
        if class_of(func.__name__) in MATRIX_CLASSES and not func.is_view:
            first = next(tensors(list(args)), None)
            if first is not None:
                module = max(self.tracker.parents, key=len)  # the innermost one has the longest name
                name = func.__name__.partition(".")[0]
                self.found.append((module, name, NUMBERS.get(first.dtype, str(first.dtype))))
        return func(*args, **(kwargs or {}))
