"""What operators allocate for themselves while they run, where that is known and large.

A convolution on a CPU copies its inputs into oneDNN's blocked layout and its result out of it, unless they
are channels-last. The sums follow the order of its allocations, as torch's profiler shows them (torch 2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from vivace.torch_internals.tensors import Operator, schema_of

FEW_CHANNELS = 8  # with fewer the input is read as it is


def workspace_bytes(function: Operator, arguments: tuple[Any, ...], result: Any) -> int:
    """The most bytes that one call of an operator holds at a time, its results among them."""
    name = schema_of(function).name
    if name == "aten::convolution":
        inputs, weight = arguments[0], arguments[1]
        if not _blocked(inputs):
            return 0
        return max(_copied(inputs) + _bytes(weight) + _bytes(result), 2 * _bytes(result))
    if name == "aten::convolution_backward":
        gradient, inputs, weight = arguments[:3]
        if not _blocked(inputs):
            return 0
        copies = _bytes(gradient) + _copied(inputs) + 2 * _bytes(weight)
        wanted = arguments[-1]
        own = _bytes(inputs) if wanted[0] else 0
        return max(_bytes(gradient) + _bytes(weight) + own, own + copies)
    return 0


def _blocked(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dim() == 4 and tensor.is_contiguous()


def _copied(tensor: torch.Tensor) -> int:
    return _bytes(tensor) if tensor.shape[1] >= FEW_CHANNELS else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
