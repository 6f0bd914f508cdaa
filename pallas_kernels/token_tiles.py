"""What kernels of a single read do with a tile of tokens: sums over d, and scalars of each token.

Scalars of 128 tokens lie along the lanes of a register, where one instruction treats them all; to
scale rows they are spread into columns, a token in each sublane.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.merge.tiling import LANES, SUBLANES

LEFT, RIGHT = (0, 1, 2, 0, 1, 0), (0, 0, 0, 1, 1, 2)
"""Orders of two factors' parts whose products add up to the float32 product."""
_WIDTH = 256  # Elements of d taken at once: two registers wide, so that half precision packs fully.


class Taker:
    """Hands out the references of a kernel in order; None for those that a launch has not."""

    def __init__(self, refs):
        self.refs = iter(refs)

    def __call__(self, present: bool = True) -> Any:
        """Returns the next one, if it is `present`."""
        return next(self.refs) if present else None


def pieces(d: int) -> list[slice]:
    """Slices along d; the last may be narrower."""
    return [slice(first, min(first + _WIDTH, d)) for first in range(0, d, _WIDTH)]


def whole(array: jax.Array) -> pl.BlockSpec:
    """All of a matrix, in every step."""
    return pl.BlockSpec(array.shape, lambda *_: (0, 0))


def add_rounded(partial_sum: jax.Array, update: jax.Array) -> jax.Array:
    """The sum of the two, rounded to the dtype of the first."""
    if partial_sum.dtype == update.dtype:
        return partial_sum + update
    return (partial_sum.astype(jnp.float32) + update.astype(jnp.float32)).astype(partial_sum.dtype)


def for_each(tokens: int, size: int):
    """Runs the function below it for every `size` tokens of the tile, given their slice."""

    def run(body):
        def step(i, carry):
            body(pl.ds(pl.multiple_of(i * size, size), size))
            return carry

        jax.lax.fori_loop(0, tokens // size, step, 0)

    return run


def clear_padding(t: int, index: jax.Array, row_refs: list, scalar_refs: list) -> None:
    """Zeroes what pads the last tile: it may be NaN, and sums over tokens must not see it.

    Args:
        t: Tokens of the whole array.
        index: Of this tile, among those that cover them.
        row_refs: Tiles of rows, `[tokens, d]`.
        scalar_refs: Tiles with tokens along lanes, `[k, tokens]`.
    """
    tokens = row_refs[0].shape[0]
    n_last = t % tokens
    if not n_last:
        return

    @pl.when(index == t // tokens)
    def _():
        for ref in row_refs:
            ref[n_last:, :] = jnp.zeros((tokens - n_last, ref.shape[1]), ref.dtype)
        for ref in scalar_refs:
            ref[:, n_last:] = jnp.zeros((ref.shape[0], tokens - n_last), ref.dtype)


def groups_of(register, size: int) -> list:
    """Slices of so many of the 128 tokens of `register`: few enough for registers to hold."""
    return [pl.ds(register.start + first, size) for first in range(0, LANES, size)]


def store_lane_sums(sums_ref, group, products: list[jax.Array]) -> None:
    """Adds up arrays `[t, w]` lane by lane, with period 128, into `[t, 128]`."""
    registers = [p[:, i : i + LANES] for p in products for i in range(0, p.shape[1], LANES)]
    total = jnp.zeros((registers[0].shape[0], LANES), jnp.float32)
    for register in registers:
        if register.shape[1] == LANES:
            total += register
    sums_ref[group, :] = total
    if registers[-1].shape[1] < LANES:
        sums_ref[group, : registers[-1].shape[1]] += registers[-1]


def add_lanes(sums_ref, group, along_d: slice, product: jax.Array) -> None:
    """Adds `[t, w]` lane by lane, with period 128, to `[t, 128]`, which the first piece clears."""
    if along_d.start == 0:
        sums_ref[group, :] = jnp.zeros((product.shape[0], LANES), jnp.float32)
    total = product[:, :LANES]
    if product.shape[1] == 2 * LANES:
        total += product[:, LANES:]
    sums_ref[group, : total.shape[1]] += total
    if LANES < product.shape[1] < 2 * LANES:
        sums_ref[group, : product.shape[1] - LANES] += product[:, LANES:]


def sum_lanes(sums: jax.Array) -> jax.Array:
    """`[t, 128]` -> the sum over lanes, `[t, 1]`."""
    return jnp.sum(sums, axis=1, keepdims=True)


def as_row(column: jax.Array) -> jax.Array:
    """`[t, 1]`, or the same in each of 128 lanes, -> `[1, t]`."""
    token = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    on_diagonal = token == jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    rows = [
        jnp.sum(jnp.where(on_diagonal, column[i : i + LANES], 0.0), axis=0, keepdims=True)
        for i in range(0, column.shape[0], LANES)
    ]
    return jnp.concatenate(rows, axis=1)


def as_columns(*scalars: jax.Array) -> jax.Array:
    """Spreads k arrays `[1, t]` over 128 lanes each, a token in each sublane: `[t, k * 128]`."""

    def column(row):
        blocks = [row[:, i : i + LANES] for i in range(0, row.shape[1], LANES)]
        return jnp.concatenate([jnp.broadcast_to(x, (LANES, LANES)).T for x in blocks])

    return jnp.concatenate([column(row) for row in scalars], axis=1)


def widen(column: jax.Array, like: jax.Array) -> jax.Array:
    """`[t, 128]`, the same in every lane -> `[t, w]`, to multiply an array of that width."""
    width = like.shape[1]
    if width <= LANES:
        return column[:, :width]
    return jnp.concatenate([column, column[:, : width - LANES]], axis=1)


def sum_sublanes(x: jax.Array) -> jax.Array:
    """`[t, w]` -> `[8, w]`, adding every eighth token."""
    total = x[:SUBLANES]
    for first in range(SUBLANES, x.shape[0], SUBLANES):
        total += x[first : first + SUBLANES]
    return total


def bfloat16_parts(row: jax.Array, order: tuple[int, ...] = (0, 1, 2)) -> jax.Array:
    """float32 `[1, w]` -> `[8, w]`: the three bfloat16 numbers that add up to it, largest first.

    One a row, in this order; the other rows are zeros.
    """
    at = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, row.shape[1]), 0)
    parts = jnp.zeros(at.shape, jnp.float32)
    for part in range(3):
        high = row.astype(jnp.bfloat16).astype(jnp.float32)
        for i, wanted in enumerate(order):
            if wanted == part:
                parts = jnp.where(at == i, high, parts)
        row = row - high
    return parts.astype(jnp.bfloat16)


def dot_float32(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product on the matrix unit, summed in float32; exact for bfloat16 numbers."""
    axes = (contract[:1], contract[1:])
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)
