"""Means over tokens, and rows of different length as one array."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def mean_norm(x_btd: jax.Array, weights_bt: jax.Array) -> jax.Array:
    """Root mean square over d of each token, averaged with weights that sum to 1."""
    return jnp.sum(jnp.sqrt(jnp.mean(jnp.square(x_btd.astype(jnp.float32)), -1)) * weights_bt)


def pad(rows: Sequence[jax.Array]) -> jax.Array:
    """Stacks arrays that differ in their last axis; NaN where a shorter one has ended."""
    longest = max(row.shape[-1] for row in rows)

    def padded(row: jax.Array) -> jax.Array:
        widths = [(0, 0)] * (row.ndim - 1) + [(0, longest - row.shape[-1])]
        return jnp.pad(row, widths, constant_values=jnp.nan)

    return jnp.stack([padded(row) for row in rows])
