"""Writing a trained model for a runtime. Each function writes one file, made from the flat model."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from vivace.exporting.material import Material


def input_names(count: int) -> list[str]:
    """What inputs are called, so that a runtime that drops one does not shift the others."""
    return [f"input_{place}" for place in range(count)]


def output_names(count: int) -> list[str]:
    """What outputs are called."""
    return [f"output_{place}" for place in range(count)]


def to_onnx(material: Material, path: Path) -> None:
    """A file for ONNX Runtime and whatever else reads ONNX, through torch.export."""
    example = material.example
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own deprecated parts
        count = len(material.flat(*example))
        torch.onnx.export(
            material.flat,
            example,
            str(path),
            input_names=input_names(len(example)),
            output_names=output_names(count),
            dynamic_shapes=(material.shapes,),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def without_telemetry() -> None:
    """Let OpenVINO and NNCF send nothing home, in this process: without the package that would they do not."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


def to_openvino(onnx: Path, path: Path) -> None:
    """OpenVINO's pair of files (``.xml`` and ``.bin``) from a file of ONNX, weights in full precision."""
    without_telemetry()
    import openvino

    openvino.save_model(openvino.convert_model(str(onnx)), str(path), compress_to_fp16=False)


def exported(material: Material) -> torch.export.ExportedProgram:
    """The model as a program of torch's own, free of the person's code."""
    with torch.no_grad():
        return torch.export.export(
            material.flat, material.example, dynamic_shapes=(material.shapes,), strict=False
        )
