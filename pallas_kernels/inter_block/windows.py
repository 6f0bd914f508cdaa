"""Which part of each array a grid step sees, and how it walks over its tokens and columns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.inter_block.matrices import roll, to_float32
from pallas_kernels.inter_block.tiling import LANES, Tiling


class Windows:
    """The grid, and which part of each array a step of it sees: (cores, lane tiles, row tiles)."""

    def __init__(self, t: int, d: int, tiling: Tiling, cores: int = 1):
        self.d, self.tokens = d, tiling.tokens
        self.lanes = max(tiling.tokens, LANES)
        self.row_tiles, self.lane_tiles = pl.cdiv(t, self.tokens), pl.cdiv(t, self.lanes)
        tiles = pl.cdiv(self.lane_tiles, cores)
        # No core without tokens: it would write a tile that is another's.
        self.grid = (pl.cdiv(self.lane_tiles, tiles), tiles, self.lanes // self.tokens)

    def _lane_tile(self, core, tile):
        # Steps past the end see the last tile again, and do nothing.
        return jnp.minimum(core * self.grid[1] + tile, self.lane_tiles - 1)

    def _row_tile(self, core, tile, part):
        step = (core * self.grid[1] + tile) * self.grid[2] + part
        return jnp.minimum(step, self.row_tiles - 1)

    def rows(self, source: int | None = None) -> pl.BlockSpec:
        """Rows of an array `[t, d]`, or of one source of a bank `[n, t, d]` if that counts."""
        if source is None:
            return pl.BlockSpec((self.tokens, self.d), lambda *i: (self._row_tile(*i[:3]), 0))

        def index(core, tile, part, count_ref):
            # One that does not count stays at the first rows of the first source: fetched once.
            counts = source < count_ref[0]
            row_tile = self._row_tile(core, tile, part)
            return jnp.where(counts, source, 0), jnp.where(counts, row_tile, 0), 0

        return pl.BlockSpec((None, self.tokens, self.d), index)

    def bank_rows(self, n: int) -> pl.BlockSpec:
        """Rows of all sources of a bank `[n, t, d]`."""
        return pl.BlockSpec((n, self.tokens, self.d), lambda *i: (0, self._row_tile(*i[:3]), 0))

    def statistics(self, *leading: int) -> pl.BlockSpec:
        """Lanes of an array `[..., t]`."""
        zeros = (0,) * len(leading)
        return pl.BlockSpec((*leading, self.lanes), lambda *i: (*zeros, self._lane_tile(*i[:2])))

    def per_core(self, s: int) -> pl.BlockSpec:
        """All of a core's `[1, s, d]`."""
        return pl.BlockSpec((1, s, self.d), lambda *i: (i[0], 0, 0))

    @staticmethod
    def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
        """All of an array, in every step."""
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


class Lanes:
    """Where a subtile's tokens are in a window of statistics: moves them to the first lanes."""

    def __init__(self, tokens: int, start: jax.Array, aligned: bool, valid: jax.Array):
        self.tokens, self.start, self.aligned, self.valid = tokens, start, aligned, valid

    def get(self, ref, index, valid_only: bool = False) -> jax.Array:
        """Reads the lanes of this subtile; zero past the last token if `valid_only`."""
        if self.aligned:
            block = ref.at[..., pl.ds(pl.multiple_of(self.start, LANES), LANES)][index]
        else:
            block = roll(ref[index], LANES - self.start)
        if valid_only:
            lane = jax.lax.broadcasted_iota(jnp.int32, block.shape, block.ndim - 1)
            block = jnp.where(lane < self.valid, block, 0.0)
        return block

    def put(self, ref, index, block: jax.Array) -> None:
        """Writes the lanes of this subtile."""
        index = index if isinstance(index, tuple) else (index,)
        if self.aligned:
            ref[*index, pl.ds(pl.multiple_of(self.start, LANES), LANES)] = block
            return
        lane = jax.lax.broadcasted_iota(jnp.int32, block.shape, block.ndim - 1)
        inside = (lane >= self.start) & (lane < self.start + self.tokens)
        ref[index] = jnp.where(inside, roll(block, self.start), ref[index])


def for_subtiles(t: int, tiling: Tiling, cleared: list, subtile: Callable) -> None:
    """Runs `subtile(index, lanes)` over the tokens of this grid step, 128 at a time."""
    part = pl.program_id(2)
    step = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * pl.num_programs(2) + part
    tokens = min(tiling.tokens, LANES)

    @pl.when(step < pl.cdiv(t, tiling.tokens))
    def _():
        valid = t - step * tiling.tokens
        if t % tiling.tokens:

            @pl.when(valid < tiling.tokens)
            def _():
                # Rows past the last token may hold NaN, and products would spread them.
                for ref in cleared:
                    _clear(ref, valid)

        def run(index, carry):
            start = index * tokens if tiling.tokens >= LANES else part * tokens
            lanes = Lanes(tokens, start, tiling.tokens >= LANES, valid - index * tokens)
            subtile(index, lanes)
            return carry

        subtiles = tiling.tokens // tokens
        # Two are scheduled as one: the second starts while the first ends.
        jax.lax.fori_loop(0, subtiles, run, 0, unroll=subtiles == 2)


def _clear(ref, valid: jax.Array) -> None:
    def clear(index, carry):
        rows = pl.ds(pl.multiple_of(index * 16, 16), 16)
        row = jax.lax.broadcasted_iota(jnp.int32, (16, ref.shape[1]), 0) + index * 16
        ref[rows, :] = jnp.where(row < valid, to_float32(ref[rows, :]), 0.0).astype(ref.dtype)
        return carry

    jax.lax.fori_loop(0, ref.shape[0] // 16, clear, 0)


def for_columns(d: int, width: int, body: Callable[[Any], None]) -> None:
    """Runs `body` over `width` columns at a time; the last time also over those that are left."""
    steps = max(d // width - 1, 0)

    def step(index, carry):
        body(pl.ds(pl.multiple_of(index * width, width), width))
        return carry

    if steps > 1:
        jax.lax.fori_loop(0, steps, step, 0)
    elif steps == 1:
        body(pl.ds(0, width))
    body(pl.ds(steps * width, d - steps * width))


def taker(refs) -> Any:
    """Hands out the references of a kernel in order, one or a list of k."""
    remaining = iter(refs)
    return lambda k=None: next(remaining) if k is None else [next(remaining) for _ in range(k)]


def row_refs(take, n: int, bank: bool) -> Any:
    """One ref `[t, d]` for each source."""
    if not bank:
        return take(n)
    ref = take()
    return [ref.at[i] for i in range(n)]
