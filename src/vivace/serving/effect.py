"""Did it take effect? How many operators that multiply ran in int8, bf16 or fp32, asked of the runtime."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.serving.forms import Form

MULTIPLY = ("conv", "gemm", "matmul", "mm", "fullyconnected", "attention", "lstm", "gru", "rnn")
ONNX_INT8 = (
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "ConvInteger",
    "QAttention",
)
COMPILED_INT8 = (
    "onednn::qconv",
    "onednn::qlinear",
    "quantized::",
    "aten::_int_mm",
    "aten::_weight_int8pack_mm",
)
COMPILED = (
    "mkldnn::_convolution_pointwise",
    "mkldnn::_linear_pointwise",
    "aten::mkldnn_rnn_layer",
    "aten::convolution",
    "aten::addmm",
    "aten::mm",
    "aten::bmm",
    "mkl::_mkl_linear",
    "aten::_scaled_dot_product",
)
TYPES = {"float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16"}  # in a trace
NUMBERS = {"f32": "fp32", "bf16": "bf16", "i8": "int8", "u8": "int8", "f16": "fp16"}


def effect(form: Form, handle: object, path: Path, run: Callable[[], Any]) -> dict[str, int]:
    """Operators by number format, as the runtime reports them; empty where it does not tell.

    Args:
        handle: the runtime's own object, of `vivace.serving.serve`.
        path: the form's file.
        run: calls it once.
    """
    if form.runtime == "openvino":
        return _of_openvino(handle)
    if form.runtime == "onnx":
        return _of_onnx(path)
    if form.runtime == "torch":
        return _of_torch(run)
    return _of_compiled(run)


def multiplies(kind: str) -> bool:
    """Is this an operator of matrix products or convolutions? One that converts is not."""
    name = kind.lower().replace("convert", "")
    return any(mark in name for mark in MULTIPLY)


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


def _of_onnx(path: Path) -> dict[str, int]:
    """By the kinds of operators that ONNX Runtime makes of the file."""
    import onnx
    import onnxruntime

    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        options.log_severity_level = 3
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    for node in nodes:
        if multiplies(node.op_type):
            found["int8" if node.op_type in ONNX_INT8 else "fp32"] += 1
    return dict(found)


def _of_compiled(run: Callable[[], Any]) -> dict[str, int]:
    """By the names of the operators that compiled code calls, and the numbers that they are given; what it
    computes itself is not told.
    """
    from torch.profiler import ProfilerActivity, profile

    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        trace = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            run()
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        name, told = str(event.get("name")), event.get("args", {}).get("Input type", ())
        given = next((TYPES[one] for one in told if one in TYPES), None)
        if name.startswith(COMPILED_INT8):
            found["int8"] += 1
        elif name.startswith(COMPILED) and given:
            found[given] += 1
    return dict(found)


def _of_torch(run: Callable[[], Any]) -> dict[str, int]:
    """By the dtype of the first tensor of each operator that is dispatched."""
    from vivace.serving.counting import Counting

    with Counting() as counting:
        run()
    return dict(counting.found)
