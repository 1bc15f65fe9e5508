"""Gradient accumulation: a batch in several pieces, so that fewer activations live at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from vivace import words
from vivace.errors import Refused, VivaceError, ran_out_of_memory
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class MicroBatches(Technique):
    """Each batch in `num` pieces; every piece's loss is weighted by its share of the samples.

    Exact up to rounding where the loss is a mean over samples. Dropout draws other masks; a loss that
    averages over anything else (tokens that are not padding) is weighted per piece, which `verify` shows.
    What the model keeps in buffers and moves in its forward, or counts in an attribute, moves once a piece:
    where the first step shows any, the promise on this job is raised. A last batch with fewer samples than
    `num` runs in pieces of one.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.ROUNDING,
        summary="each batch in several pieces, for less activation memory",
        source="https://arxiv.org/abs/1811.06965",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
        on_shards="",
        saves_memory="activations",
        cuts_batches=True,
    )

    num: Annotated[int, Field(ge=2)] = 2

    def apply(self, build: Build) -> None:
        """Replace the gradients seam by a loop over the pieces."""
        from vivace.tensors.modules import has_batch_norm, looked_at_by_hooks, modules_of
        from vivace.tensors.trees import batch_size, split
        from vivace.torch_internals.modules import RunningNorm

        if has_batch_norm(build.model):
            build.declare(
                Numerics.SEMANTICS, "BatchNorm takes its statistics over a piece, not over the batch"
            )
        elif any(norm.running_mean is not None for norm in modules_of(build.model, RunningNorm)):
            build.declare(Numerics.SEMANTICS, "InstanceNorm moves its running means once a piece")
        hooked, _ = looked_at_by_hooks(build.model)
        if hooked:
            build.declare(Numerics.SEMANTICS, f"a hook looks at the gradient of '{hooked}' once a piece")
        build.facts.pieces = 0

        def gradients(batch: Batch) -> torch.Tensor:
            samples = batch_size(batch)
            if samples < self.num and not build.facts.pieces:
                raise Refused(f"the batch has {samples} samples, fewer than num = {self.num}")
            pieces = split(batch, -(-samples // self.num))
            total: Any = 0.0
            begins = not build.facts.pieces
            build.facts.pieces = max(build.facts.pieces or 0, len(pieces))
            for index, piece in enumerate(pieces):
                last = index == len(pieces) - 1
                with contextlib.nullcontext() if last else build.seams.accumulating():
                    share = batch_size(piece) / samples if samples else 1.0
                    # The first piece may fill what is kept for later, such as a table of positions.
                    with _watching(build) if begins and index == 1 else contextlib.nullcontext():
                        try:
                            loss = build.seams.forward(piece) * share
                        except (LookupError, RuntimeError, TypeError, ValueError) as error:
                            if why := _only_a_piece_fails(build, batch, piece, error):
                                raise Refused(why).by(self.name) from error
                            raise
                    build.seams.backward(loss)
                total = total + loss.detach()
            return total  # type: ignore[no-any-return]

        build.replace(Seam.GRADIENTS, gradients)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of pieces and the memory that they save."""
        pieces = seen.facts.get("pieces", 0)
        if pieces < 2:
            raise Refused("it changed nothing: the batch stayed in one piece")
        saved = reference.peak_bytes - seen.peak_bytes
        return f"{pieces} pieces, peak memory {words.size(saved)} lower"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where activations are most of the memory, and for as many pieces as there are samples."""
        samples = profile.features.get("batch_size", 8)
        if profile.peak_bytes < 4 * max(1, profile.parameter_bytes):
            return []
        return [cls(num=num) for num in (2, 4, 8) if num <= samples]

    @property
    def pieces(self) -> int:
        """In how many pieces it runs each batch."""
        return self.num

    @classmethod
    def in_pieces(cls, num: int) -> Technique:
        """This technique with batches cut into `num` pieces."""
        return cls(num)

    @classmethod
    def rescues(cls) -> list[Technique]:
        """Twice as many pieces each time."""
        return [cls(num) for num in (2, 4, 8, 16, 32, 64)]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Slower on a GPU, which wants large batches; on a CPU smaller pieces may stay in the cache."""
        return (0.5, 1.3 if machine.device.kind == "cpu" else 1.0)


def _only_a_piece_fails(build: Build, batch: Batch, piece: Batch, error: Exception) -> str:
    """Why a batch cannot be cut whose `piece` failed by `error`; empty where pieces are not to blame, as what
    failed once does not again, and where other ranks wait, which do not run the whole batch.
    """
    import torch

    if isinstance(error, VivaceError) or ran_out_of_memory(error) or build.facts.ranks is not None:
        return ""
    with torch.no_grad():
        try:
            build.seams.forward(batch)
        except Exception:
            return ""
        with contextlib.suppress(Exception):
            build.seams.forward(piece)
            return ""
    reason = next(iter(str(error).strip().splitlines()), "")
    return (
        f"the loss fails on a piece of a batch, and not on the whole ({type(error).__name__}: {reason}): it "
        "is no mean over samples, or something else in the batch has as many rows as that has samples"
    )


@contextlib.contextmanager
def _watching(build: Build) -> Iterator[None]:
    """Where buffers of the model move inside, or whole numbers are counted up in its attributes, as for a
    temperature that falls, the promise is raised.

    Kernels of batch normalisation do not raise a tensor's version, so values are compared.
    """
    from vivace.mechanisms.blocks import is_fake
    from vivace.tensors.outside import attributes
    from vivace.tensors.trees import same_numbers

    before = {name: (buffer, buffer.clone()) for name, buffer in build.model.named_buffers()}
    counts = attributes(build.models)
    yield

    def moved(name: str, now: torch.Tensor) -> bool:
        buffer, then = before.get(name, (None, now))
        return now is not buffer or not (is_fake(now) or same_numbers(now, then))

    found = next((name for name, buffer in build.model.named_buffers() if moved(name, buffer)), "")
    now = attributes(build.models) if not found else {}
    pairs = ((".".join(filter(None, key[1:])), now.get(key), then) for key, then in counts.items())
    counted = (name for name, now, then in pairs if type(now) is type(then) is int and now == then + 1)
    if (found := found or next(counted, "")) and build.numerics < Numerics.SEMANTICS:
        build.declare(Numerics.SEMANTICS, f"the model moves '{found}' once a piece, not once a batch")
