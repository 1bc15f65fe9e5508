"""Keep what Pillow decodes from JPEG files: from the second pass on only the augmentation is computed."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from vivace import words
from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    from vivace.mechanisms.decoding import KeptDecoding


@dataclasses.dataclass(frozen=True)
class DecodedCache(Technique):
    """Decoded pictures in memory, or in `file` on a disk for later runs too, shared by workers and ranks.

    Filled while the first pass decodes; 4 bytes a pixel; what no longer fits into `budget_gib` is decoded as
    ever. Whatever the dataset does with a picture afterwards happens afresh each time. A file that changed
    (by device, inode, size and times; in memory by its bytes) is decoded again, as is a damaged record.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.EXACT,
        summary="JPEG files decoded once, then read from memory",
        source="https://arxiv.org/abs/2005.02130",
        measured_on=("cpu",),
    )

    first_pass_differs: ClassVar[bool] = True

    budget_gib: Annotated[float, Field(gt=0)] = 4.0
    file: str = ""

    def apply(self, build: Build) -> None:
        """Open the store; in the seam `batches` let every pass read through it, and its workers too."""
        from vivace.mechanisms.decoding import KeptDecoding, read_within, require_pillow

        require_pillow()
        store = self._store()
        build.on_close(store.close)
        kept = KeptDecoding(store)
        read_within(build, self.name, kept, store.counts, lambda loader: _decodes_nothing(loader, kept))

    def _store(self) -> Any:
        """The store; of ranks on one machine the first one's."""
        import torch.distributed as dist

        from vivace.mechanisms.shared_store import SharedStore

        budget_bytes = int(self.budget_gib * 2**30)
        store = SharedStore(budget_bytes, self.file or None)
        if self.file or not (dist.is_available() and dist.is_initialized()):
            return store
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (socket.gethostname(), store.path))
        first = next(path for host, path in found if host == socket.gethostname())
        if first != store.path:
            store.close()
            store = SharedStore(budget_bytes, first)
        dist.barrier()  # the first one's process stays until all have opened it
        return store

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The pictures kept, and how many were read from there. Refuses where all of them take more than may
        be kept and a part was read so far, which says nothing of a whole pass when it is read again.
        """
        counts = seen.notes.get("decoded_cache", {})
        if not counts.get("records"):
            raise Refused("it changed nothing: no JPEG file was decoded through Pillow")
        whole = counts["bytes"] / seen.notes.get("share_read", 1.0)
        if whole > self.budget_gib * 2**30:
            told = f"decoded, all pictures take about {words.size(int(whole))}"
            raise Refused(f"{told}, and {self.budget_gib} GiB of them may be kept")
        damaged = f", {counts['damaged']} found damaged" if counts["damaged"] else ""
        kept = f"{counts['records']:,} pictures in {words.size(counts['bytes'])}"
        return f"{kept}, read {counts['hits']:,} times{damaged}; it gains from the second pass on"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Half of this machine's memory as the budget, where a sample decodes a JPEG, and more than once."""
        budget_gib = round(machine.limits.get("memory_bytes", 2**33) / 2**31, 1)
        decodes = profile.features.get("loader", {}).get("decodes_jpeg", True)
        return [cls(budget_gib=budget_gib)] if decodes and profile.features.get("epochs", 2) > 1 else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At best the waiting for data goes; where there is none, nothing is gained."""
        return (0.95, 1 / max(0.05, 1 - profile.shares.get("data", 0.0)))


def _decodes_nothing(loader: Iterable[Batch], kept: KeptDecoding) -> str:
    """Why nothing of a loader would be kept; empty where something is, or nobody can look."""
    from torch.utils.data import DataLoader, IterableDataset

    from vivace.tensors.loaders import notices

    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    with kept:
        if notices(loader.dataset, kept.store.counts):
            return ""
    kind = type(getattr(loader.dataset, "dataset", loader.dataset)).__name__
    return f"a sample of your {kind} decodes no JPEG with Pillow"
