"""Pallas TPU kernels of phase 1, forward and backward.

A softmax over depth is small, but there is one for each token: a matrix product cannot share its
weights, and on the vector unit it takes s * n operations per element, three times what the memory
bandwidth leaves time for. The matrix unit is idle, so it does the work, with waste. For a group of
8 tokens the values are rows (source, token), the outputs are rows (read, token), and the weights
between them are a matrix of diagonal 8 x 8 blocks:

    outputs[(s, token), d] = sum_(n, token') weights[(s, token), (n, token')] values[(n, token'), d]

Float32 weights are sums of two bfloat16 numbers that lie side by side in the contracted dimension,
so that the bfloat16 products of the unit lose nothing. What is one number per token, read and
source has tokens along lanes. Several groups are scheduled together, so that one's products fill
the time in which another waits for its scalars.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.inter_block.matrices import (
    halves,
    matrix_tiles,
    query_rows,
    stacks_halves,
    summing_matrix,
)
from pallas_kernels.inter_block.mosaic_backward import backward_kernel
from pallas_kernels.inter_block.mosaic_forward import forward_kernel
from pallas_kernels.inter_block.tiling import LANES, Tiling, pad
from pallas_kernels.inter_block.windows import Windows


def forward(
    values: tuple[jax.Array, ...] | jax.Array,
    folded_sd: jax.Array,
    *,
    tiling: Tiling,
    eps: float,
    count: jax.Array | None = None,
    inverse_rms_nt: jax.Array | None = None,
    carry: tuple[tuple[jax.Array, ...], jax.Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array]:
    """Reads every source once for S outputs `o_s = sum_n softmax_n(<w_s, v_n> r_n) v_n`.

    Args:
        values: n arrays `[t, d]`, or a bank `[n, t, d]`.
        folded_sd: float32 products of pseudo-query and key-norm gain.
        tiling: Shape of a grid step.
        eps: Added to the mean square of each row.
        count: How many rows of the bank count, int32; the others are neither fetched nor touched.
        inverse_rms_nt: `r` of the leading sources, where an earlier read has computed it.
        carry: Float32 outputs and log-sum-exp of a read of other sources, to join.
        out_dtype: Of the outputs; None means that of the sources.
        interpret: Passed to `pallas_call`.

    Returns:
        S outputs `[t, d]`; their log-sum-exp `[s, t]`; logits `[s, n, t]`; and `r` `[n, t]`. A read
        of a single array is that array, uncopied.
    """
    bank = not isinstance(values, tuple)
    n, (t, d), dtype = len(values), values[0].shape, values[0].dtype
    s = folded_sd.shape[0]
    known = 0 if inverse_rms_nt is None else inverse_rms_nt.shape[0]
    # One source weighs one: all there is to compute is its logit.
    identity = n == 1 and not bank and carry is None
    windows = Windows(t, d, tiling)
    query = query_rows(folded_sd, dtype)
    stacked = halves(dtype) == 2 and s <= tiling.matrix_width // 64
    tiles, added = matrix_tiles(n, dtype, tiling.matrix_width, stacked)

    inputs, in_specs = [query], [windows.whole(query.shape)]
    if inverse_rms_nt is not None:
        inputs.append(inverse_rms_nt)
        in_specs.append(windows.statistics(known))
    if carry is not None:
        inputs += [carry[1], *carry[0]]
        in_specs += [windows.statistics(s), *[windows.rows()] * s]
    inputs += [values] * n if bank else list(values)
    in_specs += [windows.rows(i) for i in range(n)] if bank else [windows.rows()] * n
    num_outputs = 0 if identity else s
    out_shape = [jax.ShapeDtypeStruct((t, d), out_dtype or dtype)] * num_outputs
    out_shape += [_f32(s, t), _f32(s, n, t), _f32(max(n - known, 1), t)]
    out_specs = [windows.rows()] * num_outputs
    out_specs += [windows.statistics(*shape.shape[:-1]) for shape in out_shape[num_outputs:]]
    *outputs, lse_st, logits_snt, new_nt = _call(
        partial(
            forward_kernel,
            n=n,
            s=s,
            t=t,
            known=known,
            num_outputs=num_outputs,
            carried=carry is not None,
            counted=bank,
            stacked=stacked,
            tiles=tiles,
            added=added,
            tiling=tiling,
            eps=eps,
        ),
        windows.grid,
        ([] if count is None else [count.reshape(1)], inputs),
        in_specs,
        out_shape,
        out_specs,
        [
            pltpu.VMEM((n, pad(s), LANES), jnp.float32),
            pltpu.VMEM((max(n - known, 1), min(tiling.tokens, LANES), LANES), jnp.float32),
            pltpu.VMEM((max(added + (carry is not None), 1), LANES, pad(s)), jnp.float32),
        ],
        tiling,
        name="attnres_inter_block_forward",
        flops=4 * n * s * t * d,
        interpret=interpret,
        semantics=("parallel", "parallel", "arbitrary"),
    )
    inverse_rms = [x for x in (inverse_rms_nt, new_nt if known < n else None) if x is not None]
    outputs = values * s if identity else tuple(outputs)
    return outputs, lse_st, logits_snt, jnp.concatenate(inverse_rms)


def backward(
    values: tuple[jax.Array, ...] | jax.Array,
    folded_sd: jax.Array,
    lse_st: jax.Array,
    logits_snt: jax.Array,
    inverse_rms_nt: jax.Array,
    doutputs: tuple[jax.Array, ...],
    dlse_st: jax.Array,
    *,
    tiling: Tiling,
    cores: int = 1,
    count: jax.Array | None = None,
    dlogits_snt: jax.Array | None = None,
    delta_st: jax.Array | None = None,
    dvalues: tuple[jax.Array, ...] | jax.Array | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...] | jax.Array, jax.Array]:
    """Transposes `forward`: reads the sources and S cotangents once, writes each dv once.

        p       = exp(logit - lse),  a_sn = <do_s, v_n>,  delta_s = sum_n p_sn a_sn
        dlogit  = p (a - delta + dlse) + dlogits
        dv_n    = sum_s (p_sn do_s + r_n dlogit_sn w_s) - v_n r_n**2 / d sum_s dlogit_sn logit_sn
        dw_s    = sum_(n, t) dlogit_sn r_n v_n

    Args:
        values: As in `forward`.
        folded_sd: As in `forward`.
        lse_st: What `forward` returned, over all sources when they were read in several calls.
        logits_snt: What `forward` returned.
        inverse_rms_nt: What `forward` returned.
        doutputs: S cotangents of the outputs, `[t, d]`.
        dlse_st: Cotangent of the log-sum-exp.
        tiling: Shape of a grid step.
        cores: Over how many cores to split the tokens; each sums dw for itself.
        count: As in `forward`.
        dlogits_snt: Cotangent of the logits.
        delta_st: `<do_s, o_s>`, when these are not all the sources that o_s has read.
        dvalues: Cotangents to add to, whose memory the result takes.
        interpret: Passed to `pallas_call`.

    Returns:
        dv, in the form and dtype of `values`, and dw `[s, d]`, float32.
    """
    bank = not isinstance(values, tuple)
    n, (t, d), dtype = len(values), values[0].shape, values[0].dtype
    s = folded_sd.shape[0]
    windows = Windows(t, d, tiling, cores)
    stacked = stacks_halves(s, dtype, tiling.matrix_width)
    rows_of_query = query_rows(folded_sd, dtype, parts=(0, 1) if stacked else (0, 0, 1))
    summing = summing_matrix(s, dtype, copies=2 if stacked else 3)
    shift_st = dlse_st if delta_st is None else dlse_st - delta_st

    inputs = [rows_of_query, summing, logits_snt, inverse_rms_nt, lse_st, shift_st]
    in_specs = [windows.whole(x.shape) for x in inputs[:2]]
    in_specs += [windows.statistics(*x.shape[:-1]) for x in inputs[2:]]
    if dlogits_snt is not None:
        inputs.append(dlogits_snt)
        in_specs.append(windows.statistics(s, n))
    inputs += [*([values] * n if bank else values), *doutputs]
    in_specs += [windows.rows(i) for i in range(n)] if bank else [windows.rows()] * n
    in_specs += [windows.rows()] * s
    dvalue_specs = [windows.bank_rows(n)] if bank else [windows.rows()] * n
    aliases = {}
    if dvalues is not None:
        first = len(inputs) + bank
        aliases = {first + i: i for i in range(len(dvalue_specs))}
        inputs += [dvalues] if bank else list(dvalues)
        in_specs += dvalue_specs
    rows = jax.ShapeDtypeStruct((n, t, d) if bank else (t, d), dtype)
    out_shape = [rows] * len(dvalue_specs) + [_f32(windows.grid[0], s, d)]
    *summed, dfolded = _call(
        partial(
            backward_kernel,
            n=n,
            s=s,
            t=t,
            counted=bank,
            centred=delta_st is None,
            weighed=dlogits_snt is not None,
            accumulate=dvalues is not None,
            stacked=stacked,
            tiling=tiling,
        ),
        windows.grid,
        ([] if count is None else [count.reshape(1)], inputs),
        in_specs,
        out_shape,
        [*dvalue_specs, windows.per_core(s)],
        [
            pltpu.VMEM((s, pad(3 * n + 2), LANES), jnp.float32),
            pltpu.VMEM((n, LANES, 3 * s), jnp.float32),
        ],
        tiling,
        name="attnres_inter_block_backward",
        flops=8 * n * s * t * d,
        interpret=interpret,
        # Tiles of one core are in order, because they add to the same sum.
        semantics=("parallel", "arbitrary", "arbitrary"),
        aliases=aliases,
    )
    return summed[0] if bank else tuple(summed), jnp.sum(dfolded, axis=0)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    kernel,
    grid,
    operands,
    in_specs,
    out_shape,
    out_specs,
    scratch,
    tiling,
    *,
    name,
    flops,
    interpret,
    semantics,
    aliases=None,
):
    prefetched, inputs = operands
    arrays = {id(x): x for x in inputs}  # A bank is there once for each of its rows.
    moved = sum(x.size * x.dtype.itemsize for x in [*arrays.values(), *out_shape])
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=tiling.vmem_bytes,
            # Interpret mode checks the bounds; here they would cost a tenth of a step.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        name=name,
        interpret=interpret,
    )(*prefetched, *inputs)
