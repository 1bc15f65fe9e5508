"""How the rows of a matrix product are split between programs; `product` and its kernel follow it."""

from __future__ import annotations

TILE = 8192  # elements of the result that a program holds at a time
MOST_ROWS = MOST_COLUMNS = 128
PROGRAMS = 1024  # at most: about four turns of the processors of a large GPU, and few partial sums


def split_rows(num_rows: int, width: int) -> int:
    """Rows of one split: whole tiles, so many that at most `PROGRAMS` programs sum."""
    rows, columns = tile_of(width)
    splits = max(1, PROGRAMS // -(-width // columns))
    return rows * -(-num_rows // (rows * splits))


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile: powers of two, and no smaller than matrix units take."""
    columns = min(MOST_COLUMNS, max(16, 1 << (width - 1).bit_length()))
    return min(MOST_ROWS, TILE // columns), columns
