"""The reference's numbers to the bit, in this process and in a fresh one in which no technique has been.

What leaves no trace that can be named still shows here: in numbers that a fresh process does not give.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import torch

from vivace.errors import JobError
from vivace.inspection import inspect
from vivace.job import Job, JobFunction
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.session.opening import start, training_device
from vivace.technique import Technique
from vivace.verifying.states import repeatable

STEPS = 3
SECONDS = 300.0  # for a fresh process, on a machine that others use too
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}

Bits = dict[str, torch.Tensor]


@cache
def this_machine() -> Machine:
    """The facts of this machine, which are read once."""
    return inspect()


def bits(job: Job) -> Bits:
    """Losses and trained weights of a few steps of the reference from seed 0, by name."""
    machine = this_machine()
    with repeatable(training_device(machine).type == "cuda"), start(job, Plan(), machine) as session:
        losses = [session.step(batch).detach() for batch in islice(session.batches(job.data()), STEPS)]
        weights = [model.state_dict() for model in session.build.models]
    return {
        **{f"the loss of step {step}": loss for step, loss in enumerate(losses)},
        **{f"'{key}' of model {i}": value for i, state in enumerate(weights) for key, value in state.items()},
    }


def difference(seen: Bits, wanted: Bits) -> str:
    """The first number that differs, with what it was and is; empty where all bits are equal."""
    if seen.keys() != wanted.keys():
        return f"other numbers: {', '.join(sorted(seen.keys() ^ wanted.keys()))}"
    other = [name for name, value in wanted.items() if not torch.equal(seen[name], value)]
    return f"other bits: {other[0]} was {wanted[other[0]]}, is {seen[other[0]]}" if other else ""


def fresh_bits(build_job: Callable[[], Job]) -> Bits | None:
    """`bits` of a fresh process that has the threads and the default dtype of this one, made once for them.

    None where the job cannot be sent to one, or gives other bits in each.
    """
    return _fresh(build_job, torch.get_num_threads(), str(torch.get_default_dtype()))


@cache
def _fresh(build_job: Callable[[], Job], threads: int, dtype: str) -> Bits | None:
    source = _Alone(JobFunction(build_job))  # and not a Job that this process has built
    try:
        source.body()
    except JobError:
        return None
    one, other = (_asked(source, threads, dtype) for _ in range(2))
    return None if difference(one, other) else one


def _asked(source: Source, threads: int, dtype: str) -> Bits:
    arguments = {"threads": threads, "dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bits.pt")
        with Child("vivace.testing.fresh:Fresh", source, arguments) as child:
            child.ask("write", SECONDS, path=str(path))
        found: Bits = torch.load(path, map_location=training_device(this_machine()), weights_only=True)
    return found


class _Alone(Source):
    """A job by itself: importing a technique may leave something behind, too."""

    def techniques(self) -> list[type[Technique]]:
        return []


class Fresh:
    """The fresh process's side; see `vivace.processes.child`."""

    def __init__(self, job: JobFunction, threads: int, dtype: str) -> None:
        self.job = job
        torch.set_num_threads(threads)
        torch.set_default_dtype(DTYPES[dtype])

    def write(self, path: str) -> None:
        """Write into a file the bits of the job as it is built here."""
        torch.save(bits(self.job()), path)
