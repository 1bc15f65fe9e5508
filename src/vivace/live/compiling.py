"""The last that is tried on a script's own steps: the call of its model compiled, once, in a long run."""

from __future__ import annotations

import math
from collections.abc import Collection

from vivace.inspection.quiet import Slowed
from vivace.live.candidates import compiling
from vivace.live.proof import Proof
from vivace.live.spending import Spending
from vivace.measuring.pace import TRACING_SECONDS, compiling_pace, compiling_seconds
from vivace.observing.reference import Kernels
from vivace.plan import Plan

PASSING_SHARE = 0.005  # of a step, that hooks may take while a run becomes long enough to compile


class Compiling:
    """What is tried last. `own` names the techniques in whose place the script has its own settings."""

    def __init__(self, own: Collection[str]) -> None:
        self._technique = compiling(own)
        self._alone = math.inf  # seconds, where nobody else computes
        self._slowed = Slowed()

    @property
    def seconds(self) -> float:
        """About what it takes, as slowly as this machine goes now; infinite until `foretell`, and where it is
        not tried, or no more.
        """
        return self._alone * self._slowed()

    def foretell(self, proof: Proof, spending: Spending) -> None:
        """Where the run is long enough, count in a copy of the step what a compiler makes kernels of."""
        if self._technique is None or not spending.will_compile(TRACING_SECONDS * self._slowed()):
            return
        kernels = Kernels()
        proof.replay(Plan(), kernels, ordered=False)
        about = compiling_seconds(len(kernels.seen), proof.machine.num_cores)
        self._alone = about * compiling_pace(proof.machine.fingerprint)

    def taken(self, base: Plan) -> Plan:
        """A plan that compiles as well, which is not asked for again."""
        assert self._technique is not None
        self._alone = math.inf
        return base.adding(self._technique)
