"""Convolutions as matrix products, where the convolution library is slower than the matrix library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.operators import SMALL_MAP
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

NARROWEST = 16  # channels: of fewer, a matrix of columns is mostly copying


@dataclasses.dataclass(frozen=True)
class ConvGemm(Technique):
    """Ungrouped convolutions call the matrix library instead of the convolution library.

    With a 1x1 window a feature map in channels-last order is a matrix of pixels by channels, and nothing is
    copied but what a stride leaves out; in another order all of it would be, so there such convolutions stay
    as they are: it goes with channels_last. A larger window's input is first laid out in columns, which pays
    where the map is small: there oneDNN's gradients of weights in bfloat16 take up to six times as long as
    its products. With compile, the compiler fuses what follows with the products, in any order. What it
    brings by itself has not been measured on a GPU yet.

    Args:
        window_pixels: the largest output, in pixels an image, of a convolution with a larger window than 1x1
            that becomes a product too; 0 leaves all of them as they are.
    """

    window_pixels: int = 0

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="convolutions as matrix products",
        source="https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/index.html",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
    )

    def apply(self, build: Build) -> None:
        """Put a matrix product in the place of every such convolution's forward."""
        from torch import nn

        from vivace.mechanisms.graphs import put_in_place
        from vivace.tensors.modules import both, is_product, modules_of, padding_of

        build.require(self.window_pixels >= 0, f"window_pixels is {self.window_pixels}; it must be 0 or more")

        def suits(module: nn.Conv2d) -> bool:
            if type(module) is not nn.Conv2d:  # what a subclass does with its weights is its own affair
                return False
            plain = module.groups == 1 and module.padding_mode == "zeros" and padding_of(module) is not None
            if module.kernel_size == (1, 1):
                return plain and is_product(module)
            wide = min(module.in_channels, module.out_channels) >= NARROWEST
            # The gradients of a product of columns are written out for real numbers.
            wide = wide and not module.weight.is_complex()
            return plain and wide and both(module.dilation) == (1, 1) and self.window_pixels > 0

        found = [m for model in build.models for m in modules_of(model, nn.Conv2d) if suits(m)]
        wanted = "a 1x1 window" if not self.window_pixels else f"a 1x1 window or {NARROWEST} channels or more"
        build.require(found, f"no 2-D convolution of one group without dilation has {wanted}")
        build.on_close(put_in_place(found, _product, self.window_pixels))
        build.notes["convolutions_as_products"] = len(found)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The products that took the place of convolutions, by the operators that ran."""
        before, after = (o.operators.get("aten::convolution", 0) for o in (reference, seen))
        if seen.compiled_graphs == 0 and after >= before:
            raise Refused("it changed nothing: as many convolutions ran as before")
        if seen.compiled_graphs:
            return f"up to {seen.notes['convolutions_as_products']} convolutions ran as matrix products"
        return f"{before - after} of {before} convolutions ran as matrix products"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Larger windows on a CPU alone: on a GPU the columns cost more than the convolution."""
        if machine.device.kind == "cuda":
            return [cls()] if profile.features.get("convolution_2d") else []
        return [cls(window_pixels=SMALL_MAP)] if profile.features.get("small_convolutions", 0.0) else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """The same operations and more or fewer bytes, by another library's kernels.

        Of ResNet-50 at 128 pixels in bfloat16 on two cores with matrix units, weights of 4x4 maps got their
        gradients up to six times as fast, and whole steps were 1.17 times as fast.
        """
        share = profile.operator_shares.get("convolution", 0.0) * profile.features.get(
            "small_convolutions", 1.0
        )
        return (1 / (1 + 0.2 * share), 1 / (1 - 0.5 * share))


def _product(
    module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], window_pixels: int, input: torch.Tensor
) -> torch.Tensor:
    import torch
    from torch.nn.functional import linear

    from vivace.techniques.conv_gemm.columns import convolution_by_columns, output_size
    from vivace.tensors.modules import both, is_product, padding_of
    from vivace.torch_internals.tensors import is_transformed

    padding, stride = padding_of(module), both(module.stride)
    plain = module.groups == 1 and module.padding_mode == "zeros"  # still
    if not plain or padding is None or not module.training or input.dim() != 4 or is_transformed():
        return own(input)
    # What the model does next, such as a view, may need a result in the input's order. One pixel is in both.
    in_order = input.stride(1) == 1 and input.stride(2) >= input.stride(3)
    if module.kernel_size == (1, 1):
        if not is_product(module) or not (in_order or torch.compiler.is_compiling()):
            return own(input)
        kept = input if stride == (1, 1) else input[:, :, :: stride[0], :: stride[1]]
        return linear(kept.movedim(1, -1), module.weight.flatten(1), module.bias).movedim(-1, 1)
    high, wide = output_size((input.shape[2], input.shape[3]), module.kernel_size, stride, padding)
    real = input.is_floating_point() and module.weight.is_floating_point()
    if not real or both(module.dilation) != (1, 1) or high * wide > window_pixels:
        return own(input)
    found = convolution_by_columns(input, module.weight, module.bias, stride, padding)
    return found if in_order else found.contiguous()
