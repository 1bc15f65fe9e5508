"""Writing a trained model for a runtime. Each function writes one file, made from the flat model."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.material import Material
from vivace.serving.serve import without_telemetry


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


@contextlib.contextmanager
def tracing(material: Material, unrolled: type[nn.RNNBase] = nn.RNNBase) -> Iterator[None]:
    """Around `torch.export`: Refused where it fails on a layer of the kind `unrolled` and inputs of several
    lengths, as it writes the steps of such a layer one by one, as many as the traced call has.
    """
    try:
        yield
    except Exception as error:
        layers = material.flat.model.named_modules()
        found = next((pair for pair in layers if isinstance(pair[1], unrolled)), None)
        if material.calls.ragged and found is not None:
            raise Refused(
                f"torch writes the recurrent layer '{found[0]}' ({type(found[1]).__name__}) for one length, "
                "and your batches differ in theirs: pad all of them to one length; an LSTM or a GRU "
                "keeps any length in onnx and openvino"
            ) from error
        if isinstance(error, torch.onnx.OnnxExporterError) and error.__cause__ is not None:
            raise error.__cause__ from None  # its own text says how to report it, not what is wrong
        raise


def to_onnx(material: Material, path: Path) -> None:
    """A file for ONNX Runtime and whatever else reads ONNX, through torch.export."""
    onnx_program(material).save(str(path), external_data=False)


def onnx_program(material: Material) -> Any:
    """What a file of ONNX is written from, with the traced program that it is made of."""
    example = material.example
    with tracing(material, nn.RNN), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own deprecated parts
        count = len(material.flat(*example))
        return torch.onnx.export(
            material.flat,
            example,
            input_names=input_names(len(example)),
            output_names=output_names(count),
            dynamic_shapes=(material.shapes,),
            dynamo=True,
            verbose=False,
        )


def to_openvino(onnx: Path, path: Path) -> None:
    """OpenVINO's pair of files (``.xml`` and ``.bin``) from a file of ONNX, weights in full precision."""
    without_telemetry()
    import openvino

    openvino.save_model(openvino.convert_model(str(onnx)), str(path), compress_to_fp16=False)


def exported(material: Material, model: Any = None) -> torch.export.ExportedProgram:
    """A model of the material's calls, by default its own, as a program free of the person's code."""
    model = material.flat if model is None else model
    is_graph = isinstance(model, torch.fx.GraphModule)  # whose inputs have names each, and are no list
    shapes = material.shapes if is_graph else (material.shapes,)
    with tracing(material), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how a recurrent layer holds its weights
        return torch.export.export(model, material.example, dynamic_shapes=shapes, strict=False)


def to_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    """A program in a file that `torch.export.load` reads."""
    torch.export.save(program, str(path))
