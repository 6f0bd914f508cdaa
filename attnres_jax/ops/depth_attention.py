"""Depth attention: a softmax over the outputs of earlier sub-layers, token by token.

The whole idea of Attention Residuals (arXiv:2603.15031, section 3.1). Where a transformer adds
every sub-layer's output into one residual stream, sub-layer l reads

    h_l      = sum_i alpha_i v_i
    alpha    = softmax_i(logit_i)
    logit_i  = <w_l, RMSNorm(v_i)> = <w_l * g_l, v_i> / sqrt(mean_d(v_i**2) + eps)

with raw outputs v_i as values, a learned pseudo-query w_l and key-norm gain g_l, one head, and no
1/sqrt(d). With w_l = 0 every source weighs 1/n. Statistics, logits, softmax and sums are float32.

Differentiating this line by line would keep float32 copies of every source. The derivative below
keeps the sources themselves and two scalars per token and source: inverse RMS and logit. It is a
JVP rule, so forward mode works; its tangent is computed under `jax.checkpoint`, so that reverse
mode, its transpose, recomputes everything else.
"""

from functools import partial
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attnres_jax.ops.implementation import Implementation, choose_implementation
from attnres_jax.ops.rms_norm import inverse_rms
from attnres_jax.ops.sources import (
    Bank,
    FinishedSources,
    Sources,
    as_rows,
    check_sources,
    check_vectors,
)

STATISTICS_NAME = "depth_attention_statistics"
"""`checkpoint_name` of the scalars per token that the derivatives keep."""
OUTPUT_NAME = "depth_attention_output"
"""`checkpoint_name` of the arrays that reads return."""


