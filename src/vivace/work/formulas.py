"""Operations of a call: by torch's formulas where it has right ones, else by those here; and the shapes of
convolutions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import Operator, dense_parts, schema_of

_WEIGHTS = re.compile(r"^(weight\d?|params|w_[ih]h)$")  # of recurrent operators
# Whose first query sees the first key alone; the kernels of other names begin elsewhere.
_FROM_THE_FIRST_KEY = re.compile("^_?scaled_dot_product")


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


def operations(
    func: Operator, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
) -> int:
    """Operations of a call whose arguments are `complete`; zero for everything bounded by its bytes.

    A multiply-add is two, of complex numbers eight. A sparse matrix counts with the numbers that it holds.
    Of attention that is causal the weights count that are not zero.
    """
    schema = schema_of(func)
    name, given = schema.name.rpartition("::")[2], named(schema, args)
    formula = flop_registry.get(func.overloadpacket)
    if name == "convolution_backward":
        flops = _convolution_backward(args)
    elif formula is not None:
        flops = int(formula(*args, **kwargs, out_val=result))
    else:
        flops = _other(kind, name, given, [*tensors(args)], [*tensors(result)])
    if kind == "matmul":
        factors = [*tensors(args)]
        if "add" in name and "sampled" not in name:  # what is added is no factor
            factors = factors[1:]
        for factor in factors:
            if len(parts := dense_parts(factor)) > 1:
                flops = flops * parts[-1].numel() // max(factor.numel(), 1)
        return flops * 4 if any(factor.is_complex() for factor in factors) else flops
    if kind == "attention" and given.get("is_causal") and _FROM_THE_FIRST_KEY.match(name):
        return of_causal(flops, given["query"].shape[-2], given["key"].shape[-2])
    return flops


def of_causal(flops: int, num_queries: int, num_keys: int) -> int:
    """Of attention's operations those of causal attention, where each query sees the keys up to its place."""
    early = min(num_queries, num_keys)
    seen = early * (early + 1) // 2 + (num_queries - early) * num_keys
    return flops * seen // max(num_queries * num_keys, 1)


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Each gradient as many operations as forward; torch's formula takes groups for one in the weight's."""
    output, inputs, weight = args[:3]
    transposed, mask = args[7], args[10]
    return int(2 * (inputs if transposed else output).numel() * weight[0].numel() * sum(mask[:2]))


def convolution_shape(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Groups, channels that a group reads, and how often a place is read, of a convolution's operator and its
    arguments by name; nothing of an operator without a weight of its own.
    """
    weight, strides = arguments.get("weight"), arguments.get("stride")
    if not isinstance(weight, torch.Tensor):
        return {}
    stride = math.prod(strides) if isinstance(strides, (list, tuple)) else 1
    return {
        "groups": int(arguments.get("groups") or (len(weight) if "depthwise" in name else 1)),
        "width": int(weight.shape[1]),
        "window": math.prod(weight.shape[2:]) / max(stride, 1),
    }


def _other(
    kind: str, name: str, given: dict[str, Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> int:
    """Operations of the kernels that torch has no formula for, of dense matrices."""
    backward = "backward" in name
    if kind == "convolution" and len(inputs) >= 2 and outputs:  # whole, as inference mode hands it over
        transposed = "transpose" in name
        return int(2 * (inputs[0] if transposed else outputs[0]).numel() * inputs[1][0].numel())
    if kind == "recurrent":
        return (4 if backward else 2) * _recurrent(given)
    if kind == "attention" and len(inputs) >= 3:
        query, key, value = inputs[1:4] if backward else inputs[:3]
        if query.dim() < 3 or key.dim() < 3:
            return 0
        forward = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return int(forward * (2.5 if backward else 1))
    if kind == "matmul" and len(inputs) >= 2 and outputs:
        return 2 * _product(name, given, inputs, outputs[0])
    return 0


def _recurrent(given: dict[str, Any]) -> int:
    """Multiply-adds of a forward pass: each weight once for each step of each sequence. Operators that only
    finish the gates have no weights.
    """
    weights = [t for name, value in given.items() if _WEIGHTS.match(name) for t in tensors(value)]
    if "weight2" in given:  # oneDNN's biases have the shape of weights where there are none
        weights = weights[:2]
    sequence = given.get("input", given.get("data"))
    if not isinstance(sequence, torch.Tensor):
        return 0
    return sequence.shape[:-1].numel() * sum(t.numel() for t in weights if t.dim() == 2)


def _product(name: str, given: dict[str, Any], inputs: Sequence[torch.Tensor], output: torch.Tensor) -> int:
    """Multiply-adds of products of matrices, vectors and batches of them, and of their gradients."""
    if name == "_trilinear":  # three tensors spread over the same axes
        shapes = [_spread(given[f"i{n}"].shape, given[f"expand{n}"]) for n in (1, 2, 3)]
        return math.prod(next((n for n in along if n != 1), 1) for along in zip(*shapes, strict=True))
    if "backward" in name:  # of as many factors as are asked for
        asked = given.get("output_mask") or (True,)
        return inputs[0].numel() * inputs[1].shape[-1] * sum(asked[:2])
    left, right = inputs[1:3] if "add" in name and len(inputs) > 2 else inputs[:2]
    if left.dim() == right.dim() == 2 and output.dim() == 3:  # cut into groups along what is summed
        return left.numel() * right.shape[-1]
    summed = left.shape[-1] if left.dim() else 1
    if name.startswith("addbmm"):  # which adds the products of a batch up
        summed *= len(left)
    elif name == "bilinear":
        summed *= right.shape[-1]
    return output.numel() * summed


def _spread(shape: Sequence[int], places: Sequence[int]) -> list[int]:
    """A shape with axes of one put in."""
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes
