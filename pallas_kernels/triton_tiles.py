"""Triton pieces that the kernels of both phases share: tiles of a token's row, and sums over them.

A tile is a block of consecutive columns of a few tokens, computed as two halves x and y. Where
elements are 16 bits wide and d is even, a tile is kept as 32-bit words: x are the low halves of the
words and y the high ones, which are the even and the odd columns. Kept as elements, each would take
a register of its own. Otherwise x and y are the first and the second half of the columns.
"""

# The decorated functions are compiled by Triton, which knows no annotation but tl.constexpr.
import jax
import triton
import triton.language as tl

NEVER = 2**30
"""A number that no count in a kernel reaches, which only the compiler does not know."""


@triton.jit
def load_tile(
    base, tokens, counts, chunk, D: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr
):
    """Loads columns of `[t, d]`, zero outside: a tuple of one tensor of words or of two halves."""
    if PACKED:
        if base.dtype.element_ty == tl.float32:
            # A float32 array beside 16-bit ones: the same columns in each half.
            column = chunk * 2 * HALF + tl.arange(0, 2 * HALF)
            offsets = tokens[:, None] * D + column[None, :]
            mask = counts[:, None] & (column < D)[None, :]
            tile = tl.load(base + offsets, mask=mask, other=0.0)
            return tl.split(tl.reshape(tile, (tile.shape[0], HALF, 2)))
        else:
            words = base.to(tl.pointer_type(tl.int32))
            column = chunk * HALF + tl.arange(0, HALF)
            offsets = tokens[:, None] * (D // 2) + column[None, :]
            mask = counts[:, None] & (column < D // 2)[None, :]
            return (tl.load(words + offsets, mask=mask, other=0),)
    else:
        x = chunk * 2 * HALF + tl.arange(0, HALF)
        y = x + HALF
        rows = base + tokens[:, None] * D
        return (
            tl.load(rows + x[None, :], mask=counts[:, None] & (x < D)[None, :], other=0.0),
            tl.load(rows + y[None, :], mask=counts[:, None] & (y < D)[None, :], other=0.0),
        )


@triton.jit
def halves(tile, sixteen, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """A loaded tile as two float32 halves.

    `sixteen` is 16. A kernel that uses a tile several times passes it in different guises, each of
    which the compiler cannot see through: it would else keep float32 copies, and spill registers.
    """
    if not PACKED or DTYPE == tl.float32:
        return tile[0].to(tl.float32), tile[1].to(tl.float32)
    elif DTYPE == tl.bfloat16:
        # The upper half of a float32 is a bfloat16.
        x = tile[0] << sixteen
        y = tile[0] & (-1 << sixteen)
        return x.to(tl.float32, bitcast=True), y.to(tl.float32, bitcast=True)
    else:
        x = (tile[0] >> (sixteen - 16)).to(tl.int16)
        y = (tile[0] >> sixteen).to(tl.int16)
        x = x.to(tl.float16, bitcast=True).to(tl.float32)
        return x, y.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_tile(
    base, tokens, counts, chunk, x, y, D: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr
):
    """Rounds two float32 halves once and stores them where `load_tile` would read them."""
    dtype = base.dtype.element_ty
    rows = base + tokens[:, None] * D
    if PACKED:
        column = chunk * 2 * HALF + tl.arange(0, 2 * HALF)
        joined = tl.reshape(tl.join(x, y), (x.shape[0], 2 * HALF))
        mask = counts[:, None] & (column < D)[None, :]
        tl.store(rows + column[None, :], joined.to(dtype), mask=mask)
    else:
        x_column = chunk * 2 * HALF + tl.arange(0, HALF)
        y_column = x_column + HALF
        x_mask = counts[:, None] & (x_column < D)[None, :]
        y_mask = counts[:, None] & (y_column < D)[None, :]
        tl.store(rows + x_column[None, :], x.to(dtype), mask=x_mask)
        tl.store(rows + y_column[None, :], y.to(dtype), mask=y_mask)


@triton.jit
def vector_columns(chunk, D: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr):
    """Columns of a float32 vector that belong to halves x and y, and where they exist.

    The vector is laid out by `planes`: where tiles are words, even columns first.
    """
    if PACKED:
        x = chunk * HALF + tl.arange(0, HALF)
        return x, x + D // 2, x < D // 2, x < D // 2
    else:
        x = chunk * 2 * HALF + tl.arange(0, HALF)
        return x, x + HALF, x < D, x + HALF < D


@triton.jit
def in_thread_sum(x, LANES: tl.constexpr):
    """Sums each run of columns that lies in one thread: `[t, columns]` -> `[t, lanes]`."""
    return tl.sum(tl.reshape(x, (x.shape[0], LANES, x.shape[1] // LANES)), 2)


@triton.jit
def sum_rows(
    partials,
    sums,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums `[count, width]` float32 over its rows, always in the same order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, COUNT, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < COUNT)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(partials + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < WIDTH)


def planes(vectors: jax.Array, *, packed: bool) -> jax.Array:
    """`[..., d]` vectors as `vector_columns` reads them: for words, even columns first."""
    if not packed:
        return vectors
    *leading, width = vectors.shape
    return vectors.reshape(*leading, width // 2, 2).swapaxes(-1, -2).reshape(*leading, width)


def unplanes(vectors: jax.Array, *, packed: bool) -> jax.Array:
    """The inverse of `planes`."""
    if not packed:
        return vectors
    *leading, width = vectors.shape
    return vectors.reshape(*leading, 2, width // 2).swapaxes(-1, -2).reshape(*leading, width)
