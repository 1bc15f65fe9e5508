"""Did it take effect? Which operators that multiply ran in int8, bf16 or fp32, asked of the runtime; and why
some did not run in the numbers of the form.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.operators import MATRIX_CLASSES, class_of
from vivace.serving.forms import Form, form_named

if TYPE_CHECKING:
    from torch.fx import Graph

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
SCOPES = "pkg.torch.onnx.name_scopes"  # torch's exporter notes there in which modules an operator stands
MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "VariadicSplit", "StridedSlice")
UNPACKS = ("Multiply", "Subtract", "Convert")  # what OpenVINO has between weights of int8 and a product

CONVERTED = "your model's own code makes fp32 of what it is given"
NOT_TOLD = "{runtime} does not tell why"
NO_KERNEL = "given int8, and computed in fp32 by {runtime} on this processor"
LEFT_OUT = "left out of int8 by {quantizer}"
OF_GRAPH = "left out of int8 by PT2E: {left}"
NOT_ALL = f"{OF_GRAPH}; the rest is given int8, and computed in fp32 by torch.compile"
LINEAR_ALONE = "torchao turns linear layers alone into int8"
WEIGHTS_ALONE = "in this form weights alone are int8, and products are computed in fp32"


@dataclasses.dataclass(frozen=True)
class Operator:
    """One that multiplies: where it stands in the model, the numbers that it ran in, and why, if they are not
    the form's.
    """

    name: str
    numbers: str
    why: str = ""


def effect(form: Form, handle: object, path: Path, run: Callable[[], Any]) -> list[Operator]:
    """The operators that multiply, as the runtime reports them; none where it does not tell.

    Args:
        handle: the runtime's own object, of `vivace.serving.serve`.
        path: the form's file.
        run: calls it once.
    """
    if form.runtime == "openvino":
        return list(_of_openvino(form, handle, path))
    if form.runtime == "onnx":
        return list(_of_onnx(path))
    if form.runtime == "torch":
        return list(_of_torch(run))
    called = list(_called(run))
    num_stayed = sum(numbers != form.numbers for _, numbers in called)
    why = _why_of_compiled(form, handle, num_stayed) if num_stayed else ""
    return [Operator(name, numbers, why) for name, numbers in called]


def told(form: Form, ran: Sequence[Operator]) -> dict[str, Any]:
    """Of operators that ran: under ``effect`` how many in which numbers, under ``stayed`` those that did not
    run in the form's numbers, each with its name, its numbers and why.
    """
    stayed = [dataclasses.asdict(one) for one in ran if one.numbers != form.numbers]
    return {
        "effect": dict(Counter(one.numbers for one in ran)),
        "stayed": [] if form.numbers == "fp32" else stayed,
    }


def multiplies(kind: str) -> bool:
    """Is this an operator of matrix products or convolutions? One that converts is not."""
    name = kind.lower().replace("convert", "")
    return any(mark in name for mark in MULTIPLY)


def _of_openvino(form: Form, compiled: Any, path: Path) -> Iterator[Operator]:
    """By the precision that each operator of the compiled model was given.

    A product that was fused with what stands around it (``Subgraph``) is known by its name there.
    """
    names = _names_in(path.parent / form_named(f"{form.further}onnx_fp32").file)
    in_file = _quantized_in_openvino(path) if form.numbers == "int8" else {}
    for node in compiled.get_runtime_model().get_ops():
        facts = node.get_rt_info()
        kind, numbers, layers = (
            str(facts[key].astype(str)) if key in facts else ""
            for key in ("layerType", "runtimePrecision", "originalLayersNames")
        )
        if not multiplies(kind) and not (kind == "Subgraph" and "matmul" in layers.lower()):
            continue
        parts = [layer.partition("/")[0] for layer in layers.split(",")]
        name = next((names[part] for part in parts if part in names), parts[0])
        given = [in_file[part] for part in parts if part in in_file]
        why = LEFT_OUT if given and not all(given) else NO_KERNEL if given else NOT_TOLD
        told_so = why.format(runtime="OpenVINO", quantizer="NNCF")
        yield Operator(name, NUMBERS.get(numbers.lower(), numbers), told_so)


def _quantized_in_openvino(path: Path) -> dict[str, bool]:
    """Of each operator of a file that multiplies: is it given int8?"""
    import openvino

    found = {}
    for node in openvino.Core().read_model(str(path)).get_ops():
        if multiplies(node.get_type_name()):
            given = [_is_given_int8(node.input_value(place)) for place in range(2)]
            found[node.get_friendly_name().partition("/")[0]] = all(given)
    return found


def _is_given_int8(value: Any) -> bool:
    """Is it rounded to int8, or are these weights that are stored so?"""
    node = value.get_node()
    while node.get_type_name() in MOVES:
        node = node.input_value(0).get_node()
    if node.get_type_name() == "FakeQuantize":
        return True
    while node.get_type_name() in (*MOVES, *UNPACKS):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in ("i8", "u8")


def _of_onnx(path: Path) -> Iterator[Operator]:
    """By the kinds of operators that ONNX Runtime makes of the file."""
    import onnx
    import onnxruntime

    names = _names_in(path)
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    made_by = {value: node.op_type for node in nodes for value in node.output}
    given_int8 = {
        node.name: all(made_by.get(value) == "DequantizeLinear" for value in node.input[:2]) for node in nodes
    }
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        options.log_severity_level = 3
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        optimized = onnx.load(options.optimized_model_filepath).graph.node
    for node in optimized:
        if not multiplies(node.op_type):
            continue
        known = [name for name in given_int8 if name == node.name or node.name.startswith(f"{name}_")]
        own = max(known, key=len, default="")  # what was fused has its name and a number
        why = NOT_TOLD if not own else NO_KERNEL if given_int8[own] else LEFT_OUT
        told_so = why.format(runtime="ONNX Runtime", quantizer="ONNX Runtime's quantizer")
        numbers = "int8" if node.op_type in ONNX_INT8 else "fp32"
        yield Operator(names.get(own, node.name), numbers, told_so)


def _names_in(path: Path) -> dict[str, str]:
    """Where each operator of a file of ONNX stands in the person's model, by its name and what it returns."""
    import onnx

    if not path.exists():
        return {}
    found: dict[str, str] = {}
    for node in onnx.load(str(path), load_external_data=False).graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
        if scopes:
            *modules, operator = ast.literal_eval(scopes)
            name = _placed(modules[-1] if modules else "", operator)
            found |= dict.fromkeys((node.name, *node.output), name)
    return found


