"""Decode JPEG files with another library than Pillow's own, where it gives the same bits."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique


@dataclasses.dataclass(frozen=True)
class JpegDecoder(Technique):
    """simplejpeg in place of Pillow's decoder, below everything that a dataset does with its pictures.

    Exact by test: of each kind of file the first ones are decoded both ways in each process, and a kind of
    which one bit differs stays with Pillow. Both use libjpeg-turbo, in versions of their own.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.EXACT,
        summary="JPEG files decoded by simplejpeg, bit for bit as Pillow does",
        source="https://gitlab.com/jfolz/simplejpeg",
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """In the seam `batches`, let Pillow's images be decoded by the other library, in workers too."""
        from vivace.mechanisms.decoding import OtherDecoder, read_within, require_pillow, simplejpeg_decode

        build.require(importlib.util.find_spec("simplejpeg"), "simplejpeg is not installed")
        require_pillow()
        decoder = OtherDecoder(simplejpeg_decode)
        read_within(build, self.name, decoder, decoder.counts)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many files the other library decoded."""
        counts = seen.notes.get("jpeg_decoder", {"decoded": 0, "differing": 0})
        if not counts["decoded"]:
            other = ", only such that it decodes to other bits" if counts["differing"] else ""
            raise Refused(f"it changed nothing: no JPEG file was decoded through Pillow{other}")
        return f"{counts['decoded']:,} files decoded by simplejpeg, {counts['differing']:,} by Pillow"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """One, where the library is there, and a sample decodes a JPEG."""
        decodes = profile.features.get("loader", {}).get("decodes_jpeg", True)
        return [cls()] if decodes and importlib.util.find_spec("simplejpeg") else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Decoding is the larger part of loading pictures, and becomes a fifth to a third cheaper."""
        return (0.97, 1 / max(0.05, 1 - 0.3 * profile.shares.get("data", 0.0)))
