"""Operations of the kernels for which torch has no formula or a wrong one, and the shapes of convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch


def complete(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments with the defaults that were not passed on: in inference mode they are cut off.

    The positional ones are all given by position.
    """
    more, rest = [], dict(kwargs)
    for argument in schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        more.append(rest.pop(argument.name) if argument.name in rest else argument.default_value)
    return (*args, *more), rest


def named(schema: torch.FunctionSchema, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by the names in the operator's schema."""
    return {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}


def convolution_backward(args: tuple[Any, ...]) -> int:
    """Each gradient as many operations as forward; torch's formula takes groups for one in the weight's."""
    output, inputs, weight = args[:3]
    transposed, mask = args[7], args[10]
    return int(2 * (inputs if transposed else output).numel() * weight[0].numel() * sum(mask[:2]))


def convolution_shape(arguments: dict[str, Any]) -> dict[str, Any]:
    """Groups, channels that a group reads, and how often a place is read, of a convolution's arguments by
    name; nothing of an operator without a weight of its own.
    """
    weight, strides = arguments.get("weight"), arguments.get("stride")
    if not isinstance(weight, torch.Tensor):
        return {}
    stride = math.prod(strides) if isinstance(strides, (list, tuple)) else 1
    return {
        "groups": int(arguments.get("groups") or 1),
        "width": int(weight.shape[1]),
        "window": math.prod(weight.shape[2:]) / max(stride, 1),
    }


def other_flops(kind: str, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Operations of the kernels that torch has no formula for; zero for everything bounded by its bytes."""
    backward = "backward" in name
    if kind == "convolution" and len(inputs) >= 2:  # whole, as inference mode hands it over
        transposed = "transpose" in name
        return int(2 * (inputs[0] if transposed else outputs[0]).numel() * inputs[1][0].numel())
    if kind == "recurrent" and inputs:
        sequence = max((t for t in inputs if t.dim() == 3), key=torch.Tensor.numel, default=inputs[0])
        steps = sequence.shape[:-1].numel()
        weights = sum(t.numel() for t in inputs if t.dim() == 2)
        return (4 if backward else 2) * steps * weights
    if kind == "attention" and len(inputs) >= 3:
        query, key, value = inputs[1:4] if backward else inputs[:3]
        if query.dim() < 3 or key.dim() < 3:
            return 0
        forward = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return int(forward * (2.5 if backward else 1))
    if kind == "matmul" and len(inputs) >= 2:  # matrix times vector, and the CPU's own linear kernels
        weight = max(inputs, key=torch.Tensor.numel)
        rows = outputs[0].numel() // weight.shape[0] if weight.dim() == 2 and weight.shape[0] else 1
        return 2 * weight.numel() * max(rows, 1) * (2 if backward else 1)
    return 0
