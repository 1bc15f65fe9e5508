"""What the Triton kernels share: tiles over rows of channels, masks of one bit an element, launch sizes.

A feature map in NHWC order is a matrix of `num_rows` pixels by `width` channels. A width that is a multiple
of 8 reaches a kernel as `eighths`, from which the compiler sees that rows begin at 16-byte boundaries.
Offsets inside of a tile are 32-bit, those of tiles 64-bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

TILE = 4096  # elements that a program holds at a time
MOST_COLUMNS = 128
# Of the passes that sum: whole waves, where a processor holds four programs of the statistics, and by their
# registers two or three of the gradients' sums.
STATISTICS_PROGRAMS, GRADIENT_PROGRAMS = 4, 6
FINISH_COLUMNS, FINISH_SPLITS = 16, 64  # the tile of the kernels that add splits up
APPLY_WARPS = 4  # of the passes that write
SUM_WARPS = JOINED_WARPS = 8  # of those that sum, and of two norms: these take most registers
FUSED_MULTIPLY_ADD = {"enable_fp_fusion": True}  # said at each launch: Triton 3.10 changes the default
PROCESSORS_WITHOUT_A_GPU = 2  # in Triton's interpreter


@triton.jit
def true_width(width, eighths, ALIGNED: tl.constexpr):
    """The number of channels, in the form that shows its divisor."""
    return eighths * 8 if ALIGNED else width


@triton.jit
def bytes_of_row(width, eighths, ALIGNED: tl.constexpr):
    """Bytes that one row of a bit mask takes."""
    return eighths if ALIGNED else (width + 7) // 8


@triton.jit
def tile_of_program(num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the tile of a program over all tiles is: its first row and column, its columns and which of them
    there are, which elements there are, where it begins, and the elements' offsets from there.
    """
    num_columns = tl.cdiv(width, COLUMNS)
    first = (tl.program_id(0) // num_columns) * ROWS
    first_column = (tl.program_id(0) % num_columns) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = columns < width
    rows = tl.arange(0, ROWS)
    there = (first + rows < num_rows)[:, None] & inside[None, :]
    offsets = rows[:, None] * width + columns[None, :]
    return first, first_column, columns, inside, there, first.to(tl.int64) * width, offsets


@triton.jit
def split_of_program(num_rows, rows_a_split, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows that a program sums, from one to before another; its first column, its columns and which of
    them there are; the offsets of a tile's elements, and the places of a split's sums.
    """
    begin = tl.program_id(1) * rows_a_split
    first_column = tl.program_id(0) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    offsets = tl.arange(0, ROWS)[:, None] * width + columns[None, :]
    end, place = tl.minimum(begin + rows_a_split, num_rows), tl.program_id(1) * width + columns
    return begin, end, first_column, columns, columns < width, offsets, place


@triton.jit
def splits_from(start, num_splits, columns, inside, width, SPLITS: tl.constexpr):
    """The numbers of some splits, which of their partial sums there are, and the offsets of these."""
    splits = start + tl.arange(0, SPLITS)
    there = (splits < num_splits)[:, None] & inside[None, :]
    return splits, there, splits[:, None] * width + columns[None, :]


@triton.jit
def store_bits(
    mask_ptr, bits, first, first_column, end, row_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write a tile of booleans, eight neighbouring columns in one byte, the lowest first."""
    rows = tl.arange(0, ROWS)
    columns = first_column // 8 + tl.arange(0, COLUMNS // 8)
    eights = tl.reshape(bits.to(tl.int32), [ROWS, COLUMNS // 8, 8])
    packed = tl.sum(eights << tl.arange(0, 8)[None, None, :], axis=2).to(tl.uint8)
    there = (first + rows < end)[:, None] & (columns < row_bytes)[None, :]
    offsets = rows[:, None] * row_bytes + columns[None, :]
    tl.store(mask_ptr + first.to(tl.int64) * row_bytes + offsets, packed, mask=there)


@triton.jit
def load_bits(mask_ptr, first, first_column, end, row_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile of zeros and ones that `store_bits` wrote."""
    rows = tl.arange(0, ROWS)
    columns = first_column // 8 + tl.arange(0, COLUMNS // 8)
    there = (first + rows < end)[:, None] & (columns < row_bytes)[None, :]
    offsets = rows[:, None] * row_bytes + columns[None, :]
    packed = tl.load(mask_ptr + first.to(tl.int64) * row_bytes + offsets, mask=there, other=0)
    bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bits, [ROWS, COLUMNS])


@triton.jit
def scale_and_bias(rstd, weight_ptr, bias_ptr, columns, inside, AFFINE: tl.constexpr):
    """What deviations from the mean are multiplied by, and what is added, a channel."""
    if AFFINE:
        scale = rstd * tl.load(weight_ptr + columns, mask=inside, other=0).to(tl.float32)
        bias = tl.load(bias_ptr + columns, mask=inside, other=0).to(tl.float32)
    else:
        scale = rstd
        bias = tl.zeros_like(rstd)
    return scale, bias


class Tiles(NamedTuple):
    """How a matrix is cut: rows and columns of a tile, and for the passes that sum, splits of the rows."""

    rows: int
    columns: int
    num_columns: int
    rows_a_split: int
    num_splits: int

    @classmethod
    def of(
        cls, num_rows: int, width: int, device: torch.device, programs: int = STATISTICS_PROGRAMS
    ) -> Tiles:
        """Tiles of `TILE` elements; about so many `programs` a processor that sum."""
        columns = min(MOST_COLUMNS, max(16, triton.next_power_of_2(width)))
        rows, num_columns = TILE // columns, triton.cdiv(width, columns)
        wanted = max(1, programs * _processors(device) // num_columns)
        rows_a_split = rows * triton.cdiv(triton.cdiv(num_rows, wanted), rows)
        return cls(rows, columns, num_columns, rows_a_split, triton.cdiv(num_rows, rows_a_split))

    def constants(self, width: int) -> dict[str, Any]:
        """What a kernel over a matrix of that width is compiled for."""
        return {"ALIGNED": width % 8 == 0, "ROWS": self.rows, "COLUMNS": self.columns}

    def num_tiles(self, num_rows: int) -> int:
        """Tiles of the whole matrix."""
        return -(-num_rows // self.rows) * self.num_columns


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Launches go to the tensor's GPU; a CPU's tensors are for the interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
