"""Recurrent layers on a CPU without an operator for each gate of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclasses.dataclass
class Ran:
    """How many modules of such layers there are, and how many calls of them were run here."""

    modules: int
    calls: int = dataclasses.field(default=0, repr=False)  # with the steps of a session: no sign of the plan


@dataclasses.dataclass(frozen=True)
class FusedRecurrent(Technique):
    """Recurrent layers on a CPU: of each step one matrix product and one pass of C code.

    PyTorch runs some ten operators for the gates of each step and twice as many for their gradients, and adds
    up the gradient of the weights step by step. Here that is one product over all steps. States are float32
    within a layer. Acts in training on `nn.GRU` and `nn.RNN`, and on `nn.LSTM` where its batch is packed, of
    sequences of several lengths: for others PyTorch's own library has such code. Cells that are called step
    by step, and projected states, stay as they are. The C code is compiled once for the machine.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="the gates of recurrent layers in one pass a step",
        source="https://arxiv.org/abs/1604.01946",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cpu",),
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Compile the C code where this machine has none yet, and let such layers call it."""
        import torch
        from torch import nn

        from vivace.mechanisms.c_code import compiled
        from vivace.mechanisms.forwards import act_in_steps
        from vivace.techniques.fused_recurrent.layers import KINDS, SOURCE, in_place_of
        from vivace.tensors.modules import modules_of

        every = [m for model in build.models for m in modules_of(model, nn.GRU, nn.LSTM, nn.RNN)]
        own = (nn.GRU.forward, nn.LSTM.forward, nn.RNN.forward)
        found = [m for m in every if type(m).forward in own]
        build.require(found, "the model has no GRU, LSTM or plain RNN of PyTorch's")
        try:
            compiled(SOURCE)
        except OSError as error:
            raise Refused(f"its C code could not be compiled: {error}") from error
        build.notes["layers_over_steps"] = ran = Ran(len(found))

        def told() -> None:
            ran.calls += 1

        functions = {kind: in_place_of(kind, told) for kind in KINDS}
        uncompiled = torch.compiler.disable(_over_steps)  # type: ignore[no-untyped-call]  # as without it
        act_in_steps(build, found, uncompiled, functions)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Of how many modules it ran such layers."""
        ran: Ran = seen.notes["layers_over_steps"]
        if not ran.calls:
            raise Refused(
                "it changed nothing: no GRU or RNN, and no LSTM of packed sequences, that it takes over ran "
                "in training"
            )
        count = "one module" if ran.modules == 1 else f"up to {ran.modules} modules"
        return f"recurrent layers of {count} in one pass a step"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where such layers run on a CPU."""
        return [cls()] if profile.features.get("stepwise_recurrent") else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Gates take little then, and products over all steps less than those of each."""
        return (0.95, 3.0) if profile.features.get("stepwise_recurrent") else (1.0, 1.0)


def _over_steps(
    _: nn.Module,
    own: Callable[..., tuple[Tensor, Tensor]],
    functions: dict[str, Callable[..., Any]],
    *inputs: Tensor,
    **named: Tensor,
) -> tuple[Tensor, Tensor]:
    from vivace.torch_internals.recurrent import in_place

    with in_place(functions):
        return own(*inputs, **named)
