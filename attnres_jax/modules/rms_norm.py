"""RMSNorm with a learned gain."""

import jax
import jax.numpy as jnp
from flax import nnx

from attnres_jax.ops import rms_norm


class RMSNorm(nnx.Module):
    """`x / sqrt(mean_d(x**2) + eps) * gain`, statistics in float32.

    Attributes:
        gain: float32 `[d]`, one at first.
    """

    def __init__(self, width: int):
        """Creates the norm of vectors of `width`."""
        self.gain = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array, *, eps: float) -> jax.Array:
        """Normalises `x` `[..., d]`, adding `eps` to its mean square; returns the dtype of `x`."""
        return rms_norm(x, self.gain[...], eps=eps)
