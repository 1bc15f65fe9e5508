"""What a memory budget costs on this GPU, and how far predicted peaks are from the allocator's."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import memory
import memory_budgets

import vivace
from vivace.memory.choosing import choosers
from vivace.session.opening import first_batches


class Budgets:
    """Serves `vivace.processes.launch.Child`: the memory benchmarks on one of the GPU's jobs; in a dry run
    one budget, few rounds, and beside decisions for blocks the first technique."""

    def __init__(self, job: vivace.Job, dry: bool) -> None:
        if dry:
            memory_budgets.DEMANDED, memory_budgets.ROUNDS = {50: 15.0}, 4
            memory_budgets.choosers = lambda *given: islice(choosers(*given), 2)
        batches = first_batches(job.data(), 2)
        self.job = vivace.Job(**{**vars(job), "data": lambda: batches})

    def predicted(self, name: str) -> list[dict[str, Any]]:
        """Predicted and measured bytes under four plans, and the errors in per cent."""
        return memory.rows_of(name, self.job)

    def chosen(self, name: str) -> dict[str, Any]:
        """The planner's choice at 75, 50 and 33 % of the activations, its peak and what it costs."""
        return memory_budgets.measured(name, self.job)
