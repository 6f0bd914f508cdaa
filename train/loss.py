"""Next-token cross-entropy, in nats, in float32."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(
    logits_btv: jax.Array, tokens_bt: jax.Array, weights_bt: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sums the negative log-likelihood of the target tokens.

    The sum and the weight are returned apart so that batches of different weight average rightly.
    A target outside the vocabulary makes the sum NaN instead of silently counting as another token.

    Args:
        logits_btv: `[B, T, V]` scores; converted to float32.
        tokens_bt: `[B, T]` target token ids.
        weights_bt: `[B, T]` weight of each target, 0 for padding; all ones if absent.

    Returns:
        The weighted sum in nats and the sum of the weights, both float32 scalars.
    """
    nats_bt = optax.softmax_cross_entropy_with_integer_labels(
        logits_btv.astype(jnp.float32), tokens_bt
    )
    in_range_bt = (tokens_bt >= 0) & (tokens_bt < logits_btv.shape[-1])
    nats_bt = jnp.where(in_range_bt, nats_bt, jnp.nan)
    if weights_bt is None:
        weights_bt = jnp.ones_like(nats_bt)
    # Selecting before summing keeps a NaN at a padded place out of the sum: NaN * 0 is NaN.
    return jnp.sum(jnp.where(weights_bt > 0, nats_bt * weights_bt, 0)), jnp.sum(weights_bt)
