"""Linear layers in 8-bit floating point, forward and backward, scaled by each tensor's largest number."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Plain, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

MULTIPLE = 16  # of a layer's sizes, which the matrix units ask for
LEAST = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}  # compute capability


@dataclasses.dataclass(frozen=True)
class Fp8Linear(Technique):
    """Linear layers round what they multiply to float8 (e4m3; gradients e5m2 under ``tensorwise``), scaled so
    that the largest number just fits; sums are in fp32, weights and all other layers stay as they are.

    It is torchao's float8 training. `recipe` is torchao's word for what has a scale of its own: a tensor,
    which is fastest, or each row of it; ``rowwise_with_gw_hp`` leaves the gradients of weights in full
    precision. Float8 keeps 4 significant bits, so a plan with it promises SEMANTICS and is judged by the
    metric. Evaluation runs in the job's own precision.

    `emulate` computes in fp32 what the matrix units would, slowly and on any device: to ask whether float8
    keeps the accuracy before renting a GPU that has it.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PRECISION,
        numerics=Numerics.SEMANTICS,
        summary="linear layers in 8-bit floating point (float8)",
        source="https://arxiv.org/abs/2209.05433",
        unit_roundoff=UNIT_ROUNDOFF["float8_e4m3fn"],
        measured_on=("cuda",),
    )

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    emulate: bool = False

    def apply(self, build: Build) -> None:
        """Let each linear layer whose sizes suit multiply in float8 while it trains."""
        import torch
        from torch import nn

        from vivace.mechanisms.forwards import runs_its_own
        from vivace.mechanisms.graphs import put_in_place
        from vivace.tensors.modules import modules_of

        if not self.emulate:
            build.require(
                build.device.type == "cuda",
                "float8 products need a GPU; emulate = true computes on any device, slowly, what they would",
            )
            build.require(
                torch.cuda.get_device_capability(build.device) >= LEAST[self.recipe],
                f"this GPU has no float8 units for the recipe '{self.recipe}', which came with compute "
                f"capability {'.'.join(map(str, LEAST[self.recipe]))}",
            )
        build.require(importlib.util.find_spec("torchao"), "torchao is not installed: pip install torchao")
        layers = [
            layer
            for model in build.models
            for layer in modules_of(model, nn.Linear)
            if type(layer) is nn.Linear
            and runs_its_own(layer)
            and layer.weight.dtype == torch.float32
            and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
        ]
        build.require(layers, f"no linear layer in fp32 has sizes that are multiples of {MULTIPLE}")
        build.notes["fp8_linear"] = [len(layers), 0]
        product = _product(self.recipe, self.emulate)
        build.on_close(put_in_place(layers, _in_float8, product, build.notes["fp8_linear"]))

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of float8 products that ran; where they are emulated, of layers that ran so."""
        layers, calls = seen.notes["fp8_linear"]
        which = words.count(layers, "linear layer")
        if self.emulate:
            if not calls:
                raise Refused("it changed nothing: no linear layer ran while training")
            return f"{which} rounded to float8, emulated"
        ran = {**seen.operators, **seen.kernels}
        products = sum(count for name, count in ran.items() if "scaled_mm" in name)
        if not products:
            raise Refused("it changed nothing: no product ran in float8")
        return f"{products} products in float8, of {which}"

    def plain(self) -> Plain:
        """torchao's own call."""
        suits = f"not (m.in_features % {MULTIPLE} or m.out_features % {MULTIPLE})"
        settings = f"emulate={self.emulate}, pad_inner_dim=True"
        return Plain(
            start=(
                "import dataclasses",
                "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
            ),
            model=(
                f"config = Float8LinearConfig.from_recipe_name({self.recipe!r})",
                f"config = dataclasses.replace(config, {settings})",
                f"convert_to_float8_training(model, config=config, module_filter_fn=lambda m, _: {suits})",
            ),
            note="torchao's layers stay in float8 while the model is evaluated",
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """On a GPU, for a model in fp32."""
        wanted = machine.device.kind == "cuda" and profile.features.get("dtype") == "float32"
        return [cls()] if wanted else []

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """Beside the compiler, which fuses the casts, and bfloat16 for the rest."""
        return [{"bf16_autocast": {}, "compile": {}}]

    def stricter(self) -> Technique | None:
        """Scales by rows, and gradients of weights in full precision."""
        if self.recipe == "rowwise_with_gw_hp":
            return None
        return dataclasses.replace(self, recipe="rowwise_with_gw_hp")

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Products at up to sixteen times fp32's rate on a GPU, where casts are fused; else only slower."""
        if machine.device.kind != "cuda":
            return (0.1, 1.0)
        share = profile.operator_shares.get("matmul", 0.0)
        return (0.5, 1 / (1 - 15 / 16 * share))


def _product(recipe: str, emulate: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(x, weight) -> x @ weight.T`` by torchao: x of shape (..., in), weight of shape (out, in)."""
    from torch import nn
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True
    )
    # The conversion also mends what torch's compiler would make of float8; its layer holds the settings.
    layer = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, device="meta"), config=config)
    assert isinstance(layer, Float8Linear)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = matmul_with_hp_or_float8_args.apply(
            x, weight.t(), layer.linear_mm_config, layer.config
        )
        return found

    return product


def _in_float8(
    module: nn.Linear,
    own: Callable[[torch.Tensor], torch.Tensor],
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    counts: list[int],
    input: torch.Tensor,
) -> torch.Tensor:
    import torch

    if not module.training or not input.numel():  # such as an expert that nothing was sent to
        return own(input)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    counts[1] += 1
    found = product(input, module.weight)
    return found if module.bias is None else found + module.bias.to(found.dtype)
