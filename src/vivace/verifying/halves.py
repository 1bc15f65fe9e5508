"""Which numbers a plan stores in half precision, operator by operator, for shadows to round the same ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from vivace.torch_internals.tensors import Operator, OperatorMode, in_backward

Place = tuple[str, tuple[int, ...], bool]


def place_of(func: Operator, shape: torch.Size) -> Place:
    """The operator, the shape of what it gives, and whether the backward pass runs it."""
    return func.__name__, tuple(shape), in_backward()


class Halves(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes which results of elementwise operators have 16 bits, in the order of each place.

    Products are not looked at, as shadows round them in any case; nor are sums, means and softmax: those a
    right plan keeps in fp32.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Place, list[bool]] = defaultdict(list)

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and look at its result."""
        result = func(*args, **kwargs)
        if (
            isinstance(result, torch.Tensor)
            and torch.Tag.pointwise in func.tags
            and result.is_floating_point()
        ):
            half = result.dtype in (torch.float16, torch.bfloat16)
            self.found[place_of(func, result.shape)].append(half)
        return result

    def places(self) -> dict[Place, list[bool]]:
        """Those places where any result has 16 bits."""
        return {place: halves for place, halves in self.found.items() if any(halves)}
