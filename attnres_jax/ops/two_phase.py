"""Depth attention in two phases: the same result, reading finished sources once for a whole block.

Pseudo-queries do not depend on the input, so all reads of a block can attend to the finished
sources together (phase 1, `inter_block`). Each read then joins its share with the one source that
grows while the block runs, the open partial sum (phase 2, `merge`). ArXiv:2603.15031, section 4.2.

Phase 1 returns the normalised output o and the log-sum-exp lse of its logits. With a single further
source p the joint softmax is a gated interpolation, exact and free of overflow:

    gate = sigmoid(logit(p) - lse),    h = (1 - gate) o + gate p
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attnres_jax.ops.depth_attention import (
    OUTPUT_NAME,
    STATISTICS_NAME,
    depth_weights,
    fold,
    read_sources,
)
from attnres_jax.ops.implementation import Implementation, choose_implementation
from attnres_jax.ops.rms_norm import inverse_rms
from attnres_jax.ops.sources import (
    Bank,
    FinishedSources,
    Sources,
    check_sources,
    check_vectors,
)

PARTIAL_SUM_NAME = "partial_sum"
"""`checkpoint_name` of the open block's partial sum after each sub-layer."""


def inter_block(
    sources: Sources,
    query_sd: jax.Array,
    gain_sd: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
    return_weights: bool = False,
    return_sources: bool = False,
) -> tuple[Any, ...]:
    """Phase 1: S reads of the finished sources, `o_s = sum_i softmax_i(<w_s, RMSNorm(v_i)>) v_i`.

    The gradient with respect to each source is summed over the S reads in float32 and rounded once.

    Args:
        sources: Arrays `[..., d]` of one shape and floating dtype, or a `Bank`.
        query_sd: Pseudo-queries, `[s, d]`.
        gain_sd: Key-norm gains, `[s, d]`.
        eps: Added to the mean square of each source.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA. Kernels differentiate in reverse mode only.
        return_weights: Whether to return the depth weights too.
        return_sources: Whether to return the sources too, for the next read.

    Returns:
        S outputs `[..., d]` in the dtype of the sources and their log-sum-exp, float32 `[s, ...]`;
        with `return_weights` also float32 weights over the finished sources, `[s, n, ...]`; with
        `return_sources` also the sources, as a `Bank` or `FinishedSources`. Reading those from then
        on saves kernels memory traffic: see there.

    Raises:
        ValueError: No source, no query, shapes or dtypes that do not fit, or an implementation that
            cannot compute this.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1, phase 1 (there with an un-normalised
        output; normalised, it can be stored in bfloat16).
    """
    values, count = check_sources(sources)
    if query_sd.ndim != 2 or query_sd.shape[0] == 0:
        raise ValueError(
            "query_sd: expected one pseudo-query a row, [s, d] with s >= 1,"
            f" got {list(query_sd.shape)}"
        )
    shape = (query_sd.shape[0], values[0].shape[-1])
    check_vectors("query_sd", query_sd, shape)
    check_vectors("gain_sd", gain_sd, shape)
    read = read_sources(sources, fold(query_sd, gain_sd), eps, implementation)
    weights = (depth_weights(read.logits, count),) if return_weights else ()
    following = read.sources
    if not isinstance(following, (Bank, FinishedSources)):
        following = FinishedSources(tuple(following))
    return read.outputs, read.lse, *weights, *((following,) if return_sources else ())


def merge(
    output: jax.Array,
    lse: jax.Array,
    partial_sum: jax.Array | None,
    update: jax.Array | None,
    query_d: jax.Array,
    gain_d: jax.Array,
    *,
    norm_gain_d: jax.Array | None = None,
    eps: float = 1e-6,
    norm_eps: float | None = None,
    implementation: Implementation | None = None,
    return_gate: bool = False,
) -> tuple[jax.Array, ...]:
    """Phase 2: adds a sub-layer's output to the open block, reads it, and normalises the result.

        p = partial_sum + update
        gate = sigmoid(<w, RMSNorm(p)> - lse)
        h = (1 - gate) o + gate p
        hidden = h / sqrt(mean_d(h**2) + norm_eps) * norm_gain        (h itself without norm_gain)

    Args:
        output: Phase-1 output o of this read, `[..., d]`.
        lse: Its log-sum-exp, float32 `[...]`.
        partial_sum: Sum of the block's earlier outputs, `[..., d]`; its dtype, which may be wider
            than that of `output`, is the dtype of the sum. None: the block has one output so far.
        update: The last sub-layer's output, `[..., d]`. None: it is in `partial_sum` already.
        query_d: Pseudo-query w, `[d]`.
        gain_d: Gain g of the key norm, `[d]`.
        norm_gain_d: Gain of the norm that follows the read, `[d]`; None skips that norm.
        eps: Added to the mean square of p.
        norm_eps: Added to the mean square of h; None means `eps`.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA. Kernels differentiate in reverse mode only.
        return_gate: Whether to return the depth weight of the partial sum too.

    Returns:
        p `[..., d]`, rounded before it is read; hidden `[..., d]` in the dtype of `output`; and
        with `return_gate` the gate, float32 `[...]`: the depth weight of p, while those of the
        finished sources are phase 1's times one minus the gate.

    Raises:
        ValueError: Neither partial sum nor update, shapes that do not fit, or an implementation
            that cannot compute this.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1, phase 2.
    """
    if partial_sum is None and update is None:
        raise ValueError(
            "merge: pass partial_sum, update or both; with neither, read phase 1 alone"
        )
    for name, array in (("partial_sum", partial_sum), ("update", update)):
        if array is not None and array.shape != output.shape:
            raise ValueError(
                f"{name}: expected the shape of output, {list(output.shape)},"
                f" got {list(array.shape)}"
            )
    if lse.shape != output.shape[:-1]:
        raise ValueError(
            f"lse: expected {list(output.shape[:-1])}, one for each token of output,"
            f" got {list(lse.shape)}"
        )
    for name, vector in (("query_d", query_d), ("gain_d", gain_d), ("norm_gain_d", norm_gain_d)):
        if vector is not None:
            check_vectors(name, vector, output.shape[-1:])
    if partial_sum is None:
        partial_sum, update = update, None
    assert partial_sum is not None
    norm_gain = None if norm_gain_d is None else _f32(norm_gain_d)
    norm_eps = eps if norm_eps is None else norm_eps
    inputs = (output, lse, partial_sum, update, fold(query_d, gain_d), norm_gain)

    def reason_against(name: str) -> str | None:
        from pallas_kernels.merge.op import unsupported

        return unsupported(output, partial_sum, name)

    chosen = choose_implementation(implementation, reason_against)
    if chosen == "xla":
        summed, hidden, gate = _merge(inputs, eps, norm_eps)
    else:
        from pallas_kernels.merge import op

        summed, hidden, gate = op.merge(*inputs, eps=eps, norm_eps=norm_eps, implementation=chosen)
    return (summed, hidden, gate) if return_gate else (summed, hidden)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _merge(inputs, eps, norm_eps):
    return _merge_forward(inputs, eps, norm_eps)[0]


