"""Opens a model file with its runtime alone, and runs it. A script too: it imports nothing of the person's.

    python serve.py RUNTIME PATH NUMBERS THREADS INPUTS.npz OUTPUTS.npz

reads the calls of INPUTS, writes what the model returns for each, and prints versions as JSON. Arrays are
called ``call.place``.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy

Arrays = list[numpy.ndarray[Any, Any]]
Run = Callable[[Sequence[numpy.ndarray[Any, Any]]], Arrays]
Opened = tuple[Run, Any]
"""A function from a call's arrays to the returned ones, and the runtime's own object."""

PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino", "torch": "torch", "aoti": "torch"}
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}  # what OpenVINO computes in where it may choose


def opened(runtime: str, path: str, numbers: str, threads: int) -> Opened:
    """The model of a file, on so many threads of the processor.

    Args:
        runtime: ``onnx``, ``openvino``, ``torch`` (an exported program) or ``aoti`` (a compiled package).
        numbers: ``fp32``, ``bf16`` or ``int8``, which the file was made for.
    """
    openers = {"onnx": _onnx, "openvino": _openvino, "torch": _torch, "aoti": _aoti}
    return openers[runtime](path, numbers, threads)


def place_of(name: str) -> int:
    """The place of an input that is called ``input_3``; a runtime may have dropped one that does nothing."""
    return int(name.rpartition("_")[2])


def _onnx(path: str, numbers: str, threads: int) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    places = {entry.name: place_of(entry.name) for entry in session.get_inputs()}

    def run(arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        return list(session.run(None, {name: arrays[place] for name, place in places.items()}))

    return run, session


def _openvino(path: str, numbers: str, threads: int) -> Opened:
    import openvino

    # Left to itself it computes models of fp32 in bf16 where the processor has it.
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[numbers],
        "INFERENCE_NUM_THREADS": str(threads),
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    request = compiled.create_infer_request()
    places = {entry.any_name: place_of(entry.any_name) for entry in compiled.inputs}
    count = len(compiled.outputs)

    def run(arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        found = request.infer({name: arrays[place] for name, place in places.items()}, share_inputs=True)
        return [found[place] for place in range(count)]

    return run, compiled


def _torch(path: str, numbers: str, threads: int) -> Opened:
    import torch

    torch.set_num_threads(threads)
    return in_torch(torch.export.load(path).module())


def _aoti(path: str, numbers: str, threads: int) -> Opened:
    import torch

    from vivace.torch_internals.compiler import load_package

    torch.set_num_threads(threads)
    return in_torch(load_package(path))


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
    runtime, path, numbers, threads, inputs, outputs = sys.argv[1:]
    run, _ = opened(runtime, path, numbers, int(threads))
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
    print(json.dumps({package: importlib.metadata.version(package), "of_the_job": strangers}))


if __name__ == "__main__":
    main()
