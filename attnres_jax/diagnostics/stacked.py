"""A captured forward pass as one array for all reads.

A model of many layers has many reads. Stacked, whatever is done to each of them is one operation,
and the program stays small.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.capture import ReadState


class Stacked(NamedTuple):
    """What the L + 1 reads did, and the outputs between them.

    Attributes:
        hidden: What each read returned, float32 `[l + 1, b, t, d]`.
        outputs: The embedding and the outputs of the sub-layers, `[l + 1, b, t, d]`.
        weights: Depth weights, float32 `[l + 1, n, b, t]`, zero where a read has no such source;
            None for the standard residual, as are the others below.
        finished: The embedding and the block sums, `[n, b, t, d]`.
        partial_sums: Of the reads that have one, `[k, b, t, d]`; None where k is 0.
        num_sources: Of each read, `[l + 1]`.
        has_partial_sum: Whether a read's last source is one, `[l + 1]`.
    """

    hidden: jax.Array
    outputs: jax.Array
    weights: jax.Array | None
    finished: jax.Array | None
    partial_sums: jax.Array | None
    num_sources: np.ndarray
    has_partial_sum: np.ndarray

    @property
    def is_source(self) -> np.ndarray:
        """Whether read l has a source n, `[l + 1, n]`."""
        return np.arange(self.num_sources.max()) < self.num_sources[:, None]

    @property
    def is_partial_sum(self) -> np.ndarray:
        """Whether source n of read l is the open partial sum, `[l + 1, n]`."""
        last = np.arange(self.num_sources.max()) == self.num_sources[:, None] - 1
        return last & self.has_partial_sum[:, None]

    def at_partial_sums(self, of_each: jax.Array) -> jax.Array:
        """Puts one value for each partial sum, `[k, ...]`, at its read, `[l + 1, ...]`, else 0."""
        indices = np.flatnonzero(self.has_partial_sum)
        shape = (len(self.has_partial_sum), *of_each.shape[1:])
        return jnp.zeros(shape, of_each.dtype).at[indices].set(of_each)


def stack(states: Sequence[ReadState], finished: Sequence[jax.Array]) -> Stacked:
    """Stacks what a model captured."""
    hidden = jnp.stack([state.hidden.astype(jnp.float32) for state in states])
    sublayer_outputs: list[Any] = [state.output for state in states[:-1]]
    outputs = jnp.stack([finished[0], *sublayer_outputs])
    alphas = [state.weights for state in states if state.weights is not None]
    if not alphas:
        ones = np.ones(len(states), int)
        return Stacked(hidden, outputs, None, None, None, ones, np.zeros(len(states), bool))
    num_sources = np.array([len(alpha) for alpha in alphas])

    def with_zeros(alpha_nbt: jax.Array) -> jax.Array:
        return jnp.pad(alpha_nbt, [(0, num_sources.max() - len(alpha_nbt)), (0, 0), (0, 0)])

    partial_sums: list[Any] = [s.partial_sum for s in states if s.partial_sum is not None]
    return Stacked(
        hidden,
        outputs,
        jnp.stack([with_zeros(alpha) for alpha in alphas]),
        jnp.stack(finished),
        jnp.stack(partial_sums) if partial_sums else None,
        num_sources,
        np.array([state.partial_sum is not None for state in states]),
    )


def mean_norms(x: jax.Array, weights_bt: jax.Array) -> jax.Array:
    """Root mean square over d of each token, averaged: `[l, b, t, d]` -> float32 `[l]`."""
    return jnp.einsum(
        "lbt,bt->l", jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1)), weights_bt
    )
