"""What each read did at every token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attnres_jax.diagnostics.reductions import pad
from attnres_jax.models import TransformerLM
from attnres_jax.models.capture import ReadState
from attnres_jax.ops import inter_block


def per_token_arrays(
    model: TransformerLM, states: Sequence[ReadState], finished: Sequence[jax.Array]
) -> dict[str, jax.Array]:
    """Depth weights, their logits, phase 1's log-sum-exp and the merge's gate of every token.

    A logit is the log-sum-exp of a phase 1 whose only source it belongs to.

    Returns:
        Arrays `[b, t, read, source]` and `[b, t, read]`, without b where it is 1.
    """
    assert model.reads is not None and model.final_read is not None
    query_sd = jnp.concatenate([model.reads.query[...], model.final_read.query[...][None]])
    gain_sd = jnp.concatenate([model.reads.gain[...], model.final_read.gain[...][None]])

    def logits_of(source_btd: jax.Array, reads: slice) -> jax.Array:
        eps = model.config.norm_eps
        read = inter_block(
            (source_btd,), query_sd[reads], gain_sd[reads], eps=eps, implementation="xla"
        )
        return read[1]

    logits_nsbt = [logits_of(source, slice(None)) for source in finished]
    alphas, logits, lses, gates = [], [], [], []
    for index, state in enumerate(states):
        assert state.weights is not None
        nothing_bt = jnp.full(state.weights.shape[1:], jnp.nan)
        num_finished = state.weights.shape[0] - (state.partial_sum is not None)
        of_read = [logits_sbt[index] for logits_sbt in logits_nsbt[:num_finished]]
        if state.partial_sum is not None:
            of_read.append(logits_of(state.partial_sum, slice(index, index + 1))[0])
        alphas.append(jnp.moveaxis(state.weights, 0, -1))
        logits.append(jnp.stack(of_read, axis=-1))
        lses.append(nothing_bt if state.lse is None else state.lse)
        gates.append(nothing_bt if state.gate is None else state.gate)
    arrays = {
        "depth_weights_per_token": jnp.moveaxis(pad(alphas), 0, -2),
        "logits_per_token": jnp.moveaxis(pad(logits), 0, -2),
        "lse_per_token": jnp.stack(lses, axis=-1),
        "gate_per_token": jnp.stack(gates, axis=-1),
    }
    return {name: x[0] if x.shape[0] == 1 else x for name, x in arrays.items()}
