"""Small matrices of diagonal blocks, and exact products on the TPU's matrix unit."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.inter_block.tiling import GROUP, LANES


def matrix_tiles(
    n: int, dtype: jnp.dtype, matrix_width: int, stacked: bool
) -> tuple[list[range], int]:
    """Which sources share a matrix, and how many are left to the vector unit.

    One or two that would leave most of a last matrix empty cost less there.
    """
    beside = 1 if stacked else halves(dtype)
    most = min(matrix_width // (GROUP * beside), LANES // GROUP)
    added = n % most if n > most and n % most <= 2 else 0
    return [range(i, min(i + most, n - added)) for i in range(0, n - added, most)], added


def tile_rows(sources: range, dtype: jnp.dtype) -> int:
    """Rows of a tile of values: pairs of 8 rows in bfloat16, which fill a register."""
    return GROUP * (len(sources) + (len(sources) % 2 if halves(dtype) == 2 else 0))


def place(into: jax.Array, x: jax.Array, first: jax.Array, slot: int) -> jax.Array:
    """Copies lanes first .. first + 7 of x to the slot-th eight lanes of `into`."""
    lane = jax.lax.broadcasted_iota(jnp.int32, into.shape, 1)
    moved = roll(x, (slot * GROUP - first) % LANES)
    return jnp.where(lane // GROUP == slot, moved, into)


def diagonal_blocks(compact: jax.Array, width: int, dtype: jnp.dtype, stacked: bool) -> jax.Array:
    """`[s, (n, token)]` -> `[(s, token), (n, token')]`, zero where the tokens differ.

    The two bfloat16 parts are columns (part, n, token'), so that every value has to be loaded into
    the matrix unit twice; or, when there are few reads, stacked as rows (part, s, token).
    """
    rows = compact.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (1, GROUP, LANES), 1)
    diagonal = jax.lax.broadcasted_iota(jnp.int32, (1, GROUP, LANES), 2) % GROUP == row

    def expand(x):
        x = jnp.broadcast_to(x[:, None], (rows, GROUP, LANES))
        return jnp.where(diagonal, x, 0.0).reshape(rows * GROUP, LANES).astype(dtype)

    if halves(dtype) == 1:
        return expand(compact)[:, :width]
    high, low = split(compact)
    if stacked:
        return jnp.concatenate([expand(high), expand(low)])[:, :width]
    low = roll(low, width % LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, compact.shape, 1)
    first = expand(jnp.where(lane < width, high, low))
    if 2 * width <= LANES:
        return first[:, : 2 * width]
    return jnp.concatenate([first, expand(low)], axis=1)[:, : 2 * width]


def stacks_halves(s: int, dtype: jnp.dtype, matrix_width: int) -> bool:
    """Whether the backward's weights have their two bfloat16 parts as rows, and not as columns.

    That takes 16 rows a source instead of 8, and so pays where it makes columns of the cotangents
    and of the queries fit into one matrix that side by side would take two.
    """
    one, two = s * (GROUP + 2), s * (2 * GROUP + 3)
    return halves(dtype) == 2 and one <= matrix_width < two <= 2 * matrix_width


def summing_matrix(s: int, dtype: jnp.dtype, copies: int) -> jax.Array:
    """Sums `[.., (half, s, token)]` over halves and tokens; in bfloat16 so many times over."""
    ones = jnp.repeat(jnp.eye(s, dtype=dtype), GROUP, axis=0)
    return ones if halves(dtype) == 1 else jnp.tile(ones, (2, copies))


def query_rows(folded_sd: jax.Array, dtype: jnp.dtype, parts=(0, 1, 2)) -> jax.Array:
    """Queries as sums of bfloat16 rows, `[3 s, d]`; float32 ones as they are."""
    if halves(dtype) == 1:
        return folded_sd
    high, rest = split(folded_sd)
    middle, low = split(rest)
    rows = high, (rest if max(parts) == 1 else middle), low
    return jnp.concatenate([rows[i].astype(dtype) for i in parts])


def side_by_side(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 as its two bfloat16 parts along columns."""
    if halves(dtype) == 1:
        return x
    return jnp.concatenate([part.astype(dtype) for part in split(x)], axis=1)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 number's leading bits, which bfloat16 holds exactly, and the rest."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def halves(dtype: jnp.dtype) -> int:
    """How many numbers of this dtype a float32 one is split into."""
    return 2 if dtype == jnp.bfloat16 else 1


def operand(x: jax.Array) -> jax.Array:
    """What the matrix unit takes: bfloat16 or float32."""
    return x if x.dtype == jnp.bfloat16 else to_float32(x)


def dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """`a b`, or `a b^T`, summed in float32: exact products of bfloat16, or full float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def lane_sums(x: jax.Array) -> jax.Array:
    """Sums `[t, w]` over registers: `[t, 128]`."""
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    parts[-1] = fill_lanes(parts[-1])
    return functools.reduce(jnp.add, parts)


def fill_lanes(x: jax.Array) -> jax.Array:
    """Pads `[t, w]`, w <= 128, with zeros to whole registers."""
    return jnp.pad(x, ((0, 0), (0, LANES - x.shape[1]))) if x.shape[1] < LANES else x


def roll(x: jax.Array, by: jax.Array | int) -> jax.Array:
    """Moves lanes up by so many, the last ones to the front."""
    return pltpu.roll(x, by, x.ndim - 1)


def to_float32(x: jax.Array) -> jax.Array:
    """Converts to float32."""
    return x.astype(jnp.float32)
