"""A model layer by layer: what each of its modules returns, and which values of its file are the same.

A file knows nothing of the person's modules. But it is made from a traced program, and a value that exporters
and their optimizers leave in the file keeps the name that it has there. So the program runs once beside the
model: each of its values that lies within rounding of what a module returns is that module's, by whatever
name, and what the file computes under that name is compared with the module. The file has no say in this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving import files
from vivace.serving.calls import Calls, Flat
from vivace.serving.envelope import LIMIT, ROUNDOFF, Arrays, Check, compare, distance, names_of, run, shadows
from vivace.serving.forms import Form
from vivace.serving.making import in_numbers
from vivace.serving.material import Material
from vivace.serving.serve import values_of
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import version_of
from vivace.words import size

ROWS = (1, 2, 3)  # samples of the calls that are compared: few, as all layers' outputs are kept
MOST_BYTES = 2**28  # of the layers' outputs that are kept; one call may take four times as much


def few_calls(calls: Calls) -> list[list[Any]]:
    """Calls of few samples, in batches of several sizes."""
    if not calls.ragged:
        return [calls.sample(rows, sum(ROWS[:place])) for place, rows in enumerate(ROWS)]
    whole = calls.inputs
    return [calls.cut(whole[place % len(whole)], 0, rows) for place, rows in enumerate(ROWS)]


class Layers:
    """The layers of a model on some calls, beside what a file of a form computes.

    `values` are for each layer the names by which its output may stand in the file, `calls` how many calls
    are compared. The `flat` model is called, and the same one in the `material` is traced.

    Raises Refused where there are none, where a call calls others than another, or where their outputs are
    too large.
    """

    def __init__(self, flat: Flat, material: Material, form: Form, calls: Sequence[Arrays]) -> None:
        heard = Heard(flat)
        first = run(heard, calls[0])
        if not first:
            raise Refused("the model is one layer by itself")
        num_bytes = sum(array.nbytes for array in first)
        if num_bytes > 4 * MOST_BYTES:
            raise Refused(f"its layers return {size(num_bytes)} for a sample: that is too much to keep")
        fitting = [sum(ROWS[: place + 1]) * num_bytes <= MOST_BYTES for place in range(len(calls))]
        calls = calls[: max(1, sum(fitting))]
        self.calls = len(calls)
        self.expected = [first, *(run(heard, arrays) for arrays in calls[1:])]
        self.names = heard.names
        self.envelope = shadows(heard, calls, ROUNDOFF["fp32"])
        traced = _traced(material, form, calls)
        self.values = [
            [name for name in traced[0] if self._is(place, [values.get(name) for values in traced])]
            for place in range(len(self.names))
        ]

    def _is(self, place: int, found: Sequence[Any]) -> bool:
        """Are these values what a layer returns?"""
        expected = [arrays[place] for arrays in self.expected]
        if any(b is None or a.shape != b.shape for a, b in zip(expected, found, strict=True)):
            return False
        return distance(expected, found) <= LIMIT * self.envelope[place]

    def checks(self, found: Sequence[Arrays], places: Sequence[int]) -> list[Check]:
        """A check of each layer that the file told, in order; `places` are their numbers."""
        if not places:
            return []
        expected = [[arrays[place] for place in places] for arrays in self.expected]
        names = [self.names[place] for place in places]
        return compare(expected, found, [self.envelope[place] for place in places], names)


class Heard(nn.Module):
    """A model that returns what its modules return, in the order in which they end. `names` are the person's;
    a module that hands on what another returned is left out.
    """

    def __init__(self, flat: Flat) -> None:
        super().__init__()
        self.flat = flat
        self.names: list[str] = []

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of all tensors of floating-point numbers. Raises Refused where another call had others."""
        found = list(self._heard(inputs))
        names = [name for name, _ in found]
        if self.names and names != self.names:
            raise Refused("the model calls other layers for some of your samples than for others")
        self.names = names
        return tuple(tensor for _, tensor in found)

    def _heard(self, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        known: dict[tuple[int, int], torch.Tensor] = {}  # kept alive: an address may be taken again
        calls: Counter[str] = Counter()

        def hear(name: str, returned: object) -> None:
            calls[name] += 1
            called = f"{name} (call {calls[name]})" if calls[name] > 1 else name
            for part, tensor in zip(names_of(returned, called), tensors(returned), strict=True):
                key = (id(tensor), version_of(tensor))  # one that writes in place returns what it was given
                if tensor.is_floating_point() and key not in known:
                    known[key] = tensor
                    found.append((part, tensor.to(torch.float32, copy=True)))

        handles = [
            module.register_forward_hook(lambda *heard, name=name: hear(name, heard[-1]))
            for name, module in self.flat.model.named_modules()
            if name
        ]
        try:
            self.flat(*inputs)
        finally:
            for handle in handles:
                handle.remove()
        yield from found


def _traced(material: Material, form: Form, calls: Sequence[Arrays]) -> list[dict[str, Any]]:
    """Of each call every value of the program that the form's file is made from, by its name in the file."""
    if form.in_process:
        program = files.exported(material, in_numbers(form, material))
    else:
        program = files.onnx_program(material).exported_program
    module = program.module()
    found = []
    for arrays in calls:
        with torch.no_grad():
            values, returned = values_of(module, list(map(torch.from_numpy, arrays)))
        named = zip(files.output_names(len(returned)), returned, strict=True)
        found.append({name: value.numpy() for name, value in (*values.items(), *named)})
    return found
