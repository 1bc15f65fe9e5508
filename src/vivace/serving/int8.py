"""Trained models in int8: ranges of activations are learnt from the person's own samples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.calls import Calls
from vivace.serving.files import input_names, traced
from vivace.serving.material import Material, Shapes
from vivace.serving.serve import without_telemetry

SAMPLES = 256  # from which ranges are learnt


def _samples(calls: Calls) -> Iterator[list[Any]]:
    """Calls of one sample, or, where samples differ in length, the calls as they were made."""
    if calls.ragged:
        yield from calls.first(SAMPLES)
        return
    for number in range(min(SAMPLES, sum(calls.rows))):
        yield calls.sample(1, number)


def for_onnx(base: Path, material: Material, path: Path) -> None:
    """Quantize a file of ONNX: quantize and dequantize around what multiplies, channel by channel."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.getLogger().setLevel(logging.ERROR)  # it advises to do what is done here
    names = input_names(len(material.calls.dynamic))
    feeds = iter([dict(zip(names, arrays, strict=True)) for arrays in _samples(material.calibration)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            """The next call, as the calibrator asks for it."""
            return next(feeds, None)

    prepared = path.with_suffix(".prepared")
    try:
        quant_pre_process(str(base), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
    finally:
        prepared.unlink(missing_ok=True)


def for_openvino(base: Path, material: Material, path: Path) -> None:
    """Quantize by NNCF, with the scheme for transformers where the model has attention."""
    without_telemetry()
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    names = input_names(len(material.calls.dynamic))
    model = openvino.convert_model(str(base))
    known = {name for entry in model.inputs for name in entry.names}
    feeds = [
        {name: array for name, array in zip(names, arrays, strict=True) if name in known}
        for arrays in _samples(material.calibration)
    ]
    scheme = nncf.ModelType.TRANSFORMER if _has_attention(material.flat) else None
    quantized = nncf.quantize(model, nncf.Dataset(feeds), subset_size=len(feeds), model_type=scheme)
    openvino.save_model(quantized, str(path), compress_to_fp16=False)


def _has_attention(model: nn.Module) -> bool:
    """Transformers normalize layer by layer; convolutional networks seldom do."""
    kinds = {type(module) for module in model.modules()}
    return nn.MultiheadAttention in kinds or (nn.LayerNorm in kinds and nn.Conv2d not in kinds)


def in_graph(material: Material) -> Any:
    """The model with int8 around what multiplies, to be compiled: alone it is slower than fp32."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    example = material.example

    def write(shapes: Shapes) -> Any:
        return torch.export.export(material.flat, example, dynamic_shapes=(shapes,), strict=True)

    with torch.no_grad():
        program = traced(material, write).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(program, quantizer)
        for arrays in _samples(material.calibration):
            prepared(*map(torch.from_numpy, arrays))
        return convert_pt2e(prepared)


def by_weights(material: Material, *, dynamic: bool) -> nn.Module:
    """Linear layers with weights in int8; `dynamic`: activations too, with ranges taken in each call."""
    from torchao import quantization

    kind = (
        quantization.Int8DynamicActivationInt8WeightConfig if dynamic else quantization.Int8WeightOnlyConfig
    )
    model = copy.deepcopy(material.flat)
    quantization.quantize_(model, kind())
    if list(map(type, model.parameters())) == list(map(type, material.flat.parameters())):
        raise Refused("the model has no linear layer that torchao turns into int8")
    return model
