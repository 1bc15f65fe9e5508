"""The person's own optimizer in its fused implementation: one pass over the memory of all parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace.errors import Refused, ran_out_of_memory
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Plain, Stage, Technique

if TYPE_CHECKING:
    import torch

KEYS = ("fused", "foreach")


@dataclasses.dataclass(frozen=True)
class FusedOptimizer(Technique):
    """The optimizer's own ``fused`` or ``foreach`` key; its state and saved settings stay the person's."""

    card: ClassVar[Card] = Card(
        stage=Stage.OPTIMIZER,
        numerics=Numerics.ROUNDING,
        summary="the optimizer's own fused implementation",
        source="https://docs.pytorch.org/docs/stable/optim.html#algorithms",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
        on_shards="",
    )

    kind: Literal["fused", "foreach"] = "fused"

    def apply(self, build: Build) -> None:
        """Set the keys in every parameter group; a saved `state_dict` keeps the person's."""
        import torch

        from vivace.tensors.modules import has_sparse_gradients
        from vivace.tensors.optimizers import aligned, begin_momentum, is_dense, switch_optimizer

        build.require(not build.own_step, "your own step function holds its optimizers itself")
        optimizer = build.optimizer
        assert optimizer is not None
        name = type(optimizer).__name__
        inner = [o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)]
        build.require(not inner, f"{name} wraps another optimizer: hand over the one inside of it")
        build.require(self.kind in optimizer.defaults, f"{name} has no {self.kind} implementation")
        before = [{key: group.get(key) for key in KEYS} for group in optimizer.param_groups]
        build.require(not any(b["fused"] for b in before), f"{name} is fused already")
        default = "foreach" if build.device.type == "cuda" else None
        current = [b["foreach"] if b["foreach"] is not None else default == "foreach" for b in before]
        build.require(
            self.kind == "fused" or not all(current), f"{name} runs its foreach implementation already"
        )
        sparse = has_sparse_gradients(build.models)
        build.require(not sparse, "an embedding has sparse gradients, which this implementation cannot take")
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        complex_too = self.kind == "fused" and not all(p.is_floating_point() for p in weights)
        build.require(not complex_too, "a weight is complex, which this implementation cannot take")
        inside = [tuple(p.shape) for p in weights if self.kind == "fused" and not is_dense(p)]
        build.require(
            not inside,
            f"a weight of the shape {inside and inside[0]} is a part of a larger tensor, whose other numbers "
            "this implementation would change: give it memory of its own (clone())",
        )
        _try(build, optimizer, self.kind)
        undo = contextlib.ExitStack()
        build.on_close(undo.close)
        undo.enter_context(aligned([optimizer]))  # a state may lie otherwise, such as one that was loaded
        build.on_close(switch_optimizer(optimizer, {key: key == self.kind for key in KEYS}))
        if self.kind == "fused":
            build.on_close(optimizer.register_step_pre_hook(begin_momentum).remove)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The fused or foreach operators that ran and that the reference does not have."""
        mark = "_fused_" if self.kind == "fused" else "_foreach_"
        found = sorted(name for name in seen.operators if mark in name and name not in reference.operators)
        if not found:
            raise Refused(f"it changed nothing: no {self.kind} operator ran")
        return ", ".join(found[:3])

    def plain(self) -> Plain:
        """The keyword `fused` of PyTorch's own optimizer."""
        return Plain(optimizer={self.kind: True})

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Fused first; foreach is the default on GPUs already."""
        return [cls()] if machine.device.kind == "cuda" else [cls(), cls(kind="foreach")]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At most the update's share of the step, of which a fifth remains."""
        share = profile.shares.get("update", 0.0)
        return (1 / (1 + 0.1 * share), 1 / (1 - 0.8 * share))


def _try(build: Build, optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Refuse where a copy of the optimizer on one number cannot take a step.

    Of a class that wants more than its settings, a copy of the first one that it is derived from and that
    does not.
    """
    import torch

    def wants_no_more(cls: type) -> bool:
        own = list(inspect.signature(cls.__init__).parameters.values())[2:]  # type: ignore[misc]
        many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return all(p.default is not p.empty or p.kind in many or p.name in optimizer.defaults for p in own)

    cls: Any = next(filter(wants_no_more, type(optimizer).__mro__))
    known = inspect.signature(cls.__init__).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in known}
    number = torch.zeros(1, device=build.device, requires_grad=True)
    number.grad = torch.zeros_like(number)
    try:
        cls([number], **{**settings, **{key: key == kind for key in KEYS if key in known}}).step()
    except (RuntimeError, TypeError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        raise Refused(f"{type(optimizer).__name__} cannot run {kind} here: {error}") from None
