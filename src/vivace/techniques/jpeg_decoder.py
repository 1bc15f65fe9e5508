"""Decode JPEG files with another library than Pillow's own, where it gives the same bits."""

from __future__ import annotations

import dataclasses
import importlib.util
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique


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
        from torch.utils.data import DataLoader

        from vivace.mechanisms.decoding import (
            OtherDecoder,
            Within,
            require_pillow,
            simplejpeg_decode,
            unserved,
        )

        build.require(importlib.util.find_spec("simplejpeg"), "simplejpeg is not installed")
        require_pillow()
        decoder = OtherDecoder(simplejpeg_decode)

        def note() -> None:
            build.notes["jpeg_decoder"] = decoder.counts()

        served: weakref.WeakSet[Any] = weakref.WeakSet()

        def batches(following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterable[Any]:
            reason = "" if loader in served else unserved(loader)
            build.require(not reason, reason)
            if isinstance(loader, DataLoader):
                served.add(loader)
            return Within(following(loader), decoder, note)

        build.wrap(Seam.BATCHES, batches)
        build.wrap(Seam.VALIDATION, batches)
        build.on_close(served.clear)

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
