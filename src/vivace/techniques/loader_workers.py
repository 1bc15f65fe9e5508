"""Load batches in another number of worker processes than the DataLoader was given."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Seam, Stage, Technique
from vivace.words import count

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclasses.dataclass(frozen=True)
class LoaderWorkers(Technique):
    """The same samples in the same order, from other processes; 0 workers load in the training process.

    Random augmentation draws other numbers in other workers, as it does from seed to seed; where reading two
    samples or making a batch of them draws any, the promise on this job is raised to rounding. Workers would
    copy a generator that the dataset keeps for itself, and all draw the same: refused, but where it is seeded
    for each sample. So is a dataset that counts what it reads, and whose samples depend on that: each worker
    would count by itself. `persistent` workers start anew where numbers or texts that the dataset keeps, or
    which objects, have changed since the last pass, and else see it as it was when they started.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.EXACT,
        summary="batches loaded by a measured number of worker processes",
        source="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
        measured_on=("cpu",),
    )
    num_workers: Annotated[int, Field(ge=0)] = 2
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    persistent: bool = True

    def apply(self, build: Build) -> None:
        """Rebuild every DataLoader that the session reads, once; refuse more workers than cores."""
        cores = build.machine.num_cores
        too_many = f"num_workers = {self.num_workers}, but only {cores} cores can be used"
        build.require(self.num_workers <= cores, too_many)
        rebuilt: weakref.WeakKeyDictionary[Any, _Rebuilt] = weakref.WeakKeyDictionary()

        def batches(
            following: Callable[[Any], Any], loader: Iterable[Batch], persistent: bool = self.persistent
        ) -> Any:
            from vivace.tensors.loaders import data_loader, drawn_by

            own = data_loader(loader, "an iterable dataset is cut by its workers")
            if own not in rebuilt:
                for condition, reason in self._conditions(own):
                    build.require(condition, reason)
                drawn = drawn_by(own)
                alone = f"workers would all draw the same numbers from your dataset's generator '{drawn.own}'"
                remedy = "draw from torch's stream, or seed it anew for each worker by a worker_init_fn"
                build.require(not (drawn.own and self._begins(own)), f"{alone}: {remedy}")
                build.require(
                    not drawn.counted,
                    f"each worker would count by itself in your dataset's '{drawn.counted}', on which its "
                    "samples depend: let the loop set it between epochs",
                )
                if drawn.own or drawn.shared:
                    build.declare(Numerics.ROUNDING, "other workers draw other random numbers for samples")
                rebuilt[own] = _Rebuilt(own, self.num_workers, self.prefetch_factor, persistent)
                depth = rebuilt[own].loader.prefetch_factor
                build.notes["loader_workers"] = own.num_workers, self.num_workers, depth
            return following(rebuilt[own].for_pass(own))

        build.wrap(Seam.BATCHES, batches)
        build.wrap(Seam.VALIDATION, lambda following, loader: batches(following, loader, False))
        build.on_close(rebuilt.clear)  # the last reference: the workers end with their loader

    def _begins(self, loader: DataLoader[Any]) -> bool:
        """Do workers read what one process read, without a function that would tell them apart?"""
        return bool(self.num_workers and not (loader.num_workers or loader.worker_init_fn))

    def _conditions(self, loader: DataLoader[Any]) -> Iterator[tuple[object, str]]:
        from vivace.tensors.loaders import hears_epochs, open_file_of

        present = (loader.num_workers, loader.prefetch_factor, loader.persistent_workers)
        wanted = (self.num_workers, self.prefetch_factor, self.persistent)
        equal = wanted == present or self.num_workers == loader.num_workers == 0
        yield not equal, f"your DataLoader already has num_workers = {loader.num_workers} and these settings"
        yield self.num_workers or not loader.worker_init_fn, "your worker_init_fn acts in workers only"
        stale = self.num_workers and self.persistent and hears_epochs(loader.dataset)
        yield not stale, "persistent workers would never see your dataset's set_epoch: set persistent = false"
        file = open_file_of(loader.dataset) if self._begins(loader) else ""
        remedy = "open it where a sample is read, once in each process"
        yield not file, f"workers would share the position in your dataset's open file '{file}': {remedy}"

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The numbers of workers; refused where no DataLoader was read through the session."""
        if "loader_workers" not in seen.notes:
            raise Refused("it changed nothing: no batch was read through the session")
        before, during, _ = seen.notes["loader_workers"]
        return f"{count(during, 'worker')} instead of {before}"

    def refined(self) -> Technique | None:
        """Twice as many batches ahead for each worker."""
        if not self.num_workers:
            return None
        return dataclasses.replace(self, prefetch_factor=2 * self.prefetch_factor)

    def plain(self) -> Plain:
        """The keywords of PyTorch's own DataLoader that start these workers."""
        loader: dict[str, object] = {"num_workers": self.num_workers}
        if self.num_workers:
            loader |= {"prefetch_factor": self.prefetch_factor, "persistent_workers": self.persistent}
        return Plain(
            loader=loader,
            transformers={f"dataloader_{key}": value for key, value in loader.items()},
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Powers of two up to the usable cores, and none at all; where the step waits for data, many first.

        Where it does not wait, or the data lie in memory, only fewer than there are: they leave their cores.
        On a CPU first what divides the cores as loading and step need them.
        """
        loader = profile.features.get("loader", {})
        if not loader.get("is_dataloader") or not profile.has_index:
            return []
        now, cores = loader["num_workers"], machine.num_cores
        counts = [2**n for n in range(min(cores, 16).bit_length()) if 2**n != now]
        waiting = 0.0 if loader.get("in_memory") else profile.shares.get("data", 0.0)
        threads = (profile.features.get("num_threads") or 1) if profile.device == "cpu" else 0
        wanted = cores * waiting / (waiting + (0 if now else 1 - waiting) * threads) if waiting > 0.05 else 0
        if wanted:
            ordered = [*sorted(counts, key=lambda n: max(n / wanted, wanted / n)), 0]
        else:
            ordered = [count for count in (0, *counts) if count < (now or 0)]
        return [cls(num_workers=count) for count in ordered if count != now]

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """On a CPU first with the step on the cores that the workers leave: else they wait for each other."""
        left = max(1, machine.num_cores - self.num_workers)
        threads = (profile.features.get("num_threads") or 1) if profile.device == "cpu" else 0
        beside = [{"cpu_threads": {"num_threads": left}}] if self.num_workers and left < threads else []
        return [*beside, {}]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """The waiting for data can vanish; where workers take the cores of the step, it slows down."""
        return (0.7, 1 / max(0.05, 1 - profile.shares.get("data", 0.0)))


class _Rebuilt:
    """What is read in the place of a person's own loader, pass after pass; it keeps no reference to that.

    A loader draws a seed for its workers at the start of a pass, persistent ones at that of the first. From
    the stream that also shuffles as many seeds are drawn as the own loader draws.
    """

    def __init__(
        self, own: DataLoader[Any], num_workers: int, prefetch_factor: int, persistent: bool
    ) -> None:
        import torch

        from vivace.tensors.loaders import settings_of, with_workers
        from vivace.torch_internals.loaders import workers_run

        self._settings = num_workers, prefetch_factor, persistent
        self.loader = with_workers(own, *self._settings)
        self._kept = settings_of(own.dataset)
        self._draws = not workers_run(own)  # does the own loader, in the next pass?
        self._beside = torch.Generator().manual_seed(torch.initial_seed())

    def for_pass(self, own: DataLoader[Any]) -> DataLoader[Any]:
        """The loader for one pass; with other workers where the running ones have an older dataset."""
        import torch

        from vivace.tensors.loaders import same_settings, settings_of, with_workers
        from vivace.torch_internals.loaders import workers_run

        kept = settings_of(own.dataset)
        if not (own.persistent_workers or same_settings(kept, self._kept)):
            self.loader, self._kept = with_workers(own, *self._settings), kept
        begins = not workers_run(self.loader)
        self.loader.generator = own.generator if self._draws else self._beside
        if self._draws and not begins:
            torch.empty((), dtype=torch.int64).random_(generator=own.generator)
        self._draws = not own.persistent_workers
        return self.loader
