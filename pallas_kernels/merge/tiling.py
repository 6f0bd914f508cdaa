"""Tiles of phase 2 on TPUs: how many tokens one step of the grid holds, by what fits in VMEM."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

SUBLANES, LANES = 8, 128
MOST_TOKENS = 1024
"""Tokens past which what a grid step costs besides its rows no longer matters."""
SHARE = 0.85
"""Share of VMEM that windows and scratch may take; the rest is for spilled registers."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The shape of one grid step.

    Attributes:
        tokens: Rows of every array that a step holds, a multiple of 128.
        vmem_bytes: What the kernel may use; None leaves it to the compiler.
    """

    tokens: int
    vmem_bytes: int | None = None

    def __post_init__(self):
        if self.tokens < LANES or self.tokens % LANES:
            raise ValueError(
                f"tokens: expected a positive multiple of {LANES} rows in a grid step, because"
                f" scalars of {LANES} tokens share a register; got {self.tokens}"
            )


def tile_bytes(kind: Literal["forward", "backward"], tokens: int, d: int, dtype: DTypeLike) -> int:
    """Returns the bytes of VMEM that windows, each held twice, and scratch of one step take.

    Args:
        kind: Which kernel.
        tokens: Rows of a grid step.
        d: Width of a row.
        dtype: The widest dtype among the rows: that of the partial sum.
    """
    width = math.ceil(d / LANES) * LANES
    # Rows in and out; float32 rows, and sums and columns of 128 lanes, that stay on the chip: in
    # the forward for 128 tokens at a time.
    rows, scratch_rows, columns = (5, 3, 5) if kind == "forward" else (6, 2, 7)
    windows = 2 * rows * width * jnp.dtype(dtype).itemsize
    scratch = 4 * (scratch_rows * width + columns * LANES)
    statistics = 4 * 4 * 2 * SUBLANES
    vectors = 4 * 2 * SUBLANES * 4 * width
    scratch_tokens = LANES if kind == "forward" else tokens
    return tokens * (windows + statistics) + scratch_tokens * scratch + vectors


def choose_tiling(
    kind: Literal["forward", "backward"],
    t: int,
    d: int,
    dtype: DTypeLike,
    *,
    vmem_bytes: int,
    tokens: int | None = None,
) -> Tiling | None:
    """Chooses the largest tile that fits, smaller if that makes the tiles come out even.

    Args:
        kind: Which kernel.
        t: Number of tokens, of all leading axes together.
        d: Width of a row.
        dtype: The widest dtype among the rows: that of the partial sum.
        vmem_bytes: VMEM of one core: 64 MiB on v5p and v7x, 128 MiB on v5e and v6e.
        tokens: Takes this tile instead of choosing one.

    Returns:
        The tile, or None where not even the smallest one fits.

    Raises:
        ValueError: `tokens` is not a positive multiple of 128, or does not fit.
    """
    budget, usable = int(vmem_bytes * SHARE), int(vmem_bytes * 0.95)
    if tokens is not None:
        tiling = Tiling(tokens, usable)
        needed = tile_bytes(kind, tokens, d, dtype)
        if needed > budget:
            raise ValueError(
                f"tokens: {tokens} rows of width {d} in {jnp.dtype(dtype)} take {needed} bytes of"
                f" VMEM in the {kind}, which may have {budget} of the chip's {vmem_bytes};"
                " pass fewer tokens, or None to have them chosen"
            )
        return tiling
    registers = max(math.ceil(t / LANES), 1)
    fitting = [
        n
        for n in range(1, min(registers, MOST_TOKENS // LANES) + 1)
        if tile_bytes(kind, n * LANES, d, dtype) <= budget
    ]
    if not fitting:
        return None
    even = [n for n in fitting if registers % n == 0 and 2 * n >= fitting[-1]]
    return Tiling((even or fitting)[-1] * LANES, usable)
