"""Settings of PyTorch's CUDA allocator: how freed memory is split, joined and given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Seam, Stage, Technique

FIXED_SEGMENTS = "expandable_segments:False"
COUNTED_STEP = 2  # by then the optimizer has its state


@dataclasses.dataclass(frozen=True)
class Allocator(Technique):
    """Segments that grow in place (`expandable_segments`) leave no holes where sizes vary from step to step.

    Acts on memory that is reserved from now on, which is why every trial has a process of its own. Settings
    left out keep PyTorch's default.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.EXACT,
        summary="CUDA memory in segments that grow, against fragmentation",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
        devices=("cuda",),
        measured_on=("cuda",),
        step_memory="same",
    )

    expandable_segments: bool = True
    max_split_size_mib: Annotated[int, Field(ge=21)] | None = None
    garbage_collection_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    roundup_power2_divisions: Annotated[int, Field(ge=1)] | None = None

    def _text(self) -> str:
        """The settings as the allocator reads them."""
        wanted = {
            "expandable_segments": self.expandable_segments,
            "max_split_size_mb": self.max_split_size_mib,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "roundup_power2_divisions": self.roundup_power2_divisions,
        }
        return ",".join(f"{key}:{value}" for key, value in wanted.items() if value is not None)

    def apply(self, build: Build) -> None:
        """Hand the settings to the allocator, and on close those that it had."""
        import torch

        from vivace.torch_internals import compiler

        backend = torch.cuda.get_allocator_backend()
        build.require(backend == "native", f"the allocator is '{backend}', which has no such settings")
        hand_over, before = compiler.allocator_takes(), compiler.allocator_settings()
        hand_over(self._text())
        # What is not named goes back to PyTorch's default, but for this; of two, the last counts.
        build.on_close(partial(hand_over, ",".join(filter(None, (FIXED_SEGMENTS, before)))))
        build.on_close(torch.cuda.empty_cache)
        torch.cuda.empty_cache()
        steps = [0]

        def step(following: Callable[[Any], Any], batch: Batch) -> Any:
            loss = following(batch)
            steps[0] += 1
            if steps[0] == COUNTED_STEP:
                segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
                build.notes["segments"] = len(segments)
                build.notes["growing_segments"] = sum(bool(s.get("is_expandable")) for s in segments)
            return loss

        build.wrap(Seam.STEP, step)

    def plain(self) -> Plain:
        """The allocator's variable, which it reads when a program starts."""
        return Plain(environment={"PYTORCH_ALLOC_CONF": self._text()})

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Evidence: the number of expandable segments in use."""
        count, growing = seen.notes.get("segments", 0), seen.notes.get("growing_segments", 0)
        if self.expandable_segments and not growing:
            raise Refused("it changed nothing: no segment can grow")
        return f"{growing} of {count} segments can grow; settings {self._text()}"

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Fewer waits for memory, where there are any."""
        return (0.95, 1.02)
