"""Making a form of a trained model: its file, or the callable that runs in this process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivace.serving import files, int8
from vivace.serving.folding import folded
from vivace.serving.forms import COMPILED, Form, form_named
from vivace.serving.material import Material
from vivace.torch_internals.compiler import compile_package, freeze_weights

BASE = "onnx_fp32"  # which the forms of ONNX Runtime and OpenVINO are made from


def write(form: Form, material: Material, folder: Path) -> int:
    """Write the form's file into a folder; its bytes. Raises ChildFailed where a maker of files cannot."""
    path, base = folder / form.file, folder / form_named(f"{form.further}{BASE}").file
    if form.runtime in ("onnx", "openvino") and not base.exists():
        unfinished = folder / "making.onnx"
        files.to_onnx(material, unfinished)
        unfinished.replace(base)
    if form.runtime == "onnx" and form.numbers == "int8":
        int8.for_onnx(base, material, path)
    elif form.runtime == "openvino" and form.numbers == "int8":
        int8.for_openvino(base, material, path)
    elif form.runtime == "openvino":
        files.to_openvino(base, path)
    elif form.runtime == "aoti":
        freeze_weights()
        compile_package(files.exported(material, in_numbers(form, material)), str(path))
    elif form.in_process:
        files.to_torch(files.exported(material, in_numbers(form, material)), path)
    return sum(part.stat().st_size for part in files.parts(path))


def in_process(form: Form, material: Material) -> Any:
    """The form as a callable from tensors to a tuple of tensors."""
    model = in_numbers(form, material)
    if form.runtime != "inductor":
        return model
    if form.name == COMPILED:
        return torch.compile(model)
    freeze_weights()
    return torch.compile(model, dynamic=material.calls.ragged)


def in_numbers(form: Form, material: Material) -> Any:
    """The flat model in the numbers of a form, not compiled yet."""
    flat = folded(material.flat) if form.folded else material.flat
    if form.numbers == "bf16":
        return Bfloat16(flat, channels_last=material.images).eval()
    if form.kind == "compiled_int8":
        return int8.in_graph(material)
    if form.numbers == "int8":
        return int8.by_weights(material, dynamic=form.kind == "torchao_int8")
    return flat


class Bfloat16(nn.Module):
    """A model whose weights, buffers and inputs are bfloat16, and whose outputs are as before."""

    def __init__(self, model: nn.Module, *, channels_last: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(torch.bfloat16)
        self.channels_last = channels_last
        if channels_last:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.dim() == 4:  # Module.to would ask it of those of five, which have no such order
                    tensor.data = tensor.data.to(memory_format=torch.channels_last)

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the model returns, in fp32 where it returned bfloat16."""
        found = self.model(*(self._given(tensor) for tensor in flat))
        return tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in found)

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if tensor.dim() == 4 and self.channels_last:
            return tensor.to(torch.bfloat16, memory_format=torch.channels_last)
        return tensor.to(torch.bfloat16)
