"""Pictures reach the device as bytes, and become scaled and normalised floats there."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique


@dataclasses.dataclass(frozen=True)
class Uint8Transfer(Technique):
    """A quarter of the bytes between worker, main memory and device; ToTensor and Normalize act on batches.

    The same operations on the same numbers, in another place. Two samples are read both ways, and anything
    but equal bits is refused.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.EXACT,
        slot="bytes to the device",
        summary="pictures sent as bytes, scaled and normalised on the device",
        source="https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations",
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Rebuild every DataLoader that the session reads over a dataset of bytes; finish in `place`."""
        from vivace.mechanisms.pixels import Sender

        Sender(build, self.name, augment=False)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """What moved to the device, and how much went there as bytes."""
        noted = seen.notes.get("uint8_transfer", {})
        if not noted.get("bytes"):
            raise Refused("it changed nothing: no batch of bytes was placed")
        return f"{' and '.join(noted['moved'])} on the device, {words.size(noted['bytes'])} sent as bytes"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """One, where samples can be asked for by number."""
        return [cls()] if profile.has_index else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Three quarters of the placing go, and at best all waiting for data."""
        going = profile.shares.get("data", 0.0) + 0.75 * profile.shares.get("place", 0.0)
        return (0.95, 1 / max(0.05, 1 - going))
