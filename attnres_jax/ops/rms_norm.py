"""Root-mean-square normalisation with float32 statistics."""

from functools import partial

import jax
import jax.numpy as jnp


def inverse_rms(x: jax.Array, *, eps: float) -> jax.Array:
    """Computes `1 / sqrt(mean_d(x**2) + eps)`.

    Args:
        x: `[..., d]`, any floating dtype; converted to float32 before it is squared.
        eps: Added to the mean square.

    Returns:
        float32 `[...]`.
    """
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1) + eps)


def rms_norm(x: jax.Array, gain_d: jax.Array, *, eps: float) -> jax.Array:
    """Computes `x / sqrt(mean_d(x**2) + eps) * gain`.

    The gradient keeps x as it is, and no float32 copy of it.

    Args:
        x: `[..., d]`, any floating dtype.
        gain_d: `[d]`.
        eps: Added to the mean square.

    Returns:
        `[..., d]` in the dtype of `x`, rounded once from float32.
    """
    return jax.checkpoint(partial(_rms_norm, eps=eps))(x, gain_d)


def _rms_norm(x, gain_d, *, eps):
    normalised = x.astype(jnp.float32) * inverse_rms(x, eps=eps)[..., None]
    gain = jnp.expand_dims(gain_d.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (normalised * gain).astype(x.dtype)
