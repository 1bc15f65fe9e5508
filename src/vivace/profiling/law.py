"""What several ranks bring: a few measured times, and the ring's arithmetic from there on. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

COUNTS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Law:
    """What `ranks` processes were measured to do with batches of `samples`, of which each takes its share.

    Args:
        compute: seconds of a step without exchange on the n-th part of a batch, by n.
        stepping: seconds of a step with the exchange, on this many ranks' part; data at hand.
        looping: the same fed by the loader.
        reading: seconds in which a rank's loader gives its part, while nothing else is done.
        waited: seconds that the fed step waits for its data.
        num_bytes: exchanged in a step, in so many `messages`.
        latency, rate: seconds of one hop of the ring, and bytes a second over the link.
    """

    ranks: int
    samples: int
    compute: dict[int, float]
    stepping: float
    looping: float
    reading: float
    waited: float
    num_bytes: int
    messages: int
    latency: float
    rate: float

    def exchange(self, ranks: int) -> float:
        """Seconds of an all-reduce on a ring: 2 (n - 1) hops a message, 2 (n - 1) / n of the bytes.

        Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
        """
        hops, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
        return hops * self.messages * self.latency + share * self.num_bytes / self.rate

    @property
    def exposed(self) -> float:
        """Seconds by which the exchange prolonged the measured step."""
        return max(0.0, self.stepping - self.compute[self.ranks])

    def exposed_on(self, ranks: int) -> float:
        """The same on so many ranks: what was hidden behind the backward pass shrinks with that; an exchange
        that disturbed the step by more than its own time does so by the same factor.
        """
        if ranks == 1:
            return 0.0
        here, there = self.exchange(self.ranks), self.exchange(ranks)
        if self.exposed >= here:
            return there * self.exposed / here
        hidden = (here - self.exposed) * self.compute[ranks] / self.compute[self.ranks]
        return max(0.0, there - hidden)

    @property
    def reads_beside(self) -> bool:
        """Does the loader read while the step computes, as worker processes do?"""
        return self.waited < self.reading / 2

    def waiting_on(self, ranks: int, working: float) -> float:
        """Seconds that a step which works for `working` seconds waits for its part of the batch."""
        reading = self.reading * self.ranks / ranks
        return max(0.0, reading - working) if self.reads_beside else reading

    def on(self, ranks: int) -> dict[str, Any]:
        """The step on so many ranks: seconds by what they are spent on; measured where these ranks ran."""
        here = ranks == self.ranks
        exposed, compute = self.exposed_on(ranks), self.compute[ranks]
        waiting = self.waited if here else self.waiting_on(ranks, compute + exposed)
        if here:  # divided as the steps were whose data were at hand: these took more or less than the loop
            exposed = (self.looping - waiting) * exposed / self.stepping
            compute = self.looping - waiting - exposed
        return {
            "ranks": ranks,
            "measured": here,
            "step_seconds": compute + exposed + waiting,
            "seconds": {"data": waiting, "compute": compute, "communication": exposed},
            "samples_per_second": self.samples / (compute + exposed + waiting),
        }

    def expected(self) -> list[dict[str, Any]]:
        """The same for each number of ranks that can share a batch, with the speed over one rank's."""
        rows = [self.on(ranks) for ranks in sorted({*COUNTS, self.ranks}) if ranks in self.compute]
        one = rows[0]["samples_per_second"]
        return [row | {"speedup": row["samples_per_second"] / one} for row in rows]

    @property
    def predicted(self) -> float:
        """Seconds of the measured loop as the law alone would have it, to see how far it can be trusted."""
        working = self.compute[self.ranks] + self.exposed
        return working + self.waiting_on(self.ranks, working)

    def to_dict(self) -> dict[str, Any]:
        """All figures, with those that follow from them."""
        more = {"exposed": self.exposed, "exchange": self.exchange(self.ranks), "predicted": self.predicted}
        return dataclasses.asdict(self) | more


def link_of(ranks: int, small: float, whole: float, messages: int, num_bytes: int) -> tuple[float, float]:
    """Seconds of a hop and bytes a second, from the seconds of one tiny all-reduce and of all of a step's."""
    latency = small / (2 * (ranks - 1))
    moving = max(whole - messages * small, 0.05 * whole)
    return latency, 2 * (ranks - 1) / ranks * num_bytes / moving
