"""Making a form of a trained model: its file, or the callable that runs in this process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivace.compressing.forms import Form
from vivace.exporting import files
from vivace.exporting.material import Material
from vivace.torch_internals.compiler import freeze_weights

BASE = "onnx_fp32.onnx"  # which the forms of ONNX Runtime and OpenVINO are made from


def write(form: Form, material: Material, folder: Path) -> int:
    """Write the form's file into a folder; its bytes."""
    path = folder / form.file
    if form.runtime in ("onnx", "openvino"):
        base = folder / BASE
        if not base.exists():
            files.to_onnx(material, base)
    if form.runtime == "openvino":
        files.to_openvino(base, path)
    return num_bytes(path)


def num_bytes(path: Path) -> int:
    """Of a file with what belongs to it: OpenVINO keeps the weights in a second one."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))


def in_process(form: Form, material: Material) -> Any:
    """The form as a callable from tensors to a tuple of tensors."""
    flat: Any = material.flat
    if form.numbers == "bf16":
        flat = Bfloat16(flat, channels_last=material.images).eval()
    if form.runtime == "compile":
        freeze_weights()
        flat = torch.compile(flat, dynamic=material.calls.ragged)
    return flat


class Bfloat16(nn.Module):
    """A model whose weights, buffers and inputs are bfloat16, and whose outputs are as before."""

    def __init__(self, model: nn.Module, *, channels_last: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(torch.bfloat16)
        self.channels_last = channels_last
        if channels_last:
            self.model.to(memory_format=torch.channels_last)

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
