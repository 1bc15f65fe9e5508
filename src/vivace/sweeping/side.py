"""A trial that takes steps beside others, to see how many at a time are fastest: the child's side."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from vivace.inspection.limits import peak_memory
from vivace.job import JobFunction
from vivace.machine import CONTEXT_BYTES
from vivace.measuring.worker import Worker

FIRST_STEPS = 3


class Side(Worker):
    """Serves `vivace.processes.launch.Child`: `Worker.open`, and then these."""

    def __init__(self, job: JobFunction, machine: dict[str, Any], parameters: dict[str, Any]) -> None:
        super().__init__(job(**parameters), machine)

    def needs(self) -> dict[str, int]:
        """Take the first steps: the ``bytes`` that this process held at most of its own, and on a GPU how
        many are ``free`` there with it; 0 elsewhere.
        """
        self._steps(FIRST_STEPS)
        assert self.session is not None
        device = self.session.build.device
        if device.type == "cuda":
            own = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
            return {"bytes": own, "free": torch.cuda.mem_get_info(device)[0] + own}
        me = psutil.Process()
        now = me.memory_full_info()
        workers = sum(one.memory_full_info().uss for one in me.children(recursive=True))
        return {"bytes": now.uss + max(0, peak_memory() - now.rss) + workers, "free": 0}

    def pace(self, threads: int, seconds: float) -> float:
        """Steps a second on so many threads."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
            self._steps(1)
        begin, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - begin < seconds:
            self._steps(1)
            steps += 1
        return steps / (time.perf_counter() - begin)
