"""Counts the operators of torch that multiply, by the number format that they multiply in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from vivace.operators import MATRIX_CLASSES, class_of
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import TorchDispatchMode

NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `found` counts operators by ``fp32``, ``bf16`` and so on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it where it multiplies."""
        if class_of(func.__name__) in MATRIX_CLASSES and not func.is_view:
            first = next(tensors(list(args)), None)
            if first is not None:
                self.found[NUMBERS.get(first.dtype, str(first.dtype))] += 1
        return func(*args, **(kwargs or {}))
