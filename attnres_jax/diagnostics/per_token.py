"""What each read did at every token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attnres_jax.diagnostics.stacked import Stacked
from attnres_jax.models import TransformerLM
from attnres_jax.models.capture import ReadState
from attnres_jax.ops import inter_block


def per_token_arrays(
    model: TransformerLM, states: Sequence[ReadState], stacked: Stacked
) -> dict[str, jax.Array]:
    """Depth weights, their logits, phase 1's log-sum-exp and the merge's gate of every token.

    Returns:
        Arrays `[b, t, read, source]` and `[b, t, read]`, without b where it is 1.
    """
    assert stacked.weights is not None
    is_source = stacked.is_source[:, :, None, None]
    nothing_bt = jnp.full(stacked.weights.shape[2:], jnp.nan)
    weights_lnbt = jnp.where(is_source, stacked.weights, jnp.nan)
    logits_lnbt = jnp.where(is_source, _logits(model, stacked), jnp.nan)
    lse_lbt = jnp.stack([nothing_bt if s.lse is None else s.lse for s in states])
    gate_lbt = jnp.stack([nothing_bt if s.gate is None else s.gate for s in states])
    arrays = {
        "depth_weights_per_token": jnp.transpose(weights_lnbt, (2, 3, 0, 1)),
        "logits_per_token": jnp.transpose(logits_lnbt, (2, 3, 0, 1)),
        "lse_per_token": jnp.moveaxis(lse_lbt, 0, -1),
        "gate_per_token": jnp.moveaxis(gate_lbt, 0, -1),
    }
    return {name: x[0] if x.shape[0] == 1 else x for name, x in arrays.items()}


def _logits(model: TransformerLM, stacked: Stacked) -> jax.Array:
    """Logits of all reads and sources, `[l, n, b, t]`.

    The log-sum-exp of a phase 1 with a single source is that source's logit.
    """
    assert model.reads is not None and model.final_read is not None
    assert stacked.finished is not None
    query_ld = jnp.concatenate([model.reads.query[...], model.final_read.query[...][None]])
    gain_ld = jnp.concatenate([model.reads.gain[...], model.final_read.gain[...][None]])

    def logits_of(source_btd: jax.Array, query_sd: jax.Array, gain_sd: jax.Array) -> jax.Array:
        eps = model.config.norm_eps
        return inter_block((source_btd,), query_sd, gain_sd, eps=eps, implementation="xla")[1]

    logits_nlbt = jax.lax.map(lambda source: logits_of(source, query_ld, gain_ld), stacked.finished)
    logits_lnbt = jnp.swapaxes(logits_nlbt, 0, 1)
    if stacked.partial_sums is None:
        return logits_lnbt
    reads = stacked.has_partial_sum.nonzero()[0]
    of_partial_sums = jax.lax.map(
        lambda one: logits_of(*one)[0],
        (stacked.partial_sums, query_ld[reads][:, None], gain_ld[reads][:, None]),
    )
    at_reads = stacked.at_partial_sums(of_partial_sums)[:, None]
    return jnp.where(stacked.is_partial_sum[:, :, None, None], at_reads, logits_lnbt)