@overload
def depth_attention(
    sources: Sources,
    query_d: jax.Array,
    gain_d: jax.Array,
    *,
    eps: float = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def depth_attention(
    sources: Sources,
    query_d: jax.Array,
    gain_d: jax.Array,
    *,
    eps: float = ...,
    implementation: Implementation | None = ...,
    return_weights: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def depth_attention(
    sources: Sources,
    query_d: jax.Array,
    gain_d: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
    return_weights: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Reads the sources once: `sum_i softmax_i(<w, RMSNorm(v_i)>) v_i`.

    Args:
        sources: Arrays `[..., d]` of one shape and floating dtype, or a `Bank`.
        query_d: Pseudo-query w, `[d]`.
        gain_d: Gain g of the key norm, `[d]`.
        eps: Added to the mean square of each source.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA. Kernels differentiate in reverse mode only.
        return_weights: Whether to return the depth weights too.

    Returns:
        `[..., d]` in the dtype of the sources, rounded once from float32; with `return_weights`
        also float32 weights `[n, ...]`, which sum to 1 over n (zero for unfilled rows of a bank).

    Raises:
        ValueError: No source, shapes or dtypes that do not fit, or an implementation that cannot.

    References:
        Attention Residuals, arXiv:2603.15031, equations 2 to 4.
    """
    values, count = check_sources(sources)
    check_vectors("query_d", query_d, values[0].shape[-1:])
    check_vectors("gain_d", gain_d, values[0].shape[-1:])
    read = read_sources(sources, fold(query_d, gain_d)[None], eps, implementation)
    (output,) = read.outputs
    return (output, depth_weights(read.logits, count)[0]) if return_weights else output


class Read(NamedTuple):
    """What `read_sources` returns: see `attend`; and the sources, for the next read."""

    outputs: tuple[jax.Array, ...]
    lse: jax.Array
    logits: jax.Array
    sources: Sources


def read_sources(
    sources: Sources, folded_sd: jax.Array, eps: float, implementation: Implementation | None
) -> Read:
    """Reads checked sources with S queries, through XLA or kernels."""
    values, count = check_sources(sources)

    def reason_against(name: str) -> str | None:
        from pallas_kernels.inter_block.op import unsupported

        return unsupported(values, folded_sd.shape[0], name)

    chosen = choose_implementation(implementation, reason_against)
    if chosen == "xla":
        outputs, lse, logits = attend(values, folded_sd, count, eps)
        return Read(outputs, lse, logits, sources)
    from pallas_kernels.inter_block.op import inter_block

    known = sources.inverse_rms if isinstance(sources, FinishedSources) else None
    read = inter_block(
        values, folded_sd, eps=eps, implementation=chosen, count=count, inverse_rms=known
    )
    if isinstance(read.values, tuple):
        following = FinishedSources(read.values, read.inverse_rms)
    else:
        assert count is not None
        following = Bank(read.values, count)
    return Read(read.outputs, read.lse, read.logits, following)


def fold(query: jax.Array, gain: jax.Array) -> jax.Array:
    """Folds the key-norm gain into the pseudo-query, in float32: only their product is used."""
    return query.astype(jnp.float32) * gain.astype(jnp.float32)


def depth_weights(logits: jax.Array, count: jax.Array | None) -> jax.Array:
    """Softmax over n of logits `[s, n, ...]`, of the leading `count` if that is given."""
    return jax.nn.softmax(_counted(logits, count), axis=1)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def attend(
    values: tuple[jax.Array, ...] | jax.Array,
    folded_sd: jax.Array,
    count: jax.Array | None,
    eps: float,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Reads the same sources with S queries at once; `depth_attention` is S = 1.

    Args:
        values: n arrays `[..., d]`, or the values `[n, ..., d]` of a bank.
        folded_sd: float32 products of pseudo-query and gain.
        count: How many rows of the bank count; None for arrays.
        eps: Added to the mean square of each row.

    Returns:
        S outputs `[..., d]` in the sources' dtype, their float32 log-sum-exp `[s, ...]`, and
        float32 logits `[s, n, ...]` (of all rows, also those that do not count).
    """
    outputs, lse, logits, _ = _attend(values, folded_sd, count, eps)
    return outputs, lse, logits


def _attend(values, folded_sd, count, eps):
    rows = as_rows(values, count)
    inverse_rms_n = [inverse_rms(row, eps=eps) for row in rows]
    logits = _stack_n(
        [_dot(row, folded_sd) * r[None] for row, r in zip(rows, inverse_rms_n, strict=True)]
    )
    if len(rows) == 1:
        outputs, lse = rows * folded_sd.shape[0], logits[:, 0]  # One source: the identity, exactly.
    else:
        lse = jax.nn.logsumexp(_counted(logits, count), axis=1)
        weights = depth_weights(logits, count)
        outputs = tuple(_weighted_sum(w, rows).astype(rows[0].dtype) for w in weights)
    lse, logits, inverse_rms_n = checkpoint_name((lse, logits, inverse_rms_n), STATISTICS_NAME)
    return checkpoint_name(outputs, OUTPUT_NAME), lse, logits, inverse_rms_n


@attend.defjvp
def _attend_jvp(eps, primals, tangents):
    values, folded_sd, count = primals
    dvalues, dfolded_sd, _ = tangents
    outputs, lse, logits, inverse_rms_n = _attend(values, folded_sd, count, eps)
    kept = values, folded_sd, count, logits, inverse_rms_n
    return (outputs, lse, logits), jax.checkpoint(_attend_tangent)(kept, dvalues, dfolded_sd)


def _attend_tangent(kept, dvalues, dfolded_sd):
    values, folded_sd, count, logits, inverse_rms_n = kept
    rows = as_rows(values, count)
    dtype = rows[0].dtype
    # Converted once: in the transpose, all that a row's gradient sums is summed in float32.
    drows = tuple(_f32(row) for row in as_rows(dvalues, count))

    def logits_tangent(row, drow, r, logits_s):
        dlog_rms = jnp.square(r) * jnp.mean(_f32(row) * drow, axis=-1)
        ddots = _dots(drow, folded_sd) + _dot(row, dfolded_sd)
        return ddots * r[None] - logits_s * dlog_rms[None]

    dlogits = _stack_n(
        [
            logits_tangent(row, drow, r, logits[:, i])
            for i, (row, drow, r) in enumerate(zip(rows, drows, inverse_rms_n, strict=True))
        ]
    )
    if len(rows) == 1:
        return (drows[0].astype(dtype),) * folded_sd.shape[0], dlogits[:, 0], dlogits
    weights = depth_weights(logits, count)
    dlse = jnp.sum(weights * dlogits, axis=1)
    dweights = _softmax_tangent(weights, dlogits)
    doutputs = tuple(
        (_weighted_sum(w, drows) + _weighted_sum(dw, rows)).astype(dtype)
        for w, dw in zip(weights, dweights, strict=True)
    )
    return doutputs, dlse, dlogits


def _softmax_tangent(weights: jax.Array, dlogits: jax.Array) -> jax.Array:
    """`w_i (dlogit_i - sum_j w_j dlogit_j)` over axis 1, accurate also where one weight is near 1.

    There the two terms of the heaviest source cancel to rounding noise. Written with differences to
    that source it is `dw_i = w_i (diff_i - sum_j w_j diff_j)` for the others, and minus their sum
    for itself: a symmetric map, so that its transpose is as accurate.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    heaviest = indices == jnp.argmax(weights, axis=1, keepdims=True)
    others = jnp.where(heaviest, 0.0, weights)
    diff = dlogits - jnp.sum(jnp.where(heaviest, dlogits, 0.0), axis=1, keepdims=True)
    dothers = others * (diff - jnp.sum(others * diff, axis=1, keepdims=True))
    return dothers - jnp.where(heaviest, jnp.sum(dothers, axis=1, keepdims=True), 0.0)


def _counted(logits: jax.Array, count: jax.Array | None) -> jax.Array:
    if count is None:
        return logits
    indices = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(indices < count, logits, -jnp.inf)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _dot(row: jax.Array, vectors_sd: jax.Array) -> jax.Array:
    """`<vector_s, row>` for every s: float32 `[s, ...]`."""
    # HIGHEST: a TPU would otherwise round float32 operands to bfloat16.
    products = jnp.einsum(
        "...d,sd->...s", _f32(row), vectors_sd, precision=jax.lax.Precision.HIGHEST
    )
    return jnp.moveaxis(products, -1, 0)


def _dots(row: jax.Array, vectors_sd: jax.Array) -> jax.Array:
    """The same as `_dot`, one product at a time.

    The transpose of this one is elementwise and fuses into the sum that is the row's gradient; that
    of a matrix product would write an array as large as the row first.
    """
    along_d = tuple(range(row.ndim - 1))
    return jnp.stack([jnp.sum(_f32(row) * jnp.expand_dims(v, along_d), -1) for v in vectors_sd])


def _weighted_sum(weights_n: jax.Array, rows: tuple[jax.Array, ...]) -> jax.Array:
    """`sum_n weights_n * rows_n`, float32 `[..., d]`."""
    total = jnp.zeros_like(rows[0], jnp.float32)
    for weight, row in zip(weights_n, rows, strict=True):
        total += weight[..., None] * _f32(row)
    return total


def _stack_n(per_source: list[jax.Array]) -> jax.Array:
    """`[s, ...]` for each of n sources -> `[s, n, ...]`."""
    return jnp.stack(per_source, axis=1)
