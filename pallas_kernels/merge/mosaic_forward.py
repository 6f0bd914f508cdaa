"""What one grid step of the forward kernel of phase 2 does on a TPU."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.merge.tiling import LANES, SUBLANES
from pallas_kernels.token_tiles import (
    Taker,
    add_rounded,
    as_columns,
    as_row,
    dot_float32,
    pieces,
    store_lane_sums,
    sum_lanes,
    widen,
)

# Rows of the statistics. The last is there if a norm follows the read.
LSE, INVERSE_RMS, LOGIT, READ_INVERSE_RMS = range(4)
# Columns, each 128 lanes wide.
_REST, _GATE = slice(0, LANES), slice(LANES, 2 * LANES)


def forward_kernel(output_ref, lse_ref, *refs, n_parts, with_norm, eps, norm_eps):
    """See `mosaic_tpu.forward`, which lists the references in this order."""
    take = Taker(refs)
    parts_refs = [take() for _ in range(n_parts)]
    folded_ref, norm_gain_ref = take(), take(with_norm)
    hidden_ref, gate_ref, statistics_ref = take(), take(), take()
    summed_ref = take() if n_parts == 2 else parts_refs[0]
    exact_ref, read_ref, columns_ref, squares_ref, read_squares_ref, dots_ref = [
        take() for _ in range(6)
    ]
    (tokens, d), all_tokens = output_ref.shape, slice(0, LANES)
    on_matrix_unit = summed_ref.dtype == jnp.bfloat16

    def of_register(i):
        return pl.ds(pl.multiple_of(i * LANES, LANES), LANES)

    def kept(i):
        """Where exact_ref has the sum of the i-th 128 tokens, beside that of those before."""
        return pl.ds(pl.multiple_of(jax.lax.rem(i, 2) * LANES, LANES), LANES)

    def sums(i):
        """Adds the update; <folded, p> and <p, p> of the i-th 128 tokens, `[1, 128]` each."""
        register, slot = of_register(i), kept(i)
        squares, dots, dot_parts = [], [], jnp.zeros((SUBLANES, LANES), jnp.float32)
        for along_d in pieces(d):
            if n_parts == 2:
                summed_ref[register, along_d] = add_rounded(
                    *[ref[register, along_d] for ref in parts_refs]
                )
            summed = summed_ref[register, along_d]  # Read back: the rounded sum is what counts.
            row = summed.astype(jnp.float32)
            exact_ref[slot, along_d] = row
            squares.append(row * row)
            if on_matrix_unit:
                dot_parts += dot_float32(folded_ref[:, along_d], summed, contract=(1, 1))
            else:
                dots.append(row * folded_ref[:, along_d])
        store_lane_sums(squares_ref, all_tokens, squares)
        square = as_row(sum_lanes(squares_ref[...]))
        if on_matrix_unit:
            return jnp.sum(dot_parts, axis=0, keepdims=True), square
        store_lane_sums(dots_ref, all_tokens, dots)
        return as_row(sum_lanes(dots_ref[...])), square

    def weigh(i, dot, square):
        """Writes the scalars of 128 tokens, and their weights into columns_ref."""
        register = of_register(i)
        r = jax.lax.rsqrt(square / d + eps)
        logit, lse = dot * r, lse_ref[:, register]
        gate, rest = jax.nn.sigmoid(logit - lse), jax.nn.sigmoid(lse - logit)
        gate_ref[:, register] = gate
        statistics_ref[LSE : LSE + 1, register] = lse
        statistics_ref[INVERSE_RMS : INVERSE_RMS + 1, register] = r
        statistics_ref[LOGIT : LOGIT + 1, register] = logit
        columns_ref[...] = as_columns(rest, gate)

    def read(i):
        """The weighted sum of 128 tokens' rows, and its squares."""
        register, slot = of_register(i), kept(i)
        rest, gate = columns_ref[:, _REST], columns_ref[:, _GATE]
        squares = []
        for along_d in pieces(d):
            output = output_ref[register, along_d].astype(jnp.float32)
            row = widen(rest, output) * output + widen(gate, output) * exact_ref[slot, along_d]
            if with_norm:
                read_ref[:, along_d] = row
                squares.append(row * row)
            else:
                hidden_ref[register, along_d] = row.astype(hidden_ref.dtype)
        if with_norm:
            store_lane_sums(read_squares_ref, all_tokens, squares)

    def normalise(i):
        """Scales the rows that `read` has left."""
        register = of_register(i)
        read_r = jax.lax.rsqrt(sum_lanes(read_squares_ref[...]) / d + norm_eps)
        statistics_ref[READ_INVERSE_RMS:, register] = as_row(read_r)
        read_r = jnp.broadcast_to(read_r, (LANES, LANES))
        for along_d in pieces(d):
            row = read_ref[:, along_d]
            hidden = row * widen(read_r, row) * norm_gain_ref[:, along_d]
            hidden_ref[register, along_d] = hidden.astype(hidden_ref.dtype)

    def step(i, carry):
        # The sums of the next tokens fill the time in which scalars of these are on their way.
        following = sums(i + 1)
        read(i)
        weigh(i + 1, *following)
        if with_norm:
            normalise(i)
        return carry

    def whole_step(i, carry):
        weigh(i, *sums(i))
        read(i)
        if with_norm:
            normalise(i)
        return carry

    n_registers = tokens // LANES
    if n_registers <= 2:  # Rows so wide that latencies do not matter, and code for two would spill.
        jax.lax.fori_loop(0, n_registers, whole_step, 0)
        return
    weigh(0, *sums(0))
    jax.lax.fori_loop(0, n_registers - 1, step, 0)
    read(n_registers - 1)
    if with_norm:
        normalise(n_registers - 1)
