"""Mixed precision in float16, with the loss scaled so that small gradients do not vanish."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.mechanisms.half_precision import ScaledOptimizer, autocast, left_in_half, share_in
from vivace.operators import MATRIX_CLASSES
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Plain, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Fp16Autocast(Technique):
    """The forward pass under `torch.autocast` to float16; backward on a scaled loss.

    Gradients are unscaled before anyone sees them. A step whose gradients overflowed is skipped and the scale
    halved; `Facts.skipped_steps` counts them.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PRECISION,
        numerics=Numerics.ROUNDING,
        summary="matrix products and convolutions in float16 by autocast, with loss scaling",
        source="https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        slot="precision",
        unit_roundoff=UNIT_ROUNDOFF["float16"],
        measured_on=("cpu", "cuda"),
    )

    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Annotated[int, Field(ge=1)] = 2000

    def apply(self, build: Build) -> None:
        """Autocast the forward seam; scale, unscale and skip around the seams that follow."""
        import torch

        from vivace.tensors.modules import has_float32, looked_at_by_hooks, modules_of

        build.require(has_float32(build.models), "no weight is float32")
        device = build.device.type
        recurrent = device == "cpu" and modules_of(build.model, torch.nn.LSTM)
        build.require(not recurrent, "a CPU cannot train an LSTM in float16")
        halved = next((n for n, p in build.model.named_parameters() if _is_trained_in_half(p)), "")
        build.require(
            not halved, f"the weight '{halved}' is in float16, whose gradient torch does not unscale"
        )
        complex_too = any(weight.is_complex() for weight in build.model.parameters())
        build.require(not complex_too, "a weight is complex, whose gradient torch cannot unscale")
        reason = "whose gradients would stay scaled: freeze it (requires_grad_(False)), or use bf16_autocast"
        left_out = _left_out(build)
        build.require(not left_out, f"the optimizer leaves out '{left_out}', {reason}")
        hooked = " and ".join(f"'{name}'" for name in looked_at_by_hooks(build.model) if name)
        reason = "would see gradients that are scaled: use bf16_autocast, or do that in on_gradients"
        build.require(not hooked, f"a hook of yours on {hooked} {reason}")
        autocast(build, torch.float16)
        scaler = torch.amp.GradScaler(device, self.initial_scale, growth_interval=self.growth_interval)
        build.facts.skipped_steps = 0

        proxy = ScaledOptimizer(build)
        unscaled: list[bool] = []  # where a step failed behind its gradients, the scaler waits for its end

        def end() -> None:
            unscaled.clear()
            scaler.update()

        def backward(following: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
            if unscaled:
                end()
            following(scaler.scale(loss))  # type: ignore[arg-type]

        def finish(following: Callable[[], None]) -> None:
            following()
            scaler.unscale_(proxy)  # type: ignore[arg-type]
            unscaled.append(True)

        def update(following: Callable[[], None]) -> None:
            proxy.expect(following)
            scaler.step(proxy)  # type: ignore[arg-type]  # waits for the device, unless the optimizer skips
            end()

        build.wrap(Seam.BACKWARD, backward)
        build.wrap(Seam.FINISH, finish)
        build.wrap(Seam.UPDATE, update)
        build.keep(scaler)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The share of matrix and convolution inputs that were float16."""
        return f"{share_in('float16', seen)}, {int(seen.facts.get('skipped_steps', 0))} steps skipped"

    def plain(self) -> Plain:
        """Autocast and a scaler, to which trainers have a word."""
        given = {"init_scale": self.initial_scale, "growth_interval": self.growth_interval}
        usual = {"init_scale": 65536.0, "growth_interval": 2000}  # of PyTorch's
        return Plain(
            autocast="float16",
            scaler={key: value for key, value in given.items() if value != usual[key]},
            transformers={"fp16": True},
            lightning={"precision": "16-mixed"},
            accelerate={"mixed_precision": "fp16"},
            note=left_in_half("float16"),
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """GPUs, and CPUs with float16 units."""
        device = machine.device
        return [cls()] if device.kind == "cuda" or "amx_fp16" in device.features else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Products at up to 8x on GPUs, memory traffic at nearly 2x; without hardware only slower.

        GPUs that have bfloat16 run both at one rate, and loss scaling looks at every gradient once more.
        """
        shares = profile.operator_shares
        products = sum(shares.get(name, 0.0) for name in MATRIX_CLASSES)
        device = machine.device
        if device.kind == "cpu" and "amx_fp16" not in device.features:
            return (1 / (1 + 4 * products), 1.0)
        rest = 1 - products
        return (1 / (1 + 0.5 * products + 0.3 * rest), 1 / (products / 8 + rest / 1.9))


def _is_trained_in_half(weight: torch.Tensor) -> bool:
    import torch

    return weight.requires_grad and weight.dtype == torch.float16


def _left_out(build: Build) -> str:
    """The name of a weight that gets gradients and is not updated; empty where there is none."""
    assert build.optimizer is not None
    updated = {id(weight) for group in build.optimizer.param_groups for weight in group["params"]}
    named = build.model.named_parameters()
    return next((name for name, p in named if p.requires_grad and id(p) not in updated), "")
