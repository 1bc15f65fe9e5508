"""Put samples of similar length into one batch, so that less of it is padding."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar

from pydantic import Field

from vivace import words
from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique

LOOKING_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class LengthBucketing(Technique):
    """Of every `window` batches the samples are sorted by length, cut anew, and the batches shuffled.

    Each sample is still seen once an epoch, among others: the order is another one, and a batch is more alike
    than chance makes it. A length is that of the sample's first tensor or list with one; all are read once,
    before the first batch.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.SEMANTICS,
        summary="samples of similar length batched together",
        source="https://arxiv.org/abs/1708.05729",
        unit_roundoff=2.0**-24,
        measured_on=("cpu",),
    )

    window: Annotated[int, Field(ge=2)] = 50

    def apply(self, build: Build) -> None:
        """Rebuild every DataLoader that the session reads with another batch sampler."""
        rebuilt: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        def batches(following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
            from vivace.techniques.length_bucketing.buckets import Buckets
            from vivace.tensors.loaders import data_loader, lengths_of, with_other

            if loader not in rebuilt:
                own = data_loader(loader, "the lengths of an iterable dataset are not known")
                build.require(own.batch_sampler is not None, "your dataset gives whole batches")
                lengths = lengths_of(own.dataset, LOOKING_SECONDS)
                build.require(len(set(lengths)) > 1, f"all samples have the length {lengths[0]}")
                buckets = Buckets(own.batch_sampler, lengths, self.window)
                rebuilt[loader] = with_other(own, batch_sampler=buckets)
                build.notes["length_bucketing"] = buckets.padding()
            return following(rebuilt[loader])

        build.wrap(Seam.BATCHES, batches)
        build.on_close(rebuilt.clear)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How much of the first batches was padding, and is."""
        if "length_bucketing" not in seen.notes:
            raise Refused("it changed nothing: no batch was read through the session")
        before, after = seen.notes["length_bucketing"]
        return f"{words.percent(after)} of a batch is padding instead of {words.percent(before)}"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """One, where samples can be asked for by number."""
        return [cls()] if profile.has_index else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Steps on less padding; how much there is only the lengths can tell."""
        return (0.95, 1.5)
