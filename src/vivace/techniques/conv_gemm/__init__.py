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
        from vivace.mechanisms.forwards import own_convolutions
        from vivace.mechanisms.graphs import put_in_place
        from vivace.tensors.modules import both, is_product, padding_of

        build.require(self.window_pixels >= 0, f"window_pixels is {self.window_pixels}; it must be 0 or more")

        def suits(module: nn.Conv2d) -> bool:
            plain = module.groups == 1 and module.padding_mode == "zeros" and padding_of(module) is not None
            if module.kernel_size == (1, 1):
                return plain and is_product(module)
            wide = min(module.in_channels, module.out_channels) >= NARROWEST
            # The gradients of a product of columns are written out for real numbers.
            wide = wide and not module.weight.is_complex()
            return plain and wide and both(module.dilation) == (1, 1) and self.window_pixels > 0

        found = [m for m in own_convolutions(build.models) if suits(m)]
        wanted = "a 1x1 window" if not self.window_pixels else f"a 1x1 window or {NARROWEST} channels or more"
        build.require(found, f"no 2-D convolution of one group without dilation has {wanted}")
        build.notes["convolutions_as_products"] = counts = [len(found), 0]
        build.on_close(put_in_place(found, _product, self.window_pixels, counts))

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many convolutions may be products, where any was."""
        count, calls = seen.notes["convolutions_as_products"]
        if not calls and not seen.compiled_graphs:
            raise Refused("it changed nothing: no convolution ran as a matrix product")
        return f"up to {count} convolution{'s'[: count != 1]} ran as matrix products"

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
    module: nn.Conv2d,
    own: Callable[[torch.Tensor], torch.Tensor],
    window_pixels: int,
    counts: list[int],
    input: torch.Tensor,
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
        _count(counts)
        kept = input if stride == (1, 1) else input[:, :, :: stride[0], :: stride[1]]
        return linear(kept.movedim(1, -1), module.weight.flatten(1), module.bias).movedim(-1, 1)
    high, wide = output_size((input.shape[2], input.shape[3]), module.kernel_size, stride, padding)
    real = input.is_floating_point() and module.weight.is_floating_point()
    if not real or both(module.dilation) != (1, 1) or high * wide > window_pixels:
        return own(input)
    _count(counts)
    found = convolution_by_columns(input, module.weight, module.bias, stride, padding)
    return found if in_order else found.contiguous()


def _count(counts: list[int]) -> None:
    import torch

    if not torch.compiler.is_compiling():  # which would compile anew for each number
        counts[1] += 1
