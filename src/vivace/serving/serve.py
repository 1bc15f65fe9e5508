"""Opens a model file with its runtime alone, and runs it. A script too: it imports nothing of the person's.

    python serve.py RUNTIME PATH NUMBERS THREADS INPUTS.npz OUTPUTS.npz VALUES

reads the calls of INPUTS, writes what the model returns for each, and prints versions as JSON. Arrays are
called ``call.place``. VALUES is a JSON list of names: if it is not empty, these values are written instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from vivace.processes.zygote import die_with_parent

Arrays = list[numpy.ndarray[Any, Any]]
Run = Callable[[Sequence[numpy.ndarray[Any, Any]]], Arrays]
Names = Sequence[str]
Opened = tuple[Run, Any]
"""A function from a call's arrays to the returned ones, and the runtime's own object."""

PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino", "torch": "torch", "aoti": "torch"}
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}  # what OpenVINO computes in where it may choose


def opened(runtime: str, path: str, numbers: str, threads: int, values: Names = ()) -> Opened:
    """The model of a file, on so many threads of the processor.

    Args:
        runtime: ``onnx``, ``openvino``, ``torch`` (an exported program) or ``aoti`` (a compiled package).
        numbers: ``fp32``, ``bf16`` or ``int8``, which the file was made for.
        values: names of values that are to be returned instead of the outputs, in the places of those that
            are there; not of ``aoti``, whose code keeps none.
    """
    openers = {"onnx": _onnx, "openvino": _openvino, "torch": _torch, "aoti": _aoti}
    return openers[runtime](path, numbers, threads, values)


def place_of(name: str) -> int:
    """The place of an input that is called ``input_3``; a runtime may have dropped one that does nothing."""
    return int(name.rpartition("_")[2])


def _onnx(path: str, numbers: str, threads: int, values: Names) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    model = _onnx_with(path, values) if values else path
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    places = {entry.name: place_of(entry.name) for entry in session.get_inputs()}

    names = list(dict.fromkeys(values)) or [entry.name for entry in session.get_outputs()]

    def run(arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        given = {name: arrays[place] for name, place in places.items()}
        found = dict(zip(names, session.run(names, given), strict=True))
        return [found[name] for name in values or names]

    return run, session


def _onnx_with(path: str, values: Names) -> bytes:
    """A copy of a file that has these values as outputs too."""
    import onnx

    model = onnx.load(path)
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in dict.fromkeys(values) if name not in known
    )
    return bytes(model.SerializeToString())


def without_telemetry() -> None:
    """Let OpenVINO and NNCF send nothing home, as OpenVINO does when it is imported: without the package that
    would, they do not.
    """
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


def _openvino(path: str, numbers: str, threads: int, values: Names) -> Opened:
    without_telemetry()
    import openvino

    # Left to itself it computes models of fp32 in bf16 where the processor has it.
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[numbers],
        "INFERENCE_NUM_THREADS": str(threads),
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Core().read_model(path)
    if values:
        known = {name for output in model.outputs for name in output.names}
        model.add_outputs([name for name in dict.fromkeys(values) if name not in known])
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    places = {entry.any_name: place_of(entry.any_name) for entry in compiled.inputs}
    wanted: Sequence[Any] = list(values) or range(len(compiled.outputs))

    def run(arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        found = request.infer({name: arrays[place] for name, place in places.items()}, share_inputs=True)
        return [found[each] for each in wanted]

    return run, compiled


def _torch(path: str, numbers: str, threads: int, values: Names) -> Opened:
    import torch

    from vivace.torch_internals.compiler import know_int8

    torch.set_num_threads(threads)
    if numbers == "int8":
        know_int8()
    module = torch.export.load(path).module()
    if not values:
        return in_torch(module)

    def inner(*given: Any) -> list[Any]:
        found, _ = values_of(module, given)
        return [found[name] for name in values]

    return in_torch(inner)


def _aoti(path: str, numbers: str, threads: int, values: Names) -> Opened:
    import torch

    from vivace.torch_internals.compiler import load_package

    torch.set_num_threads(threads)
    return in_torch(load_package(path))


def names_in(runtime: str, path: str) -> set[str]:
    """What the values of a file are called; none where its runtime does not keep them."""
    if runtime == "onnx":
        import onnx

        nodes = onnx.load(path, load_external_data=False).graph.node
        return {name for node in nodes for name in node.output}
    if runtime == "openvino":
        without_telemetry()
        import openvino

        ports = [port for node in openvino.Core().read_model(path).get_ops() for port in node.outputs()]
        return {name for port in ports for name in port.names}
    if runtime == "torch":
        import torch

        return {node.name for node in torch.export.load(path).module().graph.nodes}
    return set()


def values_of(module: Any, given: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """The floating-point tensors that a traced module computes, by their names, and what it returns."""
    import torch

    found: dict[str, Any] = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            """Run one operator, and keep a copy of what it gives."""
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[n.name] = value.detach().clone()
            return value

    returned = Noting(module).run(*given)
    return found, returned


def in_torch(model: Any) -> Opened:
    """A callable from tensors to tensors as one from arrays to arrays."""
    import torch

    def run(arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        with torch.no_grad():
            returned = model(*map(torch.from_numpy, arrays))
        return [tensor.numpy() for tensor in returned]

    return run, model


def main() -> None:
    """Serve the calls of a file."""
    die_with_parent(os.getppid())
    runtime, path, numbers, threads, inputs, outputs, wanted = sys.argv[1:]
    choices = json.loads(wanted)
    there = names_in(runtime, path) if choices else set()
    told = [next((name for name in names if name in there), "") for names in choices]
    run, _ = opened(runtime, path, numbers, int(threads), [name for name in told if name])
    with numpy.load(inputs, allow_pickle=False) as file:
        calls: dict[int, dict[int, Any]] = {}
        for name in file.files:
            number, place = map(int, name.split("."))
            calls.setdefault(number, {})[place] = file[name]
    returned = {}
    for number, places in sorted(calls.items()):
        for place, array in enumerate(run([places[k] for k in sorted(places)])):
            returned[f"{number}.{place}"] = array
    numpy.savez(outputs, **returned)  # type: ignore[arg-type]
    strangers = sorted(name for name in sys.modules if name.startswith("vivace_job_"))
    package = PACKAGES[runtime]
    facts: dict[str, Any] = {package: importlib.metadata.version(package), "of_the_job": strangers}
    if choices:
        facts["told"] = [place for place, name in enumerate(told) if name]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
