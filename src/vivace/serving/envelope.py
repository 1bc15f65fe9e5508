"""How far apart two outputs may lie that differ by rounding alone, and whether these do.

The envelope comes from shadows: the same model in fp32 with random rounding at every matrix product and
convolution, as `vivace.verify` measures it. What a runtime returns in the same number format must lie
within a few envelopes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

from vivace.serving.values import padding_computed
from vivace.tensors.trees import fields_of
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding

Arrays = Sequence[numpy.ndarray[Any, Any]]
SEEDS = 4
LIMIT = 8.0  # envelopes, as for a training's evaluation
FLOOR = 1 / 16  # of one rounding: what moves where no product comes before it, as sums in another order do
REPEATABLE = 1e-3  # of an output's size: what two calls of one model may differ by
ROUNDOFF = {"fp32": FINEST_ROUNDOFF, "bf16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Check:
    """An output of the model or of a layer: its distance from the reference in envelopes; or why it cannot be
    compared. `share` is the distance as a share of how far the output's own numbers lie from their mean.
    """

    output: str
    envelopes: float | None
    largest: float = 0.0  # difference of one element
    problem: str = ""
    share: float = 0.0

    @property
    def kept(self) -> bool:
        """Does it differ by rounding alone?"""
        return not self.problem and self.envelopes is not None and self.envelopes <= LIMIT

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {**dataclasses.asdict(self), "kept": self.kept, "limit": LIMIT}


def shadows(model: nn.Module, calls: Sequence[Arrays], roundoff: float) -> list[float]:
    """For each output the root mean square by which rounding changes it; the largest of all shadows.

    No less than `FLOOR` of rounding the output itself once.
    """
    exact = [run(model, arrays) for arrays in calls]
    found: list[list[float]] = []
    for seed in range(SEEDS):
        with Rounding(roundoff, seed, {}):
            rounded = [run(model, arrays) for arrays in calls]
        found.append([_finite(a, b) for a, b in zip(columns(exact), columns(rounded), strict=True)])
    sizes = [_finite(arrays, [numpy.zeros_like(a) for a in arrays]) for arrays in columns(exact)]
    widest = [max(of_output) for of_output in zip(*found, strict=True)]
    return [max(width, FLOOR * roundoff * size) for width, size in zip(widest, sizes, strict=True)]


def run(model: nn.Module, arrays: Arrays) -> list[numpy.ndarray[Any, Any]]:
    """The model's outputs on the arrays of a call."""
    with torch.no_grad(), padding_computed():
        return [tensor.detach().numpy() for tensor in model(*map(torch.from_numpy, arrays))]


def columns(calls: Sequence[Arrays]) -> list[Arrays]:
    """Of each output all calls' arrays."""
    return [list(arrays) for arrays in zip(*calls, strict=True)]


def distance(ones: Arrays, others: Arrays) -> float:
    """The root mean square of the difference over all elements; infinite where one is, and the other is not
    the same.
    """
    return _size([difference(a, b) for a, b in zip(ones, others, strict=True)])


def _spread(arrays: Arrays) -> float:
    """The standard deviation of all elements; their size where they are all equal."""
    found = numpy.concatenate([_real(one).ravel() for one in arrays])
    found = found[numpy.isfinite(found)]
    if not found.size:
        return 0.0
    return float(found.std()) or float(abs(found[0]))


def _finite(ones: Arrays, others: Arrays) -> float:
    """The same, but for elements whose difference is not finite: a mask's -inf has no rounding."""
    found = [difference(a, b) for a, b in zip(ones, others, strict=True)]
    return _size([numpy.where(numpy.isfinite(apart), apart, 0.0) for apart in found])


def _size(found: Arrays) -> float:
    squares = sum(float(numpy.square(one).sum()) for one in found)
    return float((squares / max(1, sum(one.size for one in found))) ** 0.5)


def difference(
    one: numpy.ndarray[Any, Any], other: numpy.ndarray[Any, Any]
) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
    """Element by element, in double precision; none where both are the same infinity, or no number."""
    one, other = _real(one), _real(other)
    with numpy.errstate(invalid="ignore"):  # infinity minus infinity
        apart = numpy.where((one == other) | (numpy.isnan(one) & numpy.isnan(other)), 0.0, one - other)
    return numpy.where(numpy.isnan(apart), numpy.inf, apart)


def _real(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
    return numpy.stack([array.real, array.imag] if numpy.iscomplexobj(array) else [array]).astype(float)


def compare(
    expected: Sequence[Arrays], found: Sequence[Arrays], envelope: Sequence[float], names: Sequence[str]
) -> list[Check]:
    """A check for each output, in order. An output that is not finite, or of another shape, is a problem."""
    if len(expected) != len(found):
        return [Check(names[0], None, problem=f"{len(found)} calls were answered of {len(expected)}")]
    counts = next(((len(a), len(b)) for a, b in zip(expected, found, strict=True) if len(a) != len(b)), None)
    if counts is not None:
        problem = f"the model returns {counts[0]} tensors, and {counts[1]} came back"
        return [Check(names[0], None, problem=problem)]
    checks = []
    for name, ones, others, width in zip(names, columns(expected), columns(found), envelope, strict=True):
        problem = _problem(ones, others)
        if problem:
            checks.append(Check(name, None, problem=problem))
            continue
        largest = max(
            float(numpy.abs(difference(a, b)).max(initial=0.0)) for a, b in zip(ones, others, strict=True)
        )
        apart = distance(ones, others)
        envelopes = apart / width if width else (0.0 if not apart else float("inf"))
        checks.append(Check(name, envelopes, largest, share=apart / (_spread(ones) or 1.0)))
    return checks


def _problem(ones: Arrays, others: Arrays) -> str:
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return f"its shape is {other.shape} instead of {one.shape}"
        if numpy.isfinite(one).all() and not numpy.isfinite(other).all():
            return "it holds numbers that are not finite"
    return ""


def names_of_inputs(model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """What the tensors of a call are called in the model's ``forward``: ``images``, ``batch['tokens']``."""
    args, kwargs = given
    try:
        known = list(inspect.signature(model.forward).parameters)
    except ValueError:  # a traced model tells no names
        known = []
    named = [known[place] if place < len(known) else f"argument {place}" for place in range(len(args))]
    both = [*zip(named, args, strict=True), *kwargs.items()]
    return [found for name, value in both for found in names_of(value, name)]


def names_of(returned: object, name: str = "output") -> list[str]:
    """What the tensors of a value are called: ``output``, ``output[1]``, ``output['logits']``; in the order
    in which `vivace.tensors.trees.tensors` gives them.
    """
    if isinstance(returned, torch.Tensor):
        return [name]
    if isinstance(returned, (tuple, list)):
        return [found for place, item in enumerate(returned) for found in names_of(item, f"{name}[{place}]")]
    if isinstance(returned, (dict, UserDict)):
        return [found for key, item in returned.items() for found in names_of(item, f"{name}[{key!r}]")]
    fields = fields_of(returned) or ()
    return [found for key in fields for found in names_of(getattr(returned, key), f"{name}.{key}")]
