"""Which cards a job fits on, by its predicted peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.job import Job
from vivace.machine import CONTEXT_BYTES
from vivace.memory.predict import predict
from vivace.plan import Plan
from vivace.session.opening import LOOKING_SECONDS, call, look_through, readable

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Fit:
    """Does a job fit on a card, or on as many as `ranks`? Bytes that it needs on each, with the context, and
    that the card leaves it; techniques of the plan that were left out, as they act on processors alone. Of
    data that was not looked through to its end, how many batches were `looked_at`; else None.
    """

    card: str
    needed_bytes: int
    usable_bytes: int
    ranks: int = 1
    left_out: tuple[str, ...] = ()
    looked_at: int | None = None

    @property
    def fits(self) -> bool:
        """Does the predicted peak fit into the usable memory?"""
        return self.needed_bytes <= self.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {**dataclasses.asdict(self), "fits": self.fits}


def draw(found: list[Fit], console: Console) -> None:
    """The sentences that say what is needed and how many cards have it; a row for each size of memory, the
    smallest first, with its cards in the order given.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("usable", justify="right")
    table.add_column("fits")
    table.add_column("cards", overflow="fold")
    for usable in sorted({fit.usable_bytes for fit in found}):
        alike = [fit for fit in found if fit.usable_bytes == usable]
        answer = "yes" if alike[0].fits else "no"
        table.add_row(words.size(usable), answer, ", ".join(fit.card for fit in alike))
    needed = max((fit.needed_bytes for fit in found), default=0)
    ranks = max((fit.ranks for fit in found), default=1)
    each = f" on each of {ranks} cards" if ranks > 1 else ""
    own = f"{words.size(CONTEXT_BYTES)} of it for CUDA"
    if left_out := [name for fit in found[:1] for name in fit.left_out]:
        console.print(f"without {' and '.join(left_out)}: of processors alone")
    console.print(f"a training step needs about {words.size(needed)}{each}, {own}: predicted, not run")
    if looked_at := next((fit.looked_at for fit in found), None):
        console.print(f"on the largest of the first {words.number(looked_at)} batches: others may be larger")
    console.print(f"it fits on {sum(fit.fits for fit in found)} of {len(found)} cards\n")
    console.print(table)


def fits(job: Job, cards: Mapping[str, int], plan: Plan | None = None, ranks: int = 1) -> list[Fit]:
    """For each card, by name and usable bytes, whether a training step of `job` under `plan` fits on it; or
    one of so many `ranks` as divide the weights.

    What is needed is what the caching allocator would reserve (`predict`), on the largest batch that a few
    seconds of looking through the data find. What the plan has for processors alone is left out. Raises
    Refused where the job cannot be predicted.
    """
    techniques = (plan or Plan()).techniques
    left_out = tuple(technique.name for technique in techniques if technique.card.devices == ("cpu",))
    plan = Plan(technique for technique in techniques if technique.name not in left_out)
    loader = readable(call(job, "data"), job)
    seen = look_through(loader, LOOKING_SECONDS)
    batch = seen.by_size[max(seen.by_size)] if seen.sizes else None
    looked_at = None if seen.all else len(seen.sizes)
    needed = predict(job, plan, batch=batch, device="cuda", ranks=ranks).reserved_bytes + CONTEXT_BYTES
    return [Fit(name, needed, usable, ranks, left_out, looked_at) for name, usable in cards.items()]
