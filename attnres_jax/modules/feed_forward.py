"""The SwiGLU feed-forward sub-layer."""

import jax
from flax import nnx

_init = nnx.initializers.lecun_normal()


class FeedForward(nnx.Module):
    """`W_down (silu(W_gate x) * (W_up x))`, arXiv:2002.05202. Its norm comes before, outside.

    Attributes:
        gate_kernel: float32 `[d, f]`.
        up_kernel: float32 `[d, f]`.
        down_kernel: float32 `[f, d]`.
    """

    def __init__(self, width: int, feed_forward_width: int, *, rngs: nnx.Rngs):
        """Creates the three kernels, normal with variance 1 / fan-in."""
        self.gate_kernel = nnx.Param(_init(rngs.params(), (width, feed_forward_width)))
        self.up_kernel = nnx.Param(_init(rngs.params(), (width, feed_forward_width)))
        self.down_kernel = nnx.Param(_init(rngs.params(), (feed_forward_width, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps normalised `[b, t, d]` to `[b, t, d]`, in the dtype of `x`."""
        gate = jax.nn.silu(x @ self.gate_kernel[...].astype(x.dtype))
        inner = gate * (x @ self.up_kernel[...].astype(x.dtype))
        return inner @ self.down_kernel[...].astype(x.dtype)
