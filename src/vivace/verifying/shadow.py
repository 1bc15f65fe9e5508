"""Shadow runs: the job in fp32 with rounding noise of a chosen size at every matrix product and convolution,
and wherever else the plan stores fewer bits.

They show how far apart two runs of *the same* model drift when only rounding differs: the envelope of the
ruler.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from vivace.operators import MATRIX_CLASSES, class_of
from vivace.tensors.trees import map_tensors, tensors
from vivace.torch_internals.tensors import Operator, OperatorMode, in_backward, schema_of
from vivace.verifying.halves import Place, place_of

# Shadows round no finer than this: at fp32's last bit it is a rare event that a ReLU flips, which few shadows
# show, and sums in another order differ by many roundings.
FINEST_ROUNDOFF = 2.0**-16
# Times as coarse are the shadows that look for kinks: what is smooth they move by less than the limits allow,
# so that nothing else that is broken is kept for their sake.
COARSER, COARSER_SEEDS = 2.0, 16
HALVES = (torch.float16, torch.bfloat16)
# A bias's gradient is the sum of its product's output gradient, which lower precision rounds as well.
SUM = "sum.dim_IntList"
# Attention's statistic, one number a row, which every kernel keeps in fp32.
STATISTIC = "logsumexp"


class Products(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes the unit roundoff of the coarsest matrix product that runs; 0 where none has 16 bits.

    Where a job computes in 16 bits by itself, every plan for it may round as coarsely there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundoff = 0.0

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and look at its result."""
        found = func(*args, **kwargs)
        if class_of(func.__name__) in MATRIX_CLASSES:
            halves = [t.dtype for t in tensors(found) if t.dtype in HALVES]
            self.roundoff = max([self.roundoff, *(torch.finfo(dtype).eps / 2 for dtype in halves)])
        return found


class Rounding(OperatorMode):  # type: ignore[no-untyped-call]
    """Round the inputs and outputs of matrix products and convolutions, forward and backward, to
    `unit_roundoff`, and the results that the plan has in 16 bits, which `halves` names (see `Halves`). What
    the job itself has in 16 bits is rounded to these.

    Each tensor is rounded at a random scale, so that other seeds round otherwise: multiply by s in [1, 2),
    round to fewer bits by Veltkamp's splitting (Dekker 1971), divide by s. Relative error: at most about
    `unit_roundoff`. Numbers too large for that, such as a mask's -inf, stay as they are.
    """

    def __init__(self, unit_roundoff: float, seed: int, halves: dict[Place, list[bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit_roundoff = unit_roundoff
        self.halves = {place: itertools.cycle(found) for place, found in halves.items()}
        self.random = random.Random(seed)

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, with rounding around it where it multiplies matrices, or of what it gives."""
        rounds = class_of(func.__name__) in MATRIX_CLASSES or (func.__name__ == SUM and in_backward())
        if not rounds or func.is_view:
            return self._stored(func, func(*args, **kwargs))
        schema = schema_of(func)
        if not schema.is_mutable:
            args = self._rounded(args, schema.arguments)
            kwargs = map_tensors(kwargs, self._round)
        found = func(*args, **kwargs)
        if isinstance(found, tuple):
            return self._rounded(found, schema.returns)
        return map_tensors(found, self._round)

    def _stored(self, func: Operator, found: object) -> Any:
        if not (isinstance(found, torch.Tensor) and self.halves):
            return found
        half = next(self.halves.get(place_of(func, found.shape), iter([False])))
        if not half:
            return found
        rounded = self._round(found)
        return found.copy_(rounded) if schema_of(func).is_mutable else rounded

    def _rounded(self, values: tuple[Any, ...], declared: Sequence[torch.Argument]) -> tuple[Any, ...]:
        """The values, rounded but for attention's statistics, which the schema names."""
        kept = [STATISTIC in (d.name or "").replace("_", "") for d in declared[: len(values)]]
        return tuple(v if keep else map_tensors(v, self._round) for v, keep in zip(values, kept, strict=True))

    def _round(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.complex64:
            tensor = tensor.resolve_conj()  # below a dispatch mode, nothing else heeds the bit of `conj`
            return torch.complex(self._round(tensor.real), self._round(tensor.imag))
        if tensor.dtype in HALVES and tensor.layout == torch.strided and tensor.numel():
            own = max(self.unit_roundoff, torch.finfo(tensor.dtype).eps / 2)
            return self._rounded_to(own, tensor.float()).to(tensor.dtype)
        if tensor.dtype != torch.float32 or tensor.layout != torch.strided or tensor.numel() == 0:
            return tensor
        return self._rounded_to(self.unit_roundoff, tensor)

    def _rounded_to(self, unit_roundoff: float, tensor: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.random.random()
        scaled = tensor * scale
        split = scaled * (unit_roundoff * 2.0**24 + 1.0)
        rounded = split.sub_(torch.sub(split, scaled, out=scaled)).div_(scale)
        if rounded.is_cpu and math.isfinite(rounded.sum().item()):  # a third of the time; a GPU would wait
            return rounded
        return torch.where(rounded.isfinite(), rounded, tensor)
