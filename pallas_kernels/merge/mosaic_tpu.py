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

from pallas_kernels.merge.mosaic_backward import backward_kernel
from pallas_kernels.merge.mosaic_forward import READ_INVERSE_RMS, forward_kernel
from pallas_kernels.merge.tiling import LANES, SUBLANES, Tiling
from pallas_kernels.token_tiles import RIGHT, bfloat16_parts, whole

FORWARD_NAME = "attnres_merge_forward"
BACKWARD_NAME = "attnres_merge_backward"


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
    k = READ_INVERSE_RMS + (norm_gain_d is not None)
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
            forward_kernel,
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
            backward_kernel,
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