def _placed(module: str, operator: str) -> str:
    """An operator by the person's module that it stands in; ``model`` is theirs, in the flat one."""
    inner = module.removeprefix("model").removeprefix(".")
    return f"{inner} ({operator})" if inner else operator


def _called(run: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    """The operators that compiled code calls, with what they are given, and the numbers of that; what it
    computes itself is not told.
    """
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        trace = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            run()
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        name, facts = str(event.get("name")), event.get("args", {})
        given = next((TYPES[one] for one in facts.get("Input type", ()) if one in TYPES), None)
        shapes = [shape for shape in facts.get("Input Dims", ()) if shape and len(shape) > 1][:2]
        placed = " by ".join("x".join(map(str, shape)) for shape in shapes)
        if name.startswith(COMPILED_INT8):
            yield f"{name} of {placed}", "int8"
        elif name.startswith(COMPILED) and given:
            yield f"{name} of {placed}", given


def _why_of_compiled(form: Form, handle: Any, num_stayed: int) -> str:
    """Why so many operators of a compiled form did not run in its numbers."""
    if form.numbers != "int8":
        return CONVERTED
    if form.weights_only:
        return WEIGHTS_ALONE
    if form.kind != "compiled_int8":
        return LINEAR_ALONE
    left = list(left_out_of(handle.graph))
    why = OF_GRAPH if num_stayed <= len(left) else NOT_ALL if left else NO_KERNEL
    return why.format(left=", ".join(left), runtime="torch.compile")


def left_out_of(graph: Graph) -> Iterator[str]:
    """What multiplies in a graph and is not given int8."""
    from torch.fx import Node

    for node in graph.nodes:
        called = node.target.__name__ if callable(node.target) else ""
        if class_of(called) not in MATRIX_CLASSES:
            continue
        if not all(isinstance(each, Node) and "dequantize" in str(each.target) for each in node.args[:2]):
            stack = list(node.meta.get("nn_module_stack", {}).values())
            yield _placed(stack[-1][0] if stack else "", node.name)


def _of_torch(run: Callable[[], Any]) -> Iterator[Operator]:
    """By the dtype of the first tensor of each operator that is dispatched."""
    from torch.utils.module_tracker import ModuleTracker

    from vivace.serving.counting import Counting

    with ModuleTracker() as tracker, Counting(tracker) as counting:
        run()
    for module, operator, numbers in counting.found:
        flat = module.removeprefix("Bfloat16.model.").removeprefix("Flat.")
        yield Operator(_placed(flat, operator), numbers, CONVERTED)
