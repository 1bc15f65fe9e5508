"""The child's side of the speed tables: batches wait on the device, so that the step alone is timed."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from vivace.measuring.worker import Worker
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, start
from vivace.tensors.trees import batch_size, map_tensors
from vivace.training.strides import Strides
from vivace.training.watch import Unwatched


class SteadyWorker(Worker):
    """`Worker` over a few placed batches."""

    def open(
        self, plan: dict[str, Any], strict: bool = True, seed: int = 0, settled: bool = True
    ) -> dict[str, Any]:
        """Open the job under a plan and place its batches; no first pass differs from the others."""
        begin = time.perf_counter()
        self.session = start(self.job, Plan.from_dict(plan), self.machine, seed=seed, strict=strict)
        self._strides = Strides(self.session, self.ranks, Unwatched())
        self._strides.begin()
        fed = itertools.islice(self.session.batches(first_batches(call(self.job, "data"), 4)), 4)
        placed = [map_tensors(self.session.place(batch), lambda t: t.clone()) for batch in fed]
        self._stream = itertools.cycle(placed)
        return {"seconds": time.perf_counter() - begin, "processes": [os.getpid()]}

    def count(self) -> dict[str, float]:
        """Floating-point operations of one step (torch's own count: matrix operators), and its samples."""
        with start(self.job, Plan(), self.machine) as session:
            batch = first_batches(call(self.job, "data"), 1)[0]
            with FlopCounterMode(display=False) as counter:
                session.step(batch)
        return {"flops": counter.get_total_flops(), "samples": batch_size(batch)}
