"""What every export begins with: the trained model, flat, and calls of the person's own to trace it with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vivace.job import Job
from vivace.serving.calls import Calls, Flat, first_call
from vivace.serving.trained import load_trained, untrained
from vivace.tensors.outside import Outside, own_streams

CALIBRATION = "calibration"
Shapes = tuple[dict[int, Any], ...]
ROWS = 4  # samples in the call that is traced: a batch of one would be taken as a constant


@dataclasses.dataclass(frozen=True)
class Material:
    """The flat model of a run, and the recorded calls; `calibration` are those for ranges."""

    flat: Flat
    calls: Calls
    calibration: Calls

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        """The tensors of a call of a few samples."""
        return tuple(map(torch.from_numpy, self.calls.sample(ROWS)))

    @property
    def shapes(self) -> Shapes:
        """For each input the dimensions that vary, as `torch.export` takes them."""
        return tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in self.calls.dynamic)

    @property
    def rows(self) -> Shapes:
        """The same where all lengths but the batch's were the example's."""
        return tuple({dim: shape[dim] for dim in shape if dim == 0} for shape in self.shapes)

    @property
    def images(self) -> bool:
        """Has the model two-dimensional convolutions, for which memory order counts?"""
        return any(isinstance(module, nn.Conv2d) for module in self.flat.modules())


def gather(job: Job, run: str, calls: Path) -> Material:
    """The material of a run whose calls are recorded in the folder `calls`; with no run, of the weights that
    the job begins with.

    Its model was never called: what one keeps of a call, as a mask of its length, a trace takes for a
    constant. So it is built anew, as a copy's hooks may be the first one's. Each build draws the same from
    generators that the person's modules hold, and they are left as they were.
    """
    begun = Outside(own_streams(), [])

    def loaded() -> nn.Module:
        begun.put_back()
        return load_trained(job, Path(run))[0] if run else untrained(job)

    first = first_call(job, loaded())
    flat = Flat(loaded(), first.given, writes=first.writes).eval().requires_grad_(False)
    begun.put_back()
    return Material(flat, Calls.load(calls), Calls.load(calls / CALIBRATION))
