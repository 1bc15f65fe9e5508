"""Flips, colours and erasing on the device, after pictures have reached it as bytes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique


@dataclasses.dataclass(frozen=True)
class DeviceAugment(Technique):
    """The random steps at the end of a transform that keep a picture's size, then ToTensor and Normalize.

    Each picture draws for itself, from the same distribution, but other random numbers; and torchvision
    rounds tensors of bytes otherwise than Pillow. What changes the size, as a crop does, is left to workers.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.SEMANTICS,
        slot="bytes to the device",
        summary="random flips, colours and erasing computed on the device",
        source="https://docs.pytorch.org/vision/stable/transforms.html",
        unit_roundoff=2.0**-8,
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Rebuild every DataLoader that the session reads over a dataset of bytes; augment in `place`."""
        from vivace.mechanisms.pixels import Sender

        Sender(build, self.name, augment=True)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Evidence: the transforms that now run on the device."""
        noted = seen.notes.get("device_augment", {})
        if not noted.get("bytes"):
            raise Refused("it changed nothing: no batch of bytes was placed")
        return f"{', '.join(noted['moved'])} on the device"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """One, where samples can be asked for by number."""
        return [cls()] if profile.has_index else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At best all waiting for data goes; on a CPU the work is only elsewhere."""
        going = profile.shares.get("data", 0.0) + 0.75 * profile.shares.get("place", 0.0)
        return (0.8, 1 / max(0.05, 1 - going))
