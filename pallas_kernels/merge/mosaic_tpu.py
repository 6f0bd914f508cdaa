"""Phase 2 on TPUs: Pallas kernels that touch every row once, forward and backward.

The forward reads the output of phase 1, the partial sum and the update, and writes the new sum and
the normalised read: five rows of d a token. The backward reads the output, the sum and both
cotangents and writes two gradients: six rows. All arithmetic is float32.

A grid step takes its tokens down in passes: one over d for the inner products of every token, then
their scalars, then a pass over d for what they scale. The forward does so for 128 tokens at a time,
and begins with the next ones while the scalars of these are computed; the backward, whose passes
would not find room in the registers together, for the whole tile. Scalars of 128 tokens lie along
the lanes of a register, where one instruction treats them all; to scale rows they are spread into
columns, a token in each sublane.

Sums of products with bfloat16 rows go to the matrix unit, which is idle otherwise: its products of
bfloat16 numbers are exact and its sums float32, so a float32 factor split into three bfloat16 parts
loses nothing. What is summed over tokens there never mixes into the row of another token. Products
of a float32 number of each token with a float32 vector over d are made there too, of six pairs of
parts; the three that are left out are below the rounding of float32.

Names: t tokens, d width, k statistics; a row is `[d]`, and a suffix names the axes of an array.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.merge.tiling import LANES, SUBLANES, Tiling
from pallas_kernels.token_tiles import (
    LEFT,
    RIGHT,
    Taker,
    add_lanes,
    add_rounded,
    as_columns,
    as_row,
    bfloat16_parts,
    dot_float32,
    for_each,
    groups_of,
    pieces,
    store_lane_sums,
    sum_lanes,
    sum_sublanes,
    whole,
    widen,
)

FORWARD_NAME = "attnres_merge_forward"
BACKWARD_NAME = "attnres_merge_backward"

# Rows of the statistics. The last is there if a norm follows the read.
_LSE, _INVERSE_RMS, _LOGIT, _READ_INVERSE_RMS = range(4)
# Columns, each 128 lanes wide.
_REST, _GATE = _OF_SUMMED, _OF_FOLDED = slice(0, LANES), slice(LANES, 2 * LANES)


def forward(
    output_td: jax.Array,
    lse_t: jax.Array,
    partial_sum_td: jax.Array | None,
    update_td: jax.Array | None,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    *,
    eps: float,
    norm_eps: float,
    tiling: Tiling,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds the update to the partial sum, reads it beside phase 1, and normalises the read.

        p = partial_sum + update
        logit = <folded, p> r,    r = 1 / sqrt(mean_d(p**2) + eps)
        read = (1 - gate) output + gate p,    gate = sigmoid(logit - lse)
        hidden = read / sqrt(mean_d(read**2) + norm_eps) * norm_gain

    Args:
        output_td: Output of phase 1, `[t, d]`.
        lse_t: Its log-sum-exp, float32 `[t]`.
        partial_sum_td: Sum of the block's earlier outputs, `[t, d]`, or None.
        update_td: The last sub-layer's output, `[t, d]`, or None; one of the two is given.
        folded_d: Pseudo-query times key-norm gain, float32 `[d]`.
        norm_gain_d: Gain of the norm that follows, float32 `[d]`; None: hidden is the read.
        eps: Added to the mean square of p.
        norm_eps: Added to the mean square of the read.
        tiling: Tokens of a grid step, and the VMEM that it may use.
        interpret: Passed to `pallas_call`.

    Returns:
        p `[t, d]` in the dtype of the partial sum, rounded before it is read (where one of the two
        is None, the other one itself); hidden `[t, d]` in the dtype of `output_td`; the gate,
        float32 `[t]`; and for the backward float32 statistics `[k, t]`.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1, phase 2.
    """
    (t, d), tokens = output_td.shape, tiling.tokens
    parts = [x for x in (partial_sum_td, update_td) if x is not None]
    sum_dtype = parts[0].dtype
    k = _READ_INVERSE_RMS + (norm_gain_d is not None)
    if t == 0:
        no_scalars = jnp.zeros((k, 0), jnp.float32)
        return parts[0], output_td, no_scalars[0], no_scalars

    rows = pl.BlockSpec((tokens, d), lambda i: (i, 0))
    scalars = pl.BlockSpec((1, tokens), lambda i: (0, i))
    on_matrix_unit = sum_dtype == jnp.bfloat16
    folded = bfloat16_parts(folded_d[None]) if on_matrix_unit else folded_d[None]
    arguments = [output_td, lse_t[None], *parts, folded]
    in_specs = [rows, scalars, *[rows] * len(parts), whole(folded)]
    out_shape = [
        jax.ShapeDtypeStruct((t, d), output_td.dtype),
        jax.ShapeDtypeStruct((1, t), jnp.float32),
        jax.ShapeDtypeStruct((k, t), jnp.float32),
    ]
    out_specs = [rows, scalars, pl.BlockSpec((k, tokens), lambda i: (0, i))]
    if norm_gain_d is not None:
        arguments.append(norm_gain_d[None])
        in_specs.append(whole(norm_gain_d[None]))
    if len(parts) == 2:
        out_shape.append(jax.ShapeDtypeStruct((t, d), sum_dtype))
        out_specs.append(rows)

    hidden_td, gate_1t, statistics_kt, *summed = pl.pallas_call(
        partial(
            _forward_kernel,
            n_parts=len(parts),
            with_norm=norm_gain_d is not None,
            eps=eps,
            norm_eps=norm_eps,
        ),
        grid=(pl.cdiv(t, tokens),),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((2 * LANES, d), jnp.float32),
            pltpu.VMEM((LANES, d), jnp.float32),
            pltpu.VMEM((LANES, 2 * LANES), jnp.float32),
            *[pltpu.VMEM((LANES, LANES), jnp.float32)] * 3,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tiling.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=14 * t * d,
            transcendentals=6 * t,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in [*arguments, *out_shape]),
        ),
        interpret=interpret,
        name=FORWARD_NAME,
    )(*arguments)
    return (summed[0] if summed else parts[0]), hidden_td, gate_1t[0], statistics_kt


