"""A larger global batch: several of the loader's batches in one step, at a larger learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch

RULES = {  # by the name of an optimizer's class, or of one that it extends
    "SGD": "linear",
    **dict.fromkeys(("Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "LAMB", "Lamb"), "root"),
    **dict.fromkeys(("AdaBelief", "Adahessian", "Adan", "Adopt", "ADOPT", "LaProp", "NovoGrad"), "root"),
    **dict.fromkeys(("MADGRAD", "Yogi"), "root"),
}
FILLS_BETTER = 1.5  # what larger kernels may bring beside the cost of a step that is paid less often


@dataclasses.dataclass(frozen=True)
class LargerBatch(Technique):
    """`factor` batches are one step, and the learning rate grows by a rule: another training run.

    ``linear`` multiplies it by `factor` (Goyal 2017, for SGD), ``root`` by its square root (Malladi 2022, for
    Adam and its kin), ``auto`` chooses by the optimizer's class, and refuses one that it does not know.
    Warm-up is the Job's affair. A scheduler that is stepped every step advances by `factor`, so that a
    schedule ends on the same sample. The last step of an epoch may hold fewer batches; its learning rate
    grows by as many.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.DATA,
        numerics=Numerics.SEMANTICS,
        summary="several batches in one step, the learning rate scaled by rule",
        source="https://arxiv.org/abs/1706.02677",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu",),
    )

    factor: Annotated[int, Field(ge=2)] = 2
    learning_rate: Literal["auto", "linear", "root", "unchanged"] = "auto"

    def apply(self, build: Build) -> None:
        """Join the batches that the session reads; run every step at the scaled learning rate."""
        from vivace.tensors.trees import batch_size

        build.require(not build.own_step, "your own step function decides what one step is")
        optimizer = build.optimizer
        assert optimizer is not None
        rule = self._rule(optimizer)
        name = type(optimizer).__name__
        build.require(
            rule, f"no rule is known for {name}: set learning_rate = 'linear', 'root' or 'unchanged'"
        )
        rated = rule == "unchanged" or all(group.get("lr") is not None for group in optimizer.param_groups)
        build.require(rated, "the optimizer has no learning rate to scale: set learning_rate = 'unchanged'")
        held: dict[int, int] = {}  # batches in a step, by its samples: others copy and place what was joined
        build.facts.batches_per_step = self.factor
        build.notes |= {"learning_rate_rule": rule, "joined": 0}

        def batches(following: Callable[[Any], Iterable[Any]], loader: Iterable[Batch]) -> Iterator[Any]:
            for group in self._groups(following(loader)):
                build.notes["joined"] = max(build.notes["joined"], len(group))
                joined = self._joined(group)
                if joined is not None:
                    samples, num = batch_size(joined), sum(batch is not None for batch in group)
                    held[samples] = max(held.get(samples, 0), num)
                yield joined

        build.wrap(Seam.BATCHES, batches)

        def step(following: Callable[[Any], torch.Tensor], batch: Batch) -> torch.Tensor:
            groups, num = optimizer.param_groups, held.get(batch_size(batch), self.factor)
            scale = float(num) if rule == "linear" else math.sqrt(num)
            before = [group["lr"] for group in groups]
            try:
                for group in groups:
                    group["lr"] = group["lr"] * scale
                return following(batch)
            finally:
                for group, rate in zip(groups, before, strict=True):
                    group["lr"] = rate

        if rule != "unchanged":
            build.wrap(Seam.STEP, step)

    def _rule(self, optimizer: torch.optim.Optimizer) -> str:
        if self.learning_rate != "auto":
            return self.learning_rate
        names = (cls.__name__ for cls in type(optimizer).__mro__)
        return next((rule for name in names for kind, rule in RULES.items() if kind in name), "")

    def _groups(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        waiting = iter(batches)
        while group := list(islice(waiting, self.factor)):
            yield group

    def _joined(self, group: list[Any]) -> Any:
        from vivace.tensors.trees import beside_samples, joined

        readable = [batch for batch in group if batch is not None]  # of None every sample is damaged
        batch = joined(readable) if readable else None
        if batch is None and readable:
            raise Refused(
                "batches of different shapes, or of packed sequences, cannot be joined into one"
            ).by(self.name)
        if any(beside_samples(other) - beside_samples(readable[0]) for other in readable[1:]):
            raise Refused(
                "batches with other numbers or texts beside their samples, such as a weight to mix these, "
                "cannot be joined into one"
            ).by(self.name)
        return batch

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of batches in a step and the rule; refused where no two batches were joined."""
        if seen.notes.get("joined", 0) < 2:
            raise Refused("it changed nothing: an epoch has one batch, or none was read through the session")
        rule = seen.notes["learning_rate_rule"]
        return f"{seen.notes['joined']} batches a step, learning rate by the rule '{rule}'"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Two, four and eight times the Job's batch."""
        return [cls(factor=factor) for factor in (2, 4, 8)]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """What each step costs at any batch is paid less often, and larger kernels fill a device better."""
        each = sum(profile.shares.get(name, 0.0) for name in ("update", "communication", "idle"))
        return (0.8, FILLS_BETTER / max(0.1, 1 - each))
