"""What the techniques that compute in half precision share: their condition, proof and prediction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.operators import MATRIX_CLASSES
from vivace.technique import Build, Seam

if TYPE_CHECKING:
    import torch


def require_bfloat16(build: Build) -> None:
    """Raise Refused where no weight is float32, or the GPU has no bfloat16 units."""
    import torch

    from vivace.tensors.modules import has_float32

    build.require(has_float32(build.models), "no weight is float32")
    if build.device.type == "cuda":
        build.require(
            torch.cuda.get_device_capability(build.device) >= (8, 0),
            "this GPU has no bfloat16 units (they came with compute capability 8.0): try fp16_autocast",
        )


def autocast(build: Build, dtype: torch.dtype) -> None:
    """Run the models under `torch.autocast`; what they return is in fp32 again.

    In an own step nothing else is in `dtype`. Elsewhere the loss is under autocast, too, and gets fp32: a
    CPU's autocast leaves the log_softmax, sum and mean of half-precision numbers in half precision. A model
    that the person's loss calls where it has turned autocast off is not run in `dtype`. Where the loss writes
    to weights between two calls of a model, as adversarial training does, the second sees what it wrote.
    """
    import torch

    from vivace.tensors.modules import lent_forwards, patched
    from vivace.tensors.precision import sum_in_float32
    from vivace.tensors.trees import returned
    from vivace.torch_internals.tensors import version_of

    sum_in_float32(build, under_autocast=True)
    lower: Callable[[], Any] = partial(torch.autocast, build.device.type, dtype)
    around = nullcontext if build.own_step else lower
    weights: list[torch.Tensor] = []  # of which autocast may keep copies
    cast: list[int] = []  # their versions then

    def forget_other_weights() -> None:
        now = [version_of(weight) for weight in weights]
        if now != cast:
            torch.clear_autocast_cache()
            cast[:] = now

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: object, **keywords: object) -> Any:
            as_it_says = not (build.own_step or torch.is_autocast_enabled(build.device.type))
            if not (build.own_step or torch.compiler.is_compiling()):
                forget_other_weights()
            with nullcontext() if as_it_says else lower():
                outputs = original(*arguments, **keywords)
            return returned(outputs, dtype, torch.float32)

        return forward

    forwards = lent_forwards(build.models, wrapped)

    def run(following: Callable[[Any], Any], batch: Batch) -> Any:
        trained = (w for m in build.models for w in m.parameters() if w.requires_grad)
        weights[:] = () if build.own_step else (w for w in trained if not w.is_inference())
        with around(), patched(build.models, "forward", forwards()):
            result = following(batch)
        return result if build.own_step else result.float()

    build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)


def left_in_half(numbers: str) -> str:
    """A note for those who write autocast by hand: what it leaves in half precision on a CPU."""
    return (
        f"on a CPU sums and means of {numbers} stay {numbers}: give your loss the outputs as .float(); and "
        f"attention over some 256 positions or fewer is slower in {numbers}: give it float32"
    )


def share_in(dtype: str, seen: Observation) -> str:
    """The share of matrix and convolution inputs that were `dtype`. Raises Refused where none was."""
    count = seen.dtypes.get(dtype, 0)
    if not count:
        raise Refused(f"it changed nothing: no matrix product or convolution ran in {dtype}")
    return f"{count} of {sum(seen.dtypes.values())} matrix and convolution inputs in {dtype}"


def computes_bfloat16(machine: Machine) -> bool:
    """Has a processor instructions for products in bfloat16?"""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine.device.features))


def bfloat16_gain(profile: Profile, machine: Machine, casts: float) -> tuple[float, float]:
    """Products at up to 8x on GPUs and with AMX, elsewhere 4x, memory traffic at up to 2x; without hardware
    only slower.

    At worst the products take half as long and the rest `casts` of its time.
    """
    shares = profile.operator_shares
    products = sum(shares.get(name, 0.0) for name in MATRIX_CLASSES)
    device = machine.device
    if device.kind == "cpu" and not computes_bfloat16(machine):
        return (1 / (1 + 4 * products), 1.0)
    faster = 8 if device.kind == "cuda" or "amx_bf16" in device.features else 4
    rest = 1 - products
    return (1 / (1 + 0.5 * products + casts * rest), 1 / (products / faster + rest / 2))


class ScaledOptimizer:
    """An optimizer to a GradScaler: it sees the same gradients, and its step is the rest of the update seam.

    Where ``facts.skipped_steps`` is a number on the device, nobody waits for it: the optimizer is called
    in any case, with `found_inf` from the scaler, and leaves everything as it is after an overflow.
    """

    following: Callable[[], None]
    found_inf: torch.Tensor

    def __init__(self, build: Build) -> None:
        self.optimizer: Any = build.optimizer
        self.facts: Any = build.facts

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return not isinstance(self.facts.skipped_steps, int)

    def expect(self, following: Callable[[], None]) -> None:
        """Name the rest of the update seam; on the host a step counts as skipped until it comes."""
        self.following = following
        if not self._step_supports_amp_scaling:
            self.facts.skipped_steps += 1

    def step(self) -> None:
        """Run the rest of the update seam; the scaler calls it, or does not."""
        if not self._step_supports_amp_scaling:
            self.facts.skipped_steps -= 1
            self.following()
            return
        from vivace.tensors.optimizers import begin_momentum

        begin_momentum(self.optimizer)
        self.facts.skipped_steps.add_(self.found_inf)
        self.optimizer.grad_scale, self.optimizer.found_inf = None, self.found_inf
        try:
            self.following()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf
