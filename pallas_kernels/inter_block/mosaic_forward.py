"""What one grid step of the forward kernel of phase 1 does on a TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.inter_block.matrices import (
    diagonal_blocks,
    dot,
    fill_lanes,
    halves,
    lane_sums,
    operand,
    place,
    tile_rows,
    to_float32,
)
from pallas_kernels.inter_block.tiling import GROUP, LANES, Tiling, pad
from pallas_kernels.inter_block.windows import for_columns, for_subtiles, taker

ABSENT = -1e30
"""Logit of a row past a bank's count: weighs nothing, and is no NaN when multiplied by zero."""


def forward_kernel(
    *refs,
    n,
    s,
    t,
    known,
    num_outputs,
    carried,
    counted,
    stacked,
    tiles,
    added,
    tiling: Tiling,
    eps: float,
):
    """See `mosaic_tpu.forward`, which lists the references in this order."""
    take = taker(refs)
    count_ref: Any = take() if counted else None
    query_ref = take()
    known_ref = take() if known else None
    carried_lse_ref: Any = take() if carried else None
    carried_refs = take(s) if carried else []
    value_refs, output_refs = take(n), take(num_outputs)
    lse_ref, logits_ref, new_ref, weights_ref, squares_ref, columns_ref = take(6)
    d, dtype = value_refs[0].shape[-1], value_refs[0].dtype
    tokens = min(tiling.tokens, LANES)

    def logits(rows):
        """Leaves <w_s, v_n> in weights_ref, and the squares of new sources in squares_ref."""
        in_one = d < 2 * tiling.contracted and not counted
        if not in_one:
            weights_ref[...] = jnp.zeros_like(weights_ref)
            squares_ref[...] = jnp.zeros_like(squares_ref)

        # Rows of a bank that do not count are not touched, so each of them is multiplied alone.
        together = 1 if counted else LANES // tokens

        def add(columns: pl.Slice):
            for first in range(0, n, together):
                several = range(first, min(first + together, n))

                def add_sources(sources=several):
                    values = [value_refs[i][rows, columns] for i in sources]
                    x = jnp.concatenate([operand(value) for value in values])
                    dots = dot(query_ref[:, columns], x, transposed=True)
                    parts = range(0, dots.shape[0], s)
                    dots = functools.reduce(jnp.add, [dots[k : k + s] for k in parts])
                    for k, i in enumerate(sources):
                        old = 0.0 if in_one else weights_ref[i, :s, :tokens]
                        weights_ref[i, :s, :tokens] = old + dots[:, k * tokens : (k + 1) * tokens]
                        if i >= known:
                            old = 0.0 if in_one else squares_ref[i - known]
                            squares = lane_sums(jnp.square(to_float32(values[k])))
                            squares_ref[i - known] = old + squares

                # The first always counts.
                pl.when(first < count_ref[0])(add_sources) if counted and first else add_sources()

        for_columns(d, tiling.contracted, add)

    def softmax(lanes):
        """Turns weights_ref into the depth weights, and writes the statistics."""
        for i in range(n):
            if i < known:
                r = lanes.get(known_ref, slice(i, i + 1))
            else:
                mean = jnp.sum(squares_ref[i - known].T, axis=0, keepdims=True) / d
                r = jax.lax.rsqrt(fill_lanes(mean) + eps)
                lanes.put(new_ref, slice(i - known, i - known + 1), r)
            logit = weights_ref[i] * r
            if counted and i:
                logit = jnp.where(i < count_ref[0], logit, ABSENT)
            weights_ref[i] = logit
            lanes.put(logits_ref, (slice(None), i), logit[:s])
        other: Any = None
        if carried:
            other = jnp.pad(lanes.get(carried_lse_ref, slice(None)), ((0, pad(s) - s), (0, 0)))
        top: Any = other if carried else weights_ref[0]
        for i in range(n):
            top = jnp.maximum(top, weights_ref[i])
        total = jnp.exp(other - top) if carried else jnp.zeros_like(top)
        for i in range(n):
            weights_ref[i] = jnp.exp(weights_ref[i] - top)
            total += weights_ref[i]
        for i in range(n):
            weights_ref[i] /= total
        lanes.put(lse_ref, slice(None), (top + jnp.log(total))[:s])
        for k in range(added):
            columns_ref[k] = weights_ref[n - added + k].T
        if carried:
            columns_ref[added] = (jnp.exp(other - top) / total).T

    def matrices(group):
        """The weights of a group's 8 tokens: for each tile, rows (s, token), columns (n, token)."""
        built = []
        for sources in tiles:
            compact = jnp.zeros((pad(s), LANES), jnp.float32)
            for k, i in enumerate(sources):
                compact = place(compact, weights_ref[i], GROUP * group, k)
            built.append(diagonal_blocks(compact[:s], tile_rows(sources, dtype), dtype, stacked))
        return built

    def mix(rows, group, built):
        tall = [
            [
                jnp.broadcast_to(
                    columns_ref[k, pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP), i : i + 1],
                    (GROUP, LANES),
                )
                for i in range(s)
            ]
            for k in range(added + carried)
        ]
        for start in range(0, d, tiling.finished):
            width = min(tiling.finished, d - start)
            columns = pl.ds(start, width)
            total: Any = 0.0
            for sources, matrix in zip(tiles, built, strict=True):
                slabs = [operand(value_refs[i][rows, columns]) for i in sources]
                if tile_rows(sources, dtype) > GROUP * len(slabs):
                    slabs.append(jnp.zeros_like(slabs[0]))
                product = dot(matrix, jnp.concatenate(slabs * (1 if stacked else halves(dtype))))
                total += product[: s * GROUP] + product[s * GROUP :] if stacked else product
            single = [to_float32(value_refs[n - added + k][rows, columns]) for k in range(added)]
            for i, output_ref in enumerate(output_refs):
                output = total[i * GROUP : (i + 1) * GROUP]
                for lane in range(0, width if tall else 0, LANES):
                    part = slice(lane, min(lane + LANES, width))
                    others = single + [ref[rows, columns] for ref in carried_refs[i : i + 1]]
                    added_up = sum(
                        column[i][:, : part.stop - part.start] * other[:, part]
                        for column, other in zip(tall, others, strict=True)
                    )
                    output_ref[rows, pl.ds(start + lane, part.stop - part.start)] = (
                        output[:, part] + added_up
                    ).astype(output_ref.dtype)
                if not tall:
                    output_ref[rows, columns] = output.astype(output_ref.dtype)

    def subtile(index, lanes):
        logits(pl.ds(pl.multiple_of(index * tokens, tokens), tokens))
        softmax(lanes)
        if not output_refs:
            return

        def step(group, built):
            following = matrices((group + 1) % (tokens // GROUP))
            first = pl.multiple_of(index * tokens + group * GROUP, GROUP)
            mix(pl.ds(first, GROUP), group, built)
            return following

        jax.lax.fori_loop(0, tokens // GROUP, step, matrices(0), unroll=tiling.unroll)

    for_subtiles(t, tiling, value_refs, subtile)
