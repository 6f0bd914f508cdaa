"""Tiles of single reads on TPUs: how many tokens one step of the grid holds, by what fits in VMEM.

A tile is that of phase 2, with a window more for each further array.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.merge.tiling import LANES, MOST_TOKENS, SHARE, SUBLANES, Tiling

MOST_SOURCES = 2
"""Finished sources that the kernels read; with more of them, two phases move fewer bytes."""


def tile_bytes(
    kind: Literal["forward", "backward"], tokens: int, n: int, d: int, dtype: DTypeLike
) -> int:
    """Returns the bytes of VMEM that windows, each held twice, and scratch of one step take.

    Args:
        kind: Which kernel.
        tokens: Rows of a grid step.
        n: Finished sources.
        d: Width of a row.
        dtype: The widest dtype among the rows.
    """
    width = math.ceil(d / LANES) * LANES
    # Rows in and out; float32 rows, and sums and columns of 128 lanes, that stay on the chip.
    if kind == "forward":
        rows, scratch_rows, columns = n + 4, 1, 3 * (n + 1)
    else:
        rows, scratch_rows, columns = 3 * n + 4, 2, 5 * (n + 1) + 1
    windows = 2 * rows * width * jnp.dtype(dtype).itemsize
    scratch = 4 * (scratch_rows * width + columns * LANES)
    statistics = 4 * 4 * 2 * SUBLANES
    vectors = 4 * 2 * SUBLANES * 4 * width
    return tokens * (windows + scratch + statistics) + vectors


def choose_tiling(
    kind: Literal["forward", "backward"],
    n: int,
    t: int,
    d: int,
    dtype: DTypeLike,
    *,
    vmem_bytes: int,
) -> Tiling | None:
    """Chooses the largest tile that fits, smaller if that makes the tiles come out even.

    Args:
        kind: Which kernel.
        n: Finished sources.
        t: Number of tokens, of all leading axes together.
        d: Width of a row.
        dtype: The widest dtype among the rows.
        vmem_bytes: VMEM of one core.

    Returns:
        The tile, or None where not even the smallest one fits.
    """
    registers = max(math.ceil(t / LANES), 1)
    fitting = [
        size
        for size in range(1, min(registers, MOST_TOKENS // LANES) + 1)
        if tile_bytes(kind, size * LANES, n, d, dtype) <= vmem_bytes * SHARE
    ]
    if not fitting:
        return None
    even = [size for size in fitting if registers % size == 0 and 2 * size >= fitting[-1]]
    return Tiling((even or fitting)[-1] * LANES, int(vmem_bytes * 0.95))
