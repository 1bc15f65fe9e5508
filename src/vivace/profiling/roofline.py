"""The roofline of a step: the least time for its operations and bytes at measured ceilings. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

# Ceilings of one operator class, the first that was measured counts; the rest of a class is bounded by bytes.
_RATES = {
    "convolution": ("convolution_{dtype}_nchw", "convolution_{dtype}_nhwc"),
    "default": ("matmul_{dtype}",),
}
_DTYPES = {16: "complex128", 8: "fp64", 4: "fp32", 1: "int8"}


@dataclasses.dataclass(frozen=True)
class Roof:
    """One operator class: its work, the time it took, the least time, and what bounds it."""

    operator: str
    flops: float
    bytes: float
    count: int
    seconds: float
    bound_seconds: float | None
    bound_by: str

    @property
    def share(self) -> float | None:
        """Least time over time taken; None without work, and where it took less than the ceiling allows."""
        if not self.bound_seconds or self.seconds < self.bound_seconds:
            return None
        return self.bound_seconds / self.seconds

    @property
    def least_seconds(self) -> float | None:
        """Of the limit; what took less than its ceiling allows, by the processor's caches, is at its own."""
        if self.bound_seconds is None or not self.seconds:
            return self.bound_seconds
        return min(self.bound_seconds, self.seconds)


def roofline(
    work: dict[str, dict[str, float]],
    seconds: dict[str, float],
    item_bytes: dict[str, float],
    ceilings: dict[str, float],
    half: str = "bf16",
    tf32: Collection[str] = (),
) -> list[Roof]:
    """One row a class, the longest first.

    Args:
        work: flops, bytes, bytes_fused and count by class.
        seconds: measured by class.
        item_bytes: ``class:size`` of the matrix operators' numbers, with their operations.
        ceilings: as in `Machine.ceilings`; a missing one leaves the bound out.
        half: what two bytes a number are, ``bf16`` or ``fp16``.
        tf32: classes whose float32 may be computed in TF32.
    """
    sizes = {name.partition(":")[0]: int(name.partition(":")[2]) for name in item_bytes}
    rows = []
    for operator in {**work, **seconds}:
        row = work.get(operator, {})
        flops, moved, count = row.get("flops", 0), row.get("bytes", 0), row.get("count", 0)
        size = sizes.get(operator, 4)
        dtype = half if size == 2 else "tf32" if size == 4 and operator in tf32 else _DTYPES.get(size, "fp32")
        bounds = {"memory": _over(moved, ceilings.get("copy_device"))}
        if flops:
            bounds["compute"] = _over(flops, _rate(operator, dtype, ceilings))
        known = {name: value for name, value in bounds.items() if value is not None}
        by = max(known, key=lambda name: known[name], default="not measured")
        taken = seconds.get(operator, 0.0)
        whole = len(known) == len(bounds)
        rows.append(
            Roof(operator, flops, moved, int(count), taken, known[by] if known and whole else None, by)
        )
    return sorted(rows, key=lambda row: -row.seconds)


def bound_of(rows: list[Roof]) -> float | None:
    """The least time of the whole step; None where a ceiling was not measured."""
    bounds = [row.least_seconds for row in rows if row.flops or row.bytes]
    if not bounds or any(bound is None for bound in bounds):
        return None
    return sum(bound for bound in bounds if bound is not None)


def to_dict(row: Roof) -> dict[str, Any]:
    """A row of the roofline as JSON types, with its share of the limit, and the time that this counts."""
    return {**dataclasses.asdict(row), "share": row.share, "least_seconds": row.least_seconds}


def _rate(operator: str, dtype: str, ceilings: dict[str, float]) -> float | None:
    """The best measured rate that serves a class in a dtype; TF32 and fp16 stand under their own names."""
    names = [*_RATES.get(operator, ()), *_RATES["default"]]
    found = [ceilings.get(name.format(dtype=dtype)) for name in names]
    rates = [rate for rate in found if rate]
    return max(rates) if rates else None


def _over(amount: float, rate: float | None) -> float | None:
    if not amount:
        return 0.0
    return amount / rate if rate else None
