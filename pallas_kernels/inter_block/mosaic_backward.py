"""What one grid step of the backward kernel of phase 1 does on a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.inter_block.matrices import (
    dot,
    halves,
    operand,
    place,
    side_by_side,
    split,
    to_float32,
)
from pallas_kernels.inter_block.tiling import GROUP, LANES, Tiling
from pallas_kernels.inter_block.windows import for_columns, for_subtiles, row_refs, taker


def backward_kernel(*refs, n, s, t, counted, centred, weighed, accumulate, stacked, tiling: Tiling):
    """See `mosaic_tpu.backward`, which lists the references in this order."""
    take = taker(refs)
    if counted:
        take()
    query_ref, summing_ref, logits_ref, inverse_rms_ref, lse_ref, shift_ref = take(6)
    dlogits_ref = take() if weighed else None
    value_refs, doutput_refs = take(n), take(s)
    old_refs: Any = row_refs(take, n, counted) if accumulate else None
    dvalue_refs = row_refs(take, n, counted)
    dfolded_ref, statistics_ref, coefficients_ref = take(3)
    d, dtype = value_refs[0].shape[-1], value_refs[0].dtype
    tokens = min(tiling.tokens, LANES)
    groups = tokens // GROUP
    num_halves = halves(dtype)
    tiles = [range(first, min(first + LANES // GROUP, s)) for first in range(0, s, LANES // GROUP)]
    lse_row, shift_row, dlogits_row = 2 * n, 2 * n + 1, 2 * n + 2

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dfolded_ref[...] = jnp.zeros_like(dfolded_ref)

    def gather(lanes):
        """Rows of one read side by side: logits, inverse RMS, log-sum-exp, shift, dlogits."""
        for i in range(s):
            parts = [(0, logits_ref, i), (n, inverse_rms_ref, ...)]
            parts += [(lse_row, lse_ref, slice(i, i + 1)), (shift_row, shift_ref, slice(i, i + 1))]
            parts += [(dlogits_row, dlogits_ref, i)] * weighed
            for row, ref, index in parts:
                block = lanes.get(ref, index, valid_only=True)
                statistics_ref[i, row : row + block.shape[0]] = block

    def products(rows):
        """<do_s, v_n> for a group: rows (n, token), columns (s, token')."""
        # The matrix unit holds the right factor and takes the rows of the left one: the fewer.
        by_read = s < n
        left, right = (doutput_refs, value_refs) if by_read else (value_refs, doutput_refs)
        total = jnp.zeros((len(left) * GROUP, len(right) * GROUP), jnp.float32)
        for start in range(0, d, tiling.contracted):
            columns = pl.ds(start, min(tiling.contracted, d - start))
            total += dot(
                jnp.concatenate([operand(ref[rows, columns]) for ref in left]),
                jnp.concatenate([operand(ref[rows, columns]) for ref in right]),
                transposed=True,
            )
        return total.T if by_read else total

    def mean_over_sources(p, a):
        # Off the diagonal p is zero, so this sums over the sources of one token.
        total = jnp.sum(sum(p[i] * a[i] for i in range(n)), axis=0, keepdims=True)
        return jnp.broadcast_to(total, p[0].shape)

    def matrices(group, product):
        """Weights and dlogits of a group, as one matrix to multiply do and w with."""
        weights, dlogits, shrink = [[] for _ in range(n)], [[] for _ in range(n)], [0.0] * n
        for reads in tiles:
            compact = jnp.zeros((statistics_ref.shape[1], LANES), jnp.float32)
            for k, i in enumerate(reads):
                compact = place(compact, statistics_ref[i], GROUP * group, k)
            width = len(reads) * GROUP
            lane = jax.lax.broadcasted_iota(jnp.int32, (GROUP, width), 1)
            diagonal = lane % GROUP == jax.lax.broadcasted_iota(jnp.int32, (GROUP, width), 0)

            def row(k, compact=compact, width=width):
                return jnp.broadcast_to(compact[k : k + 1, :width], (GROUP, width))

            first = reads[0] * GROUP
            a = [product[i * GROUP : (i + 1) * GROUP, first : first + width] for i in range(n)]
            p = [jnp.where(diagonal, jnp.exp(row(i) - row(lse_row)), 0.0) for i in range(n)]
            shift = row(shift_row)
            if centred:
                # Where one weight is nearly one, its `a` is nearly the mean, and their difference
                # mostly rounding. The mean of these differences is that rounding.
                mean = mean_over_sources(p, a)
                a = [x - mean for x in a]
                shift -= mean_over_sources(p, a)
            for i in range(n):
                dlogit = p[i] * (a[i] + shift)
                if weighed:
                    dlogit += jnp.where(diagonal, row(dlogits_row + i), 0.0)
                scaled = dlogit * row(n + i)
                weights[i].append(p[i])
                dlogits[i].append(scaled)
                shrink[i] += jnp.sum(scaled * row(n + i) * row(i), axis=1, keepdims=True) / d

        def joined(parts):
            return jnp.concatenate([jnp.concatenate(part, axis=1) for part in parts])

        # One number for each source, token and read: the dlogits without their zeros.
        sums = dot(side_by_side(joined(dlogits), dtype), summing_ref[...])
        high, low = split(sums)
        lane = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
        if num_halves == 2:
            sums = jnp.where((lane >= s) & (lane < 2 * s), low, high)
        for i in range(n):
            rows = pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)
            coefficients_ref[i, rows, : sums.shape[1]] = sums[i * GROUP : (i + 1) * GROUP]
        if stacked:
            weight, rest = split(joined(weights))
            rows = [[weight, high], [rest, jnp.where(lane < s, low, 0.0)]]
            matrix = jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows]).astype(dtype)
        else:
            parts = [side_by_side(joined(weights), dtype), sums.astype(dtype)]
            matrix = jnp.concatenate(parts, axis=1)
        return matrix, jnp.concatenate(shrink)

    def mix(rows, matrix, shrink):
        for start in range(0, d, tiling.finished):
            columns = pl.ds(start, min(tiling.finished, d - start))
            slabs = [operand(ref[rows, columns]) for ref in doutput_refs]
            slabs *= 1 if stacked else num_halves
            total = dot(matrix, jnp.concatenate([*slabs, query_ref[:, columns]]))
            if stacked:
                total = total[: n * GROUP] + total[n * GROUP :]
            for i in range(n):
                slab = slice(i * GROUP, (i + 1) * GROUP)
                dvalue = total[slab] - shrink[slab] * to_float32(value_refs[i][rows, columns])
                if accumulate:
                    dvalue += to_float32(old_refs[i][rows, columns])
                dvalue_refs[i][rows, columns] = dvalue.astype(dtype)

    def sum_over_tokens(rows):
        parts = [coefficients_ref[i].T[: num_halves * s, :tokens] for i in range(n)]
        matrix = jnp.concatenate(parts, axis=1).astype(dtype)

        def add(columns):
            x = jnp.concatenate([operand(ref[rows, columns]) for ref in value_refs])
            total = dot(matrix, x)
            dfolded_ref[0, :, columns] += sum(total[k : k + s] for k in range(0, num_halves * s, s))

        for_columns(d, tiling.contracted, add)

    def subtile(index, lanes):
        def step(turn, carry):
            # Each is done for several groups before the next, so that none waits for its own.
            members = [turn * tiling.unroll + k for k in range(tiling.unroll)]
            starts = [index * tokens + group * GROUP for group in members]
            rows = [pl.ds(pl.multiple_of(start, GROUP), GROUP) for start in starts]
            multiplied = [products(x) for x in rows]
            built = [matrices(*x) for x in zip(members, multiplied, strict=True)]
            for x, (matrix, shrink) in zip(rows, built, strict=True):
                mix(x, matrix, shrink)
            return carry

        gather(lanes)
        turns = groups // tiling.unroll
        jax.lax.fori_loop(0, turns, step, 0, unroll=turns == 1)
        sum_over_tokens(pl.ds(pl.multiple_of(index * tokens, tokens), tokens))

    for_subtiles(t, tiling, [*value_refs, *doutput_refs], subtile)
