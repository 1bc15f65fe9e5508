"""Update each parameter as soon as its gradient is known, and let the gradient go."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class OptimizerInBackward(Technique):
    """The person's own optimizer steps through one parameter at a time, inside the backward pass.

    No two gradients of parameters need to live together. Refused where something looks at all gradients
    before the update: `on_gradients`, loss scaling, other ranks, or an optimizer that is not torch's own.

    A weight that the model also reads without its graph (``weight.data``, ``weight.detach()``) may be needed
    behind its own gradient: where the first step shows that, it is updated once the backward pass is over.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.EXACT,
        summary="parameters updated inside the backward pass, so that gradients do not pile up",
        source="https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
        measured_on=("cpu", "cuda"),
        saves_memory="states",
    )

    def apply(self, build: Build) -> None:
        """Hook every trained parameter; the update seam is left with those that are trained only later."""
        import torch

        from vivace.tensors.optimizers import restricted

        model, optimizer = build.model, build.optimizer
        assert optimizer is not None
        parameters = _parameters(model, optimizer, build)
        keeping = [True]  # between steps, where a metric may differentiate, and in pieces but the last
        updated: set[int] = set()  # in this backward pass
        facts: Any = build.facts
        facts.updates_in_backward = 0
        late = _NeededLate(parameters, self.name)

        def update(parameter: torch.Tensor) -> None:
            if keeping or late.waits(parameter):
                return
            if torch.is_grad_enabled():
                reason = "the job takes gradients of gradients (create_graph=True)"
                raise Refused(f"{reason}, which need the weights unchanged").by(self.name)
            if id(parameter) in updated:
                reason = "the gradient of a shared weight comes in parts"
                raise Refused(f"{reason} (checkpoint with use_reentrant=True)").by(self.name)
            updated.add(id(parameter))
            with restricted(optimizer, [parameter]):
                optimizer.step()
            parameter.grad = None
            facts.updates_in_backward += 1

        @contextlib.contextmanager
        def keep(following: Callable[[], Any]) -> Iterator[None]:
            keeping.append(True)
            try:
                with following():
                    yield
            finally:
                keeping.pop()

        def begin(following: Callable[[Any], Any], batch: Batch) -> Any:
            updated.clear()
            keeping.pop()
            try:
                return following(batch)
            finally:
                keeping.append(True)

        def rest() -> None:
            late.looking = False
            # Weights that are needed late, or were frozen, or not the optimizer's, as the session was opened.
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()

        for parameter in parameters:
            hook = parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
            build.on_close(hook.remove)
        build.wrap(Seam.FORWARD, late.forward)
        build.wrap(Seam.ACCUMULATING, keep)
        build.wrap(Seam.GRADIENTS, begin)
        build.replace(Seam.UPDATE, rest)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of updates inside backward passes."""
        count = seen.facts.get("updates_in_backward", 0)
        if not count:
            raise Refused("it changed nothing: no parameter was updated in the backward pass")
        return f"{count} updates of parameters inside the backward pass"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where gradients are a visible part of the memory."""
        return [cls()] if 10 * profile.parameter_bytes >= profile.peak_bytes else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """One optimizer step for each parameter instead of one for all."""
        return (1 / (1 + profile.shares.get("update", 0.1)), 1.0)


class _NeededLate:
    """Which weights a backward pass still reads when their own gradients are there: seen in the first step.

    Autograd orders what reads a weight by its graph before the gradient of the weight, and nothing else. In
    that step all weights that are read in another way wait for the end of the backward pass; later those that
    were needed late.
    """

    def __init__(self, weights: Iterable[torch.Tensor], technique: str) -> None:
        from vivace.torch_internals.tensors import storage_ids

        self.technique = technique
        self.looking = True  # in the first step
        self._weights: dict[int, list[torch.Tensor]] = {}  # by their storage
        for weight in weights:
            for storage in storage_ids([weight]):
                self._weights.setdefault(storage, []).append(weight)
        self._read: set[int] = set()
        self._waiting: set[int] = set()
        self._late: set[int] = set()

    def waits(self, weight: torch.Tensor) -> bool:
        """Is this weight, whose gradient is there, updated behind the backward pass alone?"""
        if self.looking and id(weight) in self._read:
            self._waiting.add(id(weight))
            return True
        return id(weight) in self._late

    def forward(self, following: Callable[[Any], Any], batch: Batch) -> Any:
        """The seam `forward`; in the first step what it saves for the backward pass is looked at."""
        from torch.autograd.graph import saved_tensors_hooks

        from vivace.mechanisms.blocks import without_transforms

        if not self.looking:
            return following(batch)
        with without_transforms(self.technique), saved_tensors_hooks(self._pack, self._unpack):
            return following(batch)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        from vivace.torch_internals.tensors import storage_ids

        if tensor.requires_grad:
            return tensor, []
        storages = storage_ids([tensor]) & self._weights.keys()
        found = [id(weight) for storage in storages for weight in self._weights[storage]]
        self._read.update(found)
        return tensor, found

    def _unpack(self, packed: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        tensor, found = packed
        self._late.update(self._waiting.intersection(found))
        return tensor


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer, build: Build) -> list[nn.Parameter]:
    """Those that are trained. Raises Refused where they cannot be updated one by one."""
    from vivace.tensors.exchange import exchanges_itself
    from vivace.tensors.optimizers import coupled

    build.require(build.on_gradients is None, "on_gradients wants to see all gradients before the update")
    build.require(build.facts.skipped_steps is None, "fp16 loss scaling judges all gradients first")
    exchange = build.facts.ranks is not None or exchanges_itself(model)
    build.require(not exchange, "the ranks exchange gradients before the update")
    build.require(not coupled(optimizer), coupled(optimizer))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    parameters = [p for p in model.parameters() if id(p) in trained]
    build.require(len(parameters) == len(trained), "the optimizer updates tensors outside of the model")
    return parameters
