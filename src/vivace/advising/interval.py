"""How far a prediction may be off: 80 % intervals from the errors on held-out cards and models. Imports no
torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vivace.advising.catalogue import Gpu
from vivace.advising.demand import Demand
from vivace.advising.formula import Setting, architecture

# What of a prediction the evidence holds: an error of its own for each.
CASES = ("known card and model", "new model", "new card", "new card and model", "new architecture")
# What widens an interval beside that, in the order of the file.
CIRCUMSTANCES = (
    "several_gpus",
    "several_nodes",
    "double_precision",
    "tf32_or_single",
    "other_framework",
    "other_harness",
    "host_bound",
    "language_model",
    "guessed_batch",
    "unseen_kind",
)
FEW_ROWS = 10
FEW_OF_A_KIND = 20  # figures: the 13 of recurrent kernels are of three sizes of one network
# Of what no published figure tells, the fit makes no widening. Strict fp32 of a card that has TF32: one
# measurement (records/gpu, ResNet-50 on an H200) took 1.54 times the predicted time, and this makes that one
# standard deviation.
STRICT = {"fp32_beside_tf32": 1.87}


def kinds_of(demand: Demand) -> set[str]:
    """Kinds of kernels that matter to a demand: at least a tenth of its operations or of its bytes."""
    total_flops, total_bytes = max(demand.flops, 1.0), max(demand.bytes, 1.0)
    flops: dict[str, float] = {}
    moved: dict[str, float] = {}
    for b in demand.bins:
        flops[b.kind] = flops.get(b.kind, 0.0) + b.flops / total_flops
        moved[b.kind] = moved.get(b.kind, 0.0) + b.bytes / total_bytes
    return {kind for kind in flops if flops[kind] > 0.1 or moved[kind] > 0.1}


def unseen_kinds(demand: Demand, evidence: Mapping[str, Any]) -> set[str]:
    """Kinds that matter to a demand and of which nearly no published figure is known."""
    rows = evidence.get("kinds", {})
    return {kind for kind in kinds_of(demand) if rows.get(kind, 0) < FEW_OF_A_KIND}


def case_of(gpu: Gpu, evidence: Mapping[str, Any], *, new_model: bool) -> str:
    """Which of the `CASES` a prediction is; `evidence` are rows by ``cards`` and ``architectures``."""
    if evidence.get("architectures", {}).get(architecture(gpu), 0) < FEW_ROWS or architecture(gpu) == "other":
        return "new architecture"
    if gpu.name not in evidence.get("cards", {}):
        return "new card and model" if new_model else "new card"
    return "new model" if new_model else "known card and model"


def circumstances(
    demand: Demand,
    setting: Setting,
    host_share: float,
    evidence: Mapping[str, Any],
    *,
    guessed_batch: bool = False,
    has_tf32: bool = False,
) -> set[str]:
    """Which of the `CIRCUMSTANCES` and of `STRICT` hold for a prediction.

    Args:
        demand, setting: what is predicted.
        host_share: the floor of launches over the device's time.
        evidence: rows by ``kinds`` that the coefficients were fitted on.
        guessed_batch: the batch is not stated, only likely.
        has_tf32: the card could compute in TF32.
    """
    tests = {
        "several_gpus": setting.num_gpus > 1,
        "several_nodes": setting.num_gpus > 8,
        "double_precision": setting.precision == "fp64",
        "tf32_or_single": setting.precision in ("tf32", "fp32"),
        "other_framework": setting.framework != "pytorch",
        "other_harness": setting.harness not in ("timm", "loop", "forward"),
        "host_bound": host_share > 0.5,
        "language_model": demand.count_of("layer_norm") > 0
        and demand.count_of("conv") + demand.count_of("pointwise") == 0,
        "guessed_batch": guessed_batch,
        "fp32_beside_tf32": has_tf32 and setting.precision == "fp32",
        "unseen_kind": bool(unseen_kinds(demand, evidence)),
    }
    return {name for name, holds in tests.items() if holds}


def size_of(case: str, sizes: Mapping[str, float], *, new_model: bool) -> float:
    """The logarithm of an 80 % interval's factor in a case, without what widens it.

    The models were known to the fits that made the size of a new architecture. Where the model is new as
    well, what a new architecture adds to a new card is added to a new card and model, as variances add.
    """
    if case != "new architecture" or not new_model:
        return sizes[case]
    adds = max(sizes[case] ** 2 - sizes["new card"] ** 2, 0.0)
    return math.sqrt(sizes["new card and model"] ** 2 + adds)


def factor(case: str, found: Iterable[str], table: Mapping[str, Any], *, new_model: bool = False) -> float:
    """The factor by which the truth may differ from the prediction, either way, at 80 %."""
    widening = STRICT | table["widening"]
    spread = size_of(case, table["size"], new_model=new_model) * math.prod(
        widening.get(name, 1.0) for name in found
    )
    return math.exp(min(spread, 2.0))
