"""Writing a trained model for a runtime. Each function writes one file, made from the flat model."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.material import Material, Shapes
from vivace.serving.serve import without_telemetry

Program = TypeVar("Program")


def parts(path: Path) -> list[Path]:
    """A model's file and what belongs to it: OpenVINO keeps the weights in a second one."""
    return sorted(path.parent.glob(f"{path.stem}.*"))


def digest(path: Path) -> str:
    """The sha256 over all parts of a model's file."""
    found = hashlib.sha256()
    for part in parts(path):
        with part.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def input_names(count: int) -> list[str]:
    """What inputs are called, so that a runtime that drops one does not shift the others."""
    return [f"input_{place}" for place in range(count)]


def output_names(count: int) -> list[str]:
    """The names that a file's outputs have, by their place."""
    return [f"output_{place}" for place in range(count)]


def traced(
    material: Material, write: Callable[[Shapes], Program], unrolled: type[nn.RNNBase] = nn.RNNBase
) -> Program:
    """What `write` makes, by `torch.export`, of the dimensions of each input that vary.

    Raises Refused where the lengths are what it fails on, as torch writes the steps of a layer of the kind
    `unrolled` one by one, as many as the traced call has; else whatever it fails on.
    """
    try:
        return write(material.shapes)
    except Exception as error:
        layers = material.flat.model.named_modules()
        found = next((pair for pair in layers if isinstance(pair[1], unrolled)), None)
        if not material.calls.ragged or found is None:
            raise _cause(error) from None
        try:
            write(material.rows)
        except Exception as other:  # of one length, too
            raise _cause(other) from None
        raise Refused(
            f"torch writes the recurrent layer '{found[0]}' ({type(found[1]).__name__}) for one length, "
            "and your batches differ in theirs: pad all of them to one length; an LSTM or a GRU "
            "keeps any length in onnx and openvino"
        ) from error


def _cause(error: Exception) -> BaseException:
    """What ONNX's exporter stumbled over: its own text says how to report it, not what is wrong."""
    if isinstance(error, torch.onnx.OnnxExporterError) and error.__cause__ is not None:
        return error.__cause__
    return error


def to_onnx(material: Material, path: Path) -> None:
    """A file for ONNX Runtime and whatever else reads ONNX, through torch.export."""
    onnx_program(material).save(str(path), external_data=False)


def onnx_program(material: Material) -> Any:
    """What a file of ONNX is written from, with the traced program that it is made of."""
    example = material.example

    def write(shapes: Shapes) -> Any:
        program = torch.onnx.export(
            material.flat,
            example,
            input_names=input_names(len(example)),
            dynamic_shapes=(shapes,),
            dynamo=True,
            verbose=False,
        )
        assert program is not None  # as it is where no file is named
        outputs = program.model.graph.outputs
        for value, name in zip(outputs, output_names(len(outputs)), strict=True):
            value.name = name
        return program

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own deprecated parts
        return traced(material, write, nn.RNN)


def to_openvino(onnx: Path, path: Path) -> None:
    """OpenVINO's pair of files (``.xml`` and ``.bin``) from a file of ONNX, weights in full precision."""
    without_telemetry()
    import openvino

    openvino.save_model(openvino.convert_model(str(onnx)), str(path), compress_to_fp16=False)


def exported(material: Material, model: Any = None) -> torch.export.ExportedProgram:
    """A model of the material's calls, by default its own, as a program free of the person's code."""
    model = material.flat if model is None else model
    is_graph = isinstance(model, torch.fx.GraphModule)  # whose inputs have names each, and are no list

    def write(shapes: Shapes) -> torch.export.ExportedProgram:
        of_model = shapes if is_graph else (shapes,)
        return torch.export.export(model, material.example, dynamic_shapes=of_model, strict=False)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how a recurrent layer holds its weights
        return traced(material, write)


def to_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    """A program in a file that `torch.export.load` reads."""
    torch.export.save(program, str(path))