def _merge_forward(inputs, eps, norm_eps):
    output, lse, summed, update, folded, norm_gain = inputs
    if update is not None:
        summed = (_f32(summed) + _f32(update)).astype(summed.dtype)
    summed = checkpoint_name(summed, PARTIAL_SUM_NAME)
    r = inverse_rms(summed, eps=eps)
    logit = jnp.sum(_f32(summed) * _along_d(folded, summed), axis=-1) * r
    read = _interpolate(output, summed, logit - lse)
    if norm_gain is None:
        read_r, hidden = None, read
    else:
        read_r = jax.lax.rsqrt(jnp.mean(jnp.square(read), axis=-1) + norm_eps)
        hidden = read * read_r[..., None] * _along_d(norm_gain, read)
    kept = checkpoint_name((lse, r, logit, read_r), STATISTICS_NAME)
    hidden = checkpoint_name(hidden.astype(output.dtype), OUTPUT_NAME)
    return (summed, hidden, jax.nn.sigmoid(logit - lse)), kept


@_merge.defjvp
def _merge_jvp(eps, norm_eps, primals, tangents):
    (inputs,), (dinputs,) = primals, tangents
    outputs, kept = _merge_forward(inputs, eps, norm_eps)
    output, *_, folded, norm_gain = inputs
    return outputs, jax.checkpoint(_merge_tangent)(
        (output, outputs[0], folded, norm_gain, *kept), dinputs
    )


def _merge_tangent(kept, dinputs):
    output, summed, folded, norm_gain, lse, r, logit, read_r = kept
    doutput, dlse, dsummed, dupdate, dfolded, dnorm_gain = dinputs
    # Summed in float32 and used as such: in the transpose, each gradient is rounded once.
    dsummed = _f32(dsummed) if dupdate is None else _f32(dsummed) + _f32(dupdate)
    gate, rest = jax.nn.sigmoid(logit - lse), jax.nn.sigmoid(lse - logit)

    ddot = dsummed * _along_d(folded, summed) + _f32(summed) * _along_d(dfolded, summed)
    dlog_rms = jnp.square(r) * jnp.mean(_f32(summed) * dsummed, axis=-1)
    dlogit = jnp.sum(ddot, axis=-1) * r - logit * dlog_rms
    dgate = gate * rest * (dlogit - dlse)
    dread = (
        rest[..., None] * _f32(doutput)
        + gate[..., None] * dsummed
        + dgate[..., None] * (_f32(summed) - _f32(output))
    )
    if norm_gain is None:
        return dsummed.astype(summed.dtype), dread.astype(output.dtype), dgate
    read = _interpolate(output, summed, logit - lse)
    dlog_read_rms = jnp.square(read_r) * jnp.mean(read * dread, axis=-1)
    dnormalised = (dread - read * dlog_read_rms[..., None]) * read_r[..., None]
    dhidden = dnormalised * _along_d(norm_gain, read)
    dhidden += read * read_r[..., None] * _along_d(dnorm_gain, read)
    return dsummed.astype(summed.dtype), dhidden.astype(output.dtype), dgate


def _interpolate(output: jax.Array, summed: jax.Array, difference: jax.Array) -> jax.Array:
    # One minus a gate near one has few accurate bits; the sigmoid of the opposite has them all.
    gate, rest = jax.nn.sigmoid(difference), jax.nn.sigmoid(-difference)
    return rest[..., None] * _f32(output) + gate[..., None] * _f32(summed)


def _along_d(vector_d: jax.Array, like: jax.Array) -> jax.Array:
    """`[d]` -> `[1, ..., d]`, to broadcast against `[..., d]`."""
    return jnp.expand_dims(vector_d, tuple(range(like.ndim - 1)))


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
