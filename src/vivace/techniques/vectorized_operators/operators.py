"""Operators of torch's on the CPU by `kernels.c`: the same numbers, bit for bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.mechanisms.exchanged import Exchanged
from vivace.operators import LEAST_ONE_BY_ONE
from vivace.tensors.modules import both
from vivace.torch_internals.kernels import exchange

SOURCE = Path(__file__).with_name("kernels.c")
SUMMED = (torch.float32, torch.bfloat16)
WHOLE = 2**53  # numbers up to it are exact in double precision
MOST_PIXELS = 2**31  # of a feature map: places in it are counted in 32 bits
CHOSEN = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
Told = Callable[[str, int], object]


class Pool(ctypes.Structure):
    """What `pool` is given, as in C."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("planes", "height", "width", "out_height", "out_width")),
        *((name, ctypes.c_int64 * 2) for name in ("window", "stride", "padding", "dilation")),
        ("half", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def choose(mask: Tensor, a: Tensor, b: Tensor, out: Tensor) -> bool:
    """``torch.where(mask, a, b)`` into a dense `out`; False, with nothing done, where this is not for it.

    `a` and `b` are dense and of the shape of `out`, or of no dimension, and all of one dtype in `CHOSEN`.
    """
    spread = mask.expand(out.shape)
    sizes, steps = _merged(out.shape, spread.stride())
    if steps[-1] not in (0, 1):
        return False
    whole = [_place(one) if one.dim() else ctypes.c_void_p(0) for one in (a, b)]
    numbers = [ctypes.c_uint64(0 if one.dim() else _bits(one)) for one in (a, b)]
    axes = [(ctypes.c_int64 * len(sizes))(*each) for each in (sizes, steps)]
    counts = [ctypes.c_int64(each) for each in (out.element_size(), len(sizes))]
    threads = ctypes.c_int64(threads_for(out.numel()))
    compiled(SOURCE).choose(_place(out), _place(mask), *whole, *numbers, *counts, *axes, threads)
    return True


def _bits(number: Tensor) -> int:
    """Of a tensor of one number, as it lies in memory."""
    largest: int = 2 ** (8 * number.element_size()) - 1
    return int(number.view(CHOSEN[number.dtype])) & largest


def _merged(sizes: Sequence[int], steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same places by as few axes as a mask's strides allow."""
    found: list[tuple[int, int]] = []
    for size, step in zip(sizes, steps, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == step * size:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    found = found or [(1, 1)]
    return [size for size, _ in found], [step for _, step in found]


def _where(own: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Tensor, self: Tensor, other: Tensor) -> Any:
        whole = self if self.dim() else other
        suits = _suits(whole.numel()) and condition.dtype == torch.bool and whole.dtype in CHOSEN
        if not suits or torch.result_type(self, other) != whole.dtype:
            return own(condition, self, other)
        a, b = (one if one.dim() else one.to(whole.dtype) for one in (self, other))
        dense = [one.shape == whole.shape and one.is_contiguous() for one in (a, b) if one.dim()]
        suits = all(dense) and a.dtype == b.dtype and _broadcasts(condition, whole)
        if not suits or not _in_order(condition, whole) or _elsewhere(condition, a, b):
            return own(condition, self, other)
        out = torch.empty_like(whole, memory_format=torch.contiguous_format)
        if not choose(condition, a, b, out):
            return own(condition, self, other)
        _ours.tell("where", out.numel())
        return out

    return where


def _broadcasts(mask: Tensor, whole: Tensor) -> bool:
    """Does it give each number of the other one a place, with one for several along some axes?"""
    last = whole.shape[whole.dim() - mask.dim() :] if mask.dim() <= whole.dim() else ()
    return len(last) == mask.dim() and all(map(_fits, mask.shape, last))


def _fits(size: int, wanted: int) -> bool:
    return size in (1, wanted)


def _in_order(mask: Tensor, whole: Tensor) -> bool:
    """Do its axes follow each other in memory as those of `whole`? Else torch's output follows the mask."""
    spread = mask.expand(whole.shape)
    axes = [axis for axis in zip(spread.stride(), spread.shape, strict=True) if axis[0]]
    return axes == sorted(axes, reverse=True)


def _masked_fill(own: Callable[..., Any]) -> Callable[..., Any]:
    def masked_fill(self: Tensor, mask: Tensor, value: Tensor | float) -> Any:
        suits = _suits(self.numel()) and self.dtype in CHOSEN and mask.dtype == torch.bool
        suits = suits and self.is_contiguous() and not _elsewhere(self, mask) and not _overlap(self, mask)
        suits = suits and _broadcasts(mask, self)
        if isinstance(value, Tensor):
            suits = suits and not value.dim() and value.device.type == "cpu"
        number: object = value.item() if suits and isinstance(value, Tensor) else value
        whole = isinstance(number, int) and abs(number) <= WHOLE
        suits = suits and (whole or isinstance(number, float))
        if suits and isinstance(number, (int, float)) and math.isfinite(number):
            suits = abs(number) <= torch.finfo(self.dtype).max
        if not suits or not choose(mask, torch.tensor(number, dtype=self.dtype, device="cpu"), self, self):
            own(self, mask, value)
        else:
            _ours.tell("masked_fill", self.numel())
        return self

    return masked_fill


def _max_pool(own: Callable[..., Any]) -> Callable[..., Any]:
    def max_pool(
        self: Tensor,
        kernel_size: list[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        ceil_mode: bool = False,
    ) -> Any:
        given = (kernel_size, stride, padding, dilation)
        suits = _suits(self.numel()) and self.dtype in SUMMED and self.dim() in (3, 4)
        suits = suits and self.is_contiguous() and not _elsewhere(self)
        suits = suits and all(1 <= len(one) <= 2 for one in (kernel_size, stride or [1], padding, dilation))
        if not suits or (self.dim() == 4 and self.is_contiguous(memory_format=torch.channels_last)):
            return own(self, *map(list, given), ceil_mode)
        window, steps, around, apart = (
            both(one) for one in (kernel_size, stride or kernel_size, padding, dilation)
        )
        sizes = (self.shape[-2], self.shape[-1])
        outputs = [_outputs(*one, ceil_mode) for one in zip(sizes, window, steps, around, apart, strict=True)]
        odd = any(not 0 <= 2 * p <= k for p, k in zip(around, window, strict=True))
        odd = odd or min(window + steps + apart) < 1
        if odd or min(outputs) < 1 or sizes[0] * sizes[1] >= MOST_PIXELS:
            return own(self, *map(list, given), ceil_mode)
        found = self.new_empty((*self.shape[:-2], *outputs))
        indices = torch.empty_like(found, dtype=torch.int64)
        pairs = [(ctypes.c_int64 * 2)(*pair) for pair in (window, steps, around, apart)]
        planes = self.numel() // (sizes[0] * sizes[1])
        half, threads = int(self.dtype == torch.bfloat16), threads_for(self.numel())
        shape = Pool(planes, *sizes, *outputs, *pairs, half, threads)
        failed = compiled(SOURCE).pool(*map(_place, (self, found, indices)), ctypes.byref(shape))
        if failed:
            return own(self, *map(list, given), ceil_mode)
        _ours.tell("max_pool", self.numel())
        return found, indices

    return max_pool


def _outputs(size: int, window: int, step: int, around: int, apart: int, ceil_mode: bool) -> int:
    """How many outputs a row has, as torch counts them: each window begins in the row or before it."""
    if step < 1:
        return 0
    free = size + 2 * around - apart * (window - 1) - 1
    outputs = (free + (step - 1 if ceil_mode else 0)) // step + 1
    return outputs - 1 if ceil_mode and (outputs - 1) * step >= size + around else outputs


def _index_put(own: Callable[..., Any]) -> Callable[..., Any]:
    def index_put(
        self: Tensor,
        indices: Sequence[Tensor | None],
        values: Tensor,
        accumulate: bool = False,
        unsafe: bool = False,
    ) -> Any:
        suits = accumulate and _suits(values.numel()) and len(indices) == 1
        rows = indices[0] if suits else None
        suits = rows is not None and rows.dtype == torch.int64 and self.dtype == values.dtype in SUMMED
        if rows is None or not suits or not self.dim() or not self.is_contiguous():
            own(self, indices, values, accumulate, unsafe)
            return self
        fits = values.shape == (*rows.shape, *self.shape[1:]) and self.numel() > 0
        # By several axes torch goes in the order in which they lie in memory.
        fits = fits and (rows.dim() <= 1 or (rows.is_contiguous() and values.is_contiguous()))
        if not fits or _elsewhere(self, rows, values) or _overlap(self, values) or _overlap(self, rows):
            own(self, indices, values, accumulate, unsafe)
            return self
        rows, values = rows.contiguous(), values.contiguous()
        outside = compiled(SOURCE).add_rows(
            *map(_place, (self, rows, values)),
            *map(ctypes.c_int64, (len(self), rows.numel(), self[0].numel())),
            *map(ctypes.c_int64, (int(self.dtype == torch.bfloat16), threads_for(values.numel()))),
        )
        if outside:  # torch says which
            own(self, indices, values, accumulate, unsafe)
        else:
            _ours.tell("index_put", values.numel())
        return self

    return index_put


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _prelu_backward(own: Callable[..., Any]) -> Callable[..., Any]:
    def prelu_backward(grad_output: Tensor, self: Tensor, weight: Tensor) -> Any:
        suits = _suits(self.numel()) and self.dtype in SUMMED and self.dim() >= 2
        suits = suits and self.dtype == weight.dtype == grad_output.dtype and weight.is_contiguous()
        channels = weight.numel()
        suits = suits and (channels == 1 or weight.shape[:2] == (1, self.shape[1]))
        suits = suits and channels in (1, self.shape[1]) and grad_output.shape == self.shape
        order = _order(self) if suits else None
        if order is None or _elsewhere(grad_output, self, weight):
            return own(grad_output, self, weight)
        found = torch.empty_like(self, memory_format=order), torch.empty_like(self, memory_format=order)
        if 1 in self.shape and not grad_output.stride() == self.stride() == found[0].stride():
            return own(grad_output, self, weight)  # which then gives such an axis another stride
        grad_output = grad_output.contiguous(memory_format=order)
        pixels = self[0, 0].numel()
        sizes = (len(self), channels, self.numel() // (len(self) * channels))
        if channels > 1 and order != torch.contiguous_format:
            sizes = (len(self) * pixels, channels, 1)
        half, threads = int(self.dtype == torch.bfloat16), threads_for(self.numel())
        compiled(SOURCE).prelu_backward(
            *map(_place, (grad_output, self, weight, *found)), *map(ctypes.c_int64, (*sizes, half, threads))
        )
        _ours.tell("prelu_backward", self.numel())
        return found

    return prelu_backward


def _order(tensor: Tensor) -> torch.memory_format | None:
    """In which of torch's orders it lies in memory without gaps; None: in another one."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    other = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return other if other is not None and tensor.is_contiguous(memory_format=other) else None


def _place(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _suits(numbers: int) -> bool:
    return bool(_ours.told) and numbers >= LEAST_ONE_BY_ONE


def _elsewhere(*tensors: Tensor) -> bool:
    return any(one.device.type != "cpu" or one.is_conj() or one.is_neg() for one in tensors)


INSTEAD = {
    "where.self": _where,
    "masked_fill_.Scalar": _masked_fill,
    "masked_fill_.Tensor": _masked_fill,
    "max_pool2d_with_indices": _max_pool,
    "_index_put_impl_": _index_put,
    "_prelu_kernel_backward": _prelu_backward,
}


def begin(told: Told) -> Callable[[], None]:
    """Compute these operators here, in the whole process, until what this returns is called, by all who have
    begun.

    `told` gets an operator's name and of how many numbers it was, each time. Raises Refused where torch's
    kernels cannot be exchanged, and OSError where the code cannot be compiled.
    """
    compiled(SOURCE)
    return _ours.begin(told)


def _put() -> None:
    for operator, make in INSTEAD.items():
        exchange(operator, make)


_ours = Exchanged(_put)