def _forward_kernel(output_ref, lse_ref, *refs, n_parts, with_norm, eps, norm_eps):
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
        statistics_ref[_LSE : _LSE + 1, register] = lse
        statistics_ref[_INVERSE_RMS : _INVERSE_RMS + 1, register] = r
        statistics_ref[_LOGIT : _LOGIT + 1, register] = logit
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
        statistics_ref[_READ_INVERSE_RMS:, register] = as_row(read_r)
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


def backward(
    output_td: jax.Array,
    summed_td: jax.Array,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    statistics_kt: jax.Array,
    dsummed_td: jax.Array,
    dhidden_td: jax.Array,
    dgate_t: jax.Array | None = None,
    *,
    tiling: Tiling,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Transposes `forward`; every gradient is summed in float32 and rounded once.

        dread = read_r (dhidden norm_gain - n <dhidden norm_gain, n> / d),    n = read_r read
        dlogit = gate (1 - gate) (<dread, p - output> + dgate)
        doutput = (1 - gate) dread,    dlse = -dlogit
        dsum = dsummed + gate dread + dlogit (r folded - p logit r**2 / d)
        dfolded = sum_t dlogit r p,    dnorm_gain = sum_t dhidden n

    Args:
        output_td: Output of phase 1, `[t, d]`.
        summed_td: p as `forward` returned it, `[t, d]`.
        folded_d: Pseudo-query times key-norm gain, float32 `[d]`.
        norm_gain_d: Gain of the norm that follows, float32 `[d]`, or None.
        statistics_kt: What `forward` returned, float32 `[k, t]`.
        dsummed_td: Cotangent of p, `[t, d]` in its dtype. Its memory is reused for dsum where the
            tiles come out even.
        dhidden_td: Cotangent of hidden, `[t, d]`.
        dgate_t: Cotangent of the gate, float32 `[t]`; None is zero.
        tiling: Tokens of a grid step, and the VMEM that it may use.
        interpret: Passed to `pallas_call`.

    Returns:
        doutput `[t, d]`; dlse, float32 `[t]`; dsum `[t, d]`, the gradient to the partial sum and
        to the update alike; dfolded, float32 `[d]`; dnorm_gain, float32 `[d]`, or None. The last
        two are summed over tokens in a fixed order.
    """
    (t, d), tokens = output_td.shape, tiling.tokens
    if t == 0:
        dnorm_gain_d = None if norm_gain_d is None else jnp.zeros(d, jnp.float32)
        return output_td, statistics_kt[0], dsummed_td, jnp.zeros(d, jnp.float32), dnorm_gain_d

    with_norm = norm_gain_d is not None
    n_tiles = pl.cdiv(t, tokens)
    # One sum over tokens for each half of the tiles: a chip that joins two cores gives one to each.
    n_halves = 2 if n_tiles % 2 == 0 else 1
    n_steps = n_tiles // n_halves
    k = statistics_kt.shape[0]

    def of_tokens(n_rows):
        return pl.BlockSpec((n_rows, tokens), lambda half, i: (0, half * n_steps + i))

    rows = pl.BlockSpec((tokens, d), lambda half, i: (half * n_steps + i, 0))
    accumulator = pl.BlockSpec((SUBLANES, d), lambda half, i: (half, 0))
    accumulated = jax.ShapeDtypeStruct((n_halves * SUBLANES, d), jnp.float32)
    on_matrix_unit = summed_td.dtype == jnp.bfloat16
    folded = bfloat16_parts(folded_d[None], RIGHT) if on_matrix_unit else folded_d[None]
    arguments = [output_td, summed_td, dhidden_td, dsummed_td, statistics_kt, folded]
    in_specs = [rows, rows, rows, rows, of_tokens(k), whole(folded)]
    out_shape = [
        jax.ShapeDtypeStruct((t, d), output_td.dtype),
        jax.ShapeDtypeStruct((1, t), jnp.float32),
        jax.ShapeDtypeStruct((t, d), summed_td.dtype),
        accumulated,
    ]
    out_specs = [rows, of_tokens(1), rows, accumulator]
    if dgate_t is not None:
        arguments.append(dgate_t[None])
        in_specs.append(of_tokens(1))
    if with_norm:
        arguments.append(norm_gain_d[None])
        in_specs.append(whole(norm_gain_d[None]))
        out_shape.append(accumulated)
        out_specs.append(accumulator)

    doutput_td, dlse_1t, dsum_td, dfolded, *dnorm_gain = pl.pallas_call(
        partial(
            _backward_kernel,
            t=t,
            n_steps=n_steps,
            with_norm=with_norm,
            with_dgate=dgate_t is not None,
        ),
        grid=(n_halves, n_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            *[pltpu.VMEM((tokens, d), jnp.float32)] * (2 if with_norm else 0),
            *[pltpu.VMEM((tokens, LANES), jnp.float32)] * (3 if with_norm else 1),
            pltpu.VMEM((tokens, 2 * LANES), jnp.float32),
            pltpu.VMEM((tokens, LANES if on_matrix_unit else 2 * LANES), jnp.float32),
            *on_matrix_unit
            * [
                pltpu.VMEM((SUBLANES, tokens), jnp.bfloat16),
                pltpu.VMEM((tokens, LANES), jnp.bfloat16),
            ],
        ],
        # The interpreter for TPUs cannot alias what a last tile pads.
        input_output_aliases={3: 2} if t % tokens == 0 else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiling.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=30 * t * d,
            transcendentals=4 * t,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in [*arguments, *out_shape]),
        ),
        interpret=interpret,
        name=BACKWARD_NAME,
    )(*arguments)
    dnorm_gain_d = jnp.sum(dnorm_gain[0], axis=0) if dnorm_gain else None
    return doutput_td, dlse_1t[0], dsum_td, jnp.sum(dfolded, axis=0), dnorm_gain_d


def _backward_kernel(
    output_ref,
    summed_ref,
    dhidden_ref,
    dsummed_ref,
    statistics_ref,
    folded_ref,
    *refs,
    t,
    n_steps,
    with_norm,
    with_dgate,
):
    take = Taker(refs)
    dgate_ref, norm_gain_ref = take(with_dgate), take(with_norm)
    doutput_ref, dlse_ref, dsum_ref, dfolded_ref = take(), take(), take(), take()
    dnorm_gain_ref, dnormalised_ref, normalised_ref = [take(with_norm) for _ in range(3)]
    pulls_ref, means_ref, tilts_ref = take(), take(with_norm), take(with_norm)
    columns_ref, scales_ref = take(), take()
    tokens, d = output_ref.shape
    on_matrix_unit = summed_ref.dtype == jnp.bfloat16
    parts_ref, factors_ref = take(on_matrix_unit), take(on_matrix_unit)

    @pl.when(pl.program_id(1) == 0)
    def _():
        dfolded_ref[...] = jnp.zeros_like(dfolded_ref)
        if with_norm:
            dnorm_gain_ref[...] = jnp.zeros_like(dnorm_gain_ref)

    n_last = t % tokens
    if n_last:
        # What pads the last tile may be NaN; the sums over tokens must not see it.
        @pl.when(pl.program_id(0) * n_steps + pl.program_id(1) == t // tokens)
        def _():
            for ref in (output_ref, summed_ref, dhidden_ref):
                ref[n_last:, :] = jnp.zeros((tokens - n_last, d), ref.dtype)
            for ref in [statistics_ref, dgate_ref][: 1 + with_dgate]:
                ref[:, n_last:] = jnp.zeros((ref.shape[0], tokens - n_last), ref.dtype)

    lse, r, logit = [statistics_ref[k : k + 1, :] for k in (_LSE, _INVERSE_RMS, _LOGIT)]
    gate, rest = jax.nn.sigmoid(logit - lse), jax.nn.sigmoid(lse - logit)
    read_r = statistics_ref[_READ_INVERSE_RMS:, :] if with_norm else jnp.ones_like(r)
    columns_ref[...] = as_columns(rest * read_r, gate * read_r)

    @for_each(tokens, 32)
    def _(group):
        rest, gate = columns_ref[group, _REST], columns_ref[group, _GATE]
        for along_d in pieces(d):
            output = output_ref[group, along_d].astype(jnp.float32)
            summed = summed_ref[group, along_d].astype(jnp.float32)
            dhidden = dhidden_ref[group, along_d].astype(jnp.float32)
            difference = summed - output
            if not with_norm:
                add_lanes(pulls_ref, group, along_d, dhidden * difference)
                continue
            dnormalised = dhidden * norm_gain_ref[:, along_d]
            normalised = widen(rest, output) * output + widen(gate, output) * summed
            dnormalised_ref[group, along_d] = dnormalised
            normalised_ref[group, along_d] = normalised
            add_lanes(pulls_ref, group, along_d, dnormalised * difference)
            add_lanes(means_ref, group, along_d, dnormalised * normalised)
            add_lanes(tilts_ref, group, along_d, normalised * difference)
            dnorm_gain_ref[:, along_d] += sum_sublanes(dhidden * normalised)

    pulls = pulls_ref[...]
    if with_norm:
        mean = jnp.broadcast_to(sum_lanes(means_ref[...]) / d, (tokens, LANES))
        means_ref[...] = mean
        pulls -= mean * tilts_ref[...]
    pull = read_r * as_row(sum_lanes(pulls))
    if with_dgate:
        pull += dgate_ref[...]
    dlogit = gate * rest * pull
    dlse_ref[...] = -dlogit
    of_folded, of_summed = dlogit * r, dlogit * logit * r * r / d
    if on_matrix_unit:
        scales_ref[...] = as_columns(of_summed)
        parts_ref[...] = bfloat16_parts(of_folded)
        factors = bfloat16_parts(of_folded, LEFT).astype(jnp.float32)
        for i in range(0, tokens, LANES):
            factors_ref[i : i + LANES, :SUBLANES] = factors[:, i : i + LANES].T.astype(jnp.bfloat16)
    else:
        scales_ref[...] = as_columns(of_summed, of_folded)

    @for_each(tokens, LANES)
    def _(register):
        for along_d in pieces(d):
            if on_matrix_unit:
                summed = summed_ref[register, along_d]
                dfolded_ref[:, along_d] += dot_float32(parts_ref[:, register], summed)
            for group in groups_of(register, LANES // 4):
                rest, gate = columns_ref[group, _REST], columns_ref[group, _GATE]
                of_summed = scales_ref[group, _OF_SUMMED]
                if with_norm:
                    dread = dnormalised_ref[group, along_d]
                    mean = widen(means_ref[group, :], dread)
                    dread -= mean * normalised_ref[group, along_d]
                else:
                    dread = dhidden_ref[group, along_d].astype(jnp.float32)
                doutput = widen(rest, dread) * dread
                doutput_ref[group, along_d] = doutput.astype(doutput_ref.dtype)
                summed = summed_ref[group, along_d].astype(jnp.float32)
                dsum = dsummed_ref[group, along_d].astype(jnp.float32)
                dsum += widen(gate, dread) * dread
                if on_matrix_unit:
                    dsum += dot_float32(factors_ref[group, :SUBLANES], folded_ref[:, along_d])
                else:
                    of_folded = widen(scales_ref[group, _OF_FOLDED], summed)
                    dfolded_ref[:, along_d] += sum_sublanes(of_folded * summed)
                    dsum += of_folded * folded_ref[:, along_d]
                dsum -= widen(of_summed, summed) * summed
                dsum_ref[group, along_d] = dsum.astype(dsum_ref.dtype)
