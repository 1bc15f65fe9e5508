"""Did it take effect? How many of the operators that multiply ran in int8, bf16 or fp32, asked of the runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vivace.compressing.forms import Form

MULTIPLY = ("conv", "gemm", "matmul", "linear", "mm", "fullyconnected", "attention", "lstm", "gru", "rnn")
NUMBERS = {"f32": "fp32", "bf16": "bf16", "i8": "int8", "u8": "int8", "f16": "fp16"}


def effect(form: Form, handle: Any, run: Callable[[], Any]) -> dict[str, int]:
    """Operators by number format, as the runtime reports them; empty where it does not tell.

    Args:
        handle: the runtime's own object, of `vivace.exporting.serve`.
        run: calls it once.
    """
    if form.runtime == "openvino":
        return _of_openvino(handle)
    if form.runtime == "torch":
        return _of_torch(run)
    return {}


def multiplies(kind: str) -> bool:
    """Is this an operator of matrix products or convolutions?"""
    return any(mark in kind.lower() for mark in MULTIPLY)


def _of_openvino(compiled: Any) -> dict[str, int]:
    """By the precision that each operator of the compiled model was given."""
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        facts = node.get_rt_info()
        kind, numbers = (
            str(facts[key].astype(str)) if key in facts else "" for key in ("layerType", "runtimePrecision")
        )
        if multiplies(kind):
            found[NUMBERS.get(numbers.lower(), numbers)] += 1
    return dict(found)


def _of_torch(run: Callable[[], Any]) -> dict[str, int]:
    """By the dtype of the first tensor of each operator that is dispatched."""
    from vivace.compressing.counting import Counting

    with Counting() as counting:
        run()
    return dict(counting.found)
