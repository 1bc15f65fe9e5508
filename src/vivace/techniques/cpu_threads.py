"""Run operators on another number of CPU threads than PyTorch chose."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique
from vivace.tensors.settings import hold
from vivace.words import count


@dataclasses.dataclass(frozen=True)
class CpuThreads(Technique):
    """Threads inside of an operator: more share the work, fewer wait less for each other.

    The sums of a reduction are cut at other places, hence rounding.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.ROUNDING,
        summary="another number of CPU threads inside of operators",
        source="https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html",
        unit_roundoff=2.0**-24,
        devices=("cpu",),
        measured_on=("cpu",),
    )

    num_threads: Annotated[int, Field(ge=1)] = 1

    def apply(self, build: Build) -> None:
        """Set the number; refuse the present one, and more than there are cores to use."""
        import torch

        wanted, before, cores = self.num_threads, torch.get_num_threads(), build.machine.num_cores
        build.require(wanted <= cores, f"num_threads = {wanted}, but only {cores} cores can be used")
        build.require(wanted != before, f"PyTorch already runs on num_threads = {wanted}")
        build.on_close(hold("threads", torch.get_num_threads, torch.set_num_threads, wanted))
        build.notes["cpu_threads"] = before, torch.get_num_threads()

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The numbers of threads before and during the step."""
        before, during = seen.notes["cpu_threads"]
        if during == before:
            raise Refused(f"it changed nothing: PyTorch stays at num_threads = {before}")
        return f"{count(during, 'thread')} instead of {before}"

    def plain(self) -> Plain:
        """PyTorch's own call that sets the number of threads."""
        return Plain(start=(f"torch.set_num_threads({self.num_threads})",))

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """All cores that this rank may use, half of them, and so on down to one, less the present number.

        None where others compute beside us: what threads bring then is no more so when they are done.
        """
        if profile.features.get("crowded"):
            return []
        now = profile.features.get("num_threads")
        counts, cores = [], machine.num_cores // profile.features.get("ranks_here", 1)
        while cores:
            counts.append(cores)
            cores //= 2
        return [cls(num_threads=count) for count in counts if count != now]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At worst the step is as slow as on one thread, at best as fast as the cores together."""
        now = profile.features.get("num_threads", machine.num_cores)
        return (1 / now, max(machine.num_cores / now, 1.5))
