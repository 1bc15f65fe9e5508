"""A copy of the model that runs the last batch forward and backward, and the timing of two ways to do so."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vivace.profiling.record import gpus
from vivace.tensors.trees import map_tensors, tensors
from vivace.torch_internals.modules import convert

PAIRS, BLOCK_SECONDS, BUDGET_SECONDS = 7, 0.08, 4.0
LONGEST_BLOCK = 5.0  # times as long as a block is meant to be


class Shadow:
    """A copy of a module with the arguments of one call, ready to run forward and backward."""

    def __init__(
        self, module: nn.Module, call: tuple[Any, Any], autocast: tuple[str, bool, torch.dtype]
    ) -> None:
        self.module = copy.deepcopy(module)
        self.arguments, self.keywords = map_tensors(call, lambda tensor: tensor.detach().clone())
        self.autocast = autocast

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function to every weight, buffer and argument."""
        convert(self.module, function)
        self.arguments, self.keywords = map_tensors((self.arguments, self.keywords), function)

    def losses(self) -> list[torch.Tensor]:
        """The means of what the module returns, as far as that leads back to what is trained."""
        device, enabled, dtype = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            result = self.module(*self.arguments, **self.keywords)
            found = (t for t in tensors(result) if t.requires_grad and t.is_floating_point())
            return [tensor.float().mean() for tensor in found]

    def runner(self, context: Callable[[], Any] = contextlib.nullcontext) -> Callable[[], None]:
        """Forward and backward once, inside a context. Fails where there are no `losses`."""

        def step() -> None:
            with context():
                torch.stack(self.losses()).sum().backward()  # type: ignore[no-untyped-call]
            self.module.zero_grad(set_to_none=True)

        return step


class Allowance:
    """The seconds for which experiments may keep the script waiting, all of them together."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.end = self.began + seconds

    @property
    def is_spent(self) -> bool:
        """May no further experiment begin?"""
        return time.perf_counter() >= self.end

    @property
    def used_seconds(self) -> float:
        """How long the script has been waiting."""
        return time.perf_counter() - self.began


def compare(
    as_it_is: Callable[[], None], without: Callable[[], None], allowance: Allowance
) -> dict[str, Any]:
    """Alternate blocks of both; seconds a run as it is, and how many times faster the other was."""
    for _ in range(2):  # more threads on a busy machine may take a hundred times as long: the slower counts
        seconds = max(_block(as_it_is, 1), _block(without, 1), 1e-5)
    runs = max(1, round(BLOCK_SECONDS / seconds))
    deadline = min(time.perf_counter() + BUDGET_SECONDS, allowance.end)
    before: list[float] = []
    after: list[float] = []
    while len(before) < PAIRS and (time.perf_counter() < deadline or len(before) < 3):
        before.append(_block(as_it_is, runs))
        after.append(_block(without, runs))
    return {"ratios": [a / b for a, b in zip(before, after, strict=True)], "seconds": min(before)}


def _block(function: Callable[[], None], runs: int) -> float:
    """Mean seconds of one run, of fewer where the machine has become much slower meanwhile."""
    gpus.wait()
    begin, done = time.perf_counter(), 0
    while done < runs and time.perf_counter() - begin < LONGEST_BLOCK * BLOCK_SECONDS:
        function()
        done += 1
    gpus.wait()
    return (time.perf_counter() - begin) / done


@contextlib.contextmanager
def same_random_streams() -> Iterator[None]:
    """Python's, numpy's and torch's random numbers go on afterwards as if nothing had been drawn."""
    state = random.getstate()
    numpy_random = None
    with contextlib.suppress(ImportError):
        import numpy

        numpy_random = numpy.random.get_state()
    try:
        with torch.random.fork_rng(gpus.used()):  # else it starts CUDA on every GPU that there is
            yield
    finally:
        random.setstate(state)
        if numpy_random is not None:
            numpy.random.set_state(numpy_random)
