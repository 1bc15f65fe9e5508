"""Convolutions with 3x3 windows by `kernels.c` and products, as operators that PyTorch's tools know.

`vivace::winograd` and `vivace::winograd_weights` read feature maps in NHWC memory order, copy what lies
otherwise, and give maps in that order. Which results and gradients are theirs follows from shapes alone, so
that runs repeat bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from vivace.mechanisms.c_code import compiled
from vivace.operators import gains_by_winograd, tiles_along
from vivace.tensors.modules import in_nhwc, is_wide_window, lies_in_nhwc, padding_of
from vivace.torch_internals.tensors import is_transformed

SOURCE = Path(__file__).with_name("kernels.c")
PLANES = 36  # of one tile: a row and column of six each
NUMBERS_AT_ONCE = 1 << 19  # of the planes of some tiles, so that they stay in a processor's cache
TILES_AT_ONCE = 128  # at least: products of fewer rows are slow
PADDING = 16  # floats between planes: at powers of two they would share the same few lines of a cache


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("height", "width", "channels", "top", "left")),
        *(
            (name, ctypes.c_int64)
            for name in ("tiles_high", "tiles_wide", "first", "count", "plane", "threads")
        ),
    ]


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("plane", "flipped", "threads")),
    ]


def library() -> ctypes.CDLL:
    """The kernels. Raises OSError where they cannot be compiled."""
    return compiled(SOURCE)


def convolution(module: nn.Conv2d, x: Tensor) -> Tensor | None:
    """What the module gives for a batch of images in NHWC memory order; None where nothing would gain."""
    weight, bias, padding = module.weight, module.bias, padding_of(module)
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in given):
        return None
    if torch.is_autocast_enabled("cpu") or padding is None or is_transformed():
        return None
    if not (lies_in_nhwc(x) or lies_in_nhwc(weight)):  # where the library's result is not, either
        return None
    fits = x.shape[1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    if not (is_wide_window(module) and fits):  # whose settings and weights may have changed
        return None
    if not gains_by_winograd(weight.shape, _size(x, weight, padding, False)):
        return None
    return cast("Tensor", _Winograd.apply(x, weight, bias, padding))  # type: ignore[no-untyped-call]


class _Winograd(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.padding = padding
        return cast("Tensor", torch.ops.vivace.winograd(x, weight, bias, padding, False))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        for_input, for_weights, for_bias = context.needs_input_grad[:3]
        if torch.is_grad_enabled():  # these gradients are to be differentiated in turn
            asked = (False, (0, 0), 1, context.needs_input_grad[:3])
            where = ((1, 1), context.padding, (1, 1))
            found = torch.ops.aten.convolution_backward(gradient, x, weight, [len(weight)], *where, *asked)
            return (*found, None)
        of_input = of_weights = None
        if for_input:
            around = [2 - p for p in context.padding]
            of_input = torch.ops.vivace.winograd(gradient, weight, None, around, True)
        if for_weights:
            of_weights = torch.ops.vivace.winograd_weights(gradient, x, weight, context.padding)
        return of_input, of_weights, gradient.sum((0, 2, 3)) if for_bias else None, None


class _Tiles:
    """Some of the tiles of a convolution, with room for their planes: of its input, and of its result."""

    def __init__(
        self, x: Tensor, y: Tensor, padding: Sequence[int], first: int, count: int, room: Sequence[Tensor]
    ) -> None:
        self.x, self.y, self.padding, self.first, self.count = x, y, padding, first, count
        # An odd number of rows: planes whose sizes are powers of two share a few lines of a cache.
        rows = count | 1
        self.of_x, self.of_y = (
            one[: PLANES * rows * maps.shape[1]].view(PLANES, rows, maps.shape[1])
            for one, maps in zip(room, (x, y), strict=True)
        )
        self.of_x[:, count:].zero_()  # numbers of nobody may be slow ones

    @classmethod
    def all(cls, x: Tensor, y: Tensor, padding: Sequence[int]) -> Iterator[_Tiles]:
        """All tiles, a few at a time; the room is used again."""
        total = len(y) * tiles_along(y.shape[2]) * tiles_along(y.shape[3])
        widest = max(x.shape[1], y.shape[1])
        parts = -(-total // max(TILES_AT_ONCE, NUMBERS_AT_ONCE // (PLANES * widest)))
        most = -(-total // parts)
        room = [x.new_empty(PLANES * (most | 1) * maps.shape[1]) for maps in (x, y)]
        for first in range(0, total, most):
            yield cls(x, y, padding, first, min(most, total - first), room)

    def take_input(self) -> None:
        """Planes of the input."""
        self._run("planes_of_input", self.x, self.of_x, self.x, before=self.padding)

    def take_gradient(self) -> None:
        """Planes of the gradient of the result."""
        self._run("planes_of_gradient", self.y, self.of_y, self.y)

    def give(self, bias: Tensor | None) -> None:
        """The result from its planes."""
        self._run("output_of", self.of_y, self.y, bias, self.y)

    def _run(self, name: str, *tensors: Tensor | None, before: Sequence[int] = (0, 0)) -> None:
        *given, maps = tensors
        channels, height, width = cast("Tensor", maps).shape[1:]
        along = [tiles_along(size) for size in self.y.shape[2:]]
        plane = (self.count | 1) * channels
        where = (*before, *along, self.first, self.count, plane, torch.get_num_threads())
        _run(name, _Shape(height, width, channels, *where), *given)


def _winograd(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], back: bool) -> Tensor:
    """The convolution, or with `back` the one that gives its input's gradient from its result's."""
    given, found = in_nhwc(x), _result(x, weight, bias, padding, back)
    size = len(weight) * weight.shape[1]
    room = weight.new_empty(PLANES * (size + PADDING)).view(PLANES, -1)
    factors = room[:, :size].view(PLANES, *weight.shape[:2])
    _run("planes_of_weights", _weights(weight, size + PADDING, flipped=back), weight, factors)
    factors = factors if back else factors.transpose(1, 2)
    bias = None if bias is None else bias.contiguous()
    for tiles in _Tiles.all(given, found, padding):
        tiles.take_input()
        torch.bmm(tiles.of_x, factors, out=tiles.of_y)
        tiles.give(bias)
    return found


def _winograd_weights(gradient: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    x, gradient = in_nhwc(x), in_nhwc(gradient)
    sums = weight.new_empty(PLANES, *weight.shape[:2])
    for tiles in _Tiles.all(x, gradient, padding):
        tiles.take_input()
        tiles.take_gradient()
        of_x, of_y = (planes[:, : tiles.count] for planes in (tiles.of_x, tiles.of_y))
        torch.baddbmm(sums, of_y.transpose(1, 2), of_x, beta=min(1, tiles.first), out=sums)
    found = torch.empty_like(weight)
    _run("weights_of", _weights(found, sums[0].numel()), sums, found)
    return found


def _size(x: Tensor, weight: Tensor, padding: Sequence[int], back: bool) -> tuple[int, int, int, int]:
    high, wide = (size + 2 * p - 2 for size, p in zip(x.shape[2:], padding, strict=True))
    return len(x), weight.shape[1 if back else 0], high, wide


def _weights(weight: Tensor, plane: int, *, flipped: bool = False) -> _Weights:
    strides = (ctypes.c_int64 * 4)(*weight.stride())
    return _Weights(len(weight), weight.shape[1], strides, plane, int(flipped), torch.get_num_threads())


def _run(name: str, shape: _Shape | _Weights, *tensors: Tensor | None) -> None:
    pointers = [None if one is None else ctypes.c_void_p(one.data_ptr()) for one in tensors]
    if getattr(library(), name)(*pointers, ctypes.byref(shape)):
        raise MemoryError("there is no memory left for the tiles at the edge of a map")


def _result(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], back: bool) -> Tensor:
    shape = _size(x, weight, padding, back)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _like_weight(gradient: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    return torch.empty_like(weight)


_LIBRARY = torch.library.Library("vivace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _arguments, _function, _shapes in (
    ("winograd", "Tensor x, Tensor weight, Tensor? bias, int[] padding, bool back", _winograd, _result),
    (
        "winograd_weights",
        "Tensor gradient, Tensor x, Tensor weight, int[] padding",
        _winograd_weights,
        _like_weight,
    ),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"vivace::{_name}", _shapes, lib=_LIBRARY)


@register_flop_formula(torch.ops.vivace.winograd)  # type: ignore[untyped-decorator]
def _operations(
    x: torch.Size,
    weight: torch.Size,
    bias: torch.Size | None,
    padding: Sequence[int],
    back: bool,
    out_shape: torch.Size,
) -> int:
    """As many as a plain convolution's: what it saves is not counted, as torch counts other libraries."""
    return 2 * (x if back else out_shape).numel() * weight[1:].numel()


@register_flop_formula(torch.ops.vivace.winograd_weights)  # type: ignore[untyped-decorator]
def _operations_for_weights(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, padding: Sequence[int], out_shape: torch.Size
) -> int:
    return 2 * gradient.numel() * weight[1:].numel()
