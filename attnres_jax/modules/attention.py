"""Causal self-attention with rotary positions and grouped queries."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

_init_in = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
_init_out = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)


class Attention(nnx.Module):
    """Causal grouped-query attention, arXiv:2305.13245. Its norm comes before, outside.

    Attributes:
        query_kernel: float32 `[d, h, k]`.
        key_kernel: float32 `[d, g, k]`.
        value_kernel: float32 `[d, g, k]`.
        output_kernel: float32 `[h, k, d]`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        *,
        rope_theta: float = 10_000.0,
        implementation: Literal["xla", "splash"] | None = None,
        rngs: nnx.Rngs,
    ):
        """Creates the four kernels, normal with variance 1 / fan-in.

        Args:
            width: Width d of what is read and written.
            num_heads: Query heads h.
            num_kv_heads: Key and value heads g; divides h.
            head_width: Width k of a head; even, for the rotary embedding.
            rope_theta: Base of the rotary embedding.
            implementation: See `causal_attention`.
            rngs: Where the initial values come from.
        """
        self.query_kernel = nnx.Param(_init_in(rngs.params(), (width, num_heads, head_width)))
        self.key_kernel = nnx.Param(_init_in(rngs.params(), (width, num_kv_heads, head_width)))
        self.value_kernel = nnx.Param(_init_in(rngs.params(), (width, num_kv_heads, head_width)))
        self.output_kernel = nnx.Param(_init_out(rngs.params(), (num_heads, head_width, width)))
        self.rope_theta = rope_theta
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, time_axis: str | None = None) -> jax.Array:
        """Maps normalised `[b, t, d]` to `[b, t, d]`, in the dtype of `x`.

        With `time_axis`, a manual axis of the mesh, `x` is this device's part of the sequences, and
        keys and values of the other parts are gathered.
        """
        start = 0 if time_axis is None else jax.lax.axis_index(time_axis) * x.shape[1]
        query_bthk = jnp.einsum("btd,dhk->bthk", x, self.query_kernel[...].astype(x.dtype))
        key_btgk = jnp.einsum("btd,dgk->btgk", x, self.key_kernel[...].astype(x.dtype))
        value_btgk = jnp.einsum("btd,dgk->btgk", x, self.value_kernel[...].astype(x.dtype))
        query_bthk = rotary_embedding(query_bthk, theta=self.rope_theta, start=start)
        key_btgk = rotary_embedding(key_btgk, theta=self.rope_theta, start=start)
        if time_axis is not None:
            key_btgk, value_btgk = (
                jax.lax.all_gather(part, time_axis, axis=1, tiled=True)
                for part in (key_btgk, value_btgk)
            )
        mixed_bthk = causal_attention(
            query_bthk, key_btgk, value_btgk, start=start, implementation=self.implementation
        )
        return jnp.einsum("bthk,hkd->btd", mixed_bthk, self.output_kernel[...].astype(x.dtype))


def rotary_embedding(x_bthk: jax.Array, *, theta: float, start: int | jax.Array = 0) -> jax.Array:
    """Rotates each pair (i, i + k/2) by `position * theta**(-2i/k)`, in float32.

    Args:
        x_bthk: Queries or keys, any floating dtype; position is `start` plus the index along t.
        theta: Base of the frequencies.
        start: Position of the first.

    Returns:
        The same shape and dtype.

    References:
        RoFormer, arXiv:2104.09864, section 3.2.2, with the halves in place of neighbours.
    """
    t, k = x_bthk.shape[1], x_bthk.shape[3]
    frequency_k = theta ** (-jnp.arange(0, k, 2, dtype=jnp.float32) / k)
    position_t = (start + jnp.arange(t)).astype(jnp.float32)
    angle_tk = position_t[:, None] * frequency_k[None]
    cos, sin = jnp.cos(angle_tk)[None, :, None], jnp.sin(angle_tk)[None, :, None]
    first, second = jnp.split(x_bthk.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_bthk.dtype)


def causal_attention(
    query_bthk: jax.Array,
    key_btgk: jax.Array,
    value_btgk: jax.Array,
    *,
    start: int | jax.Array = 0,
    implementation: Literal["xla", "splash"] | None = None,
) -> jax.Array:
    """Scaled dot-product attention to this and earlier positions, by a kernel of JAX's own.

    Args:
        query_bthk: Queries.
        key_btgk: Keys; g divides h.
        value_btgk: Values.
        start: Position of the first query among the keys, if these are more than the queries.
        implementation: "xla" is `jax.nn.dot_product_attention`; "splash" is the TPU kernel, for t a
            multiple of 128. None takes splash where the default backend is a TPU and t allows it.

    Returns:
        `[b, t, h, k]` in the dtype of the queries.

    Raises:
        ValueError: Splash attention is named, and t is not a multiple of 128 or there are more keys
            than queries.
    """
    t, num_keys = query_bthk.shape[1], key_btgk.shape[1]
    if t != num_keys:
        if implementation == "splash":
            raise ValueError(
                f"splash attention needs as many queries as keys, got {t} and {num_keys}: do not"
                ' split time over devices, or use implementation="xla"'
            )
        use_splash = False
    elif implementation is None:
        use_splash = t % 128 == 0 and jax.default_backend() == "tpu"
    else:
        use_splash = implementation == "splash"
    if not use_splash:
        dtype = query_bthk.dtype
        inputs = query_bthk, key_btgk, value_btgk
        if dtype == jnp.float16 and jax.default_backend() == "cpu":
            # XLA's CPU compiler has no float16 product that is summed in float32.
            inputs = [x.astype(jnp.float32) for x in inputs]
        if t == num_keys:
            return jax.nn.dot_product_attention(*inputs, is_causal=True).astype(dtype)
        is_past_ts = (start + jnp.arange(t))[:, None] >= jnp.arange(num_keys)[None]
        mixed = jax.nn.dot_product_attention(*inputs, mask=is_past_ts[None, None])
        return mixed.astype(dtype)
    if t % 128:
        raise ValueError(
            f"splash attention needs a context that is a multiple of 128, got {t}; change the"
            ' context, or use implementation="xla"'
        )
    # A Mosaic kernel cannot be partitioned by the compiler: each device runs it on its sequences.
    mesh = jax.sharding.get_abstract_mesh()
    auto = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    )
    if not auto:
        return _splash_attention(query_bthk, key_btgk, value_btgk)
    by_sequence = PartitionSpec(auto)
    return jax.shard_map(
        _splash_attention, in_specs=by_sequence, out_specs=by_sequence, check_vma=False
    )(query_bthk, key_btgk, value_btgk)


def _splash_attention(
    query_bthk: jax.Array, key_btgk: jax.Array, value_btgk: jax.Array
) -> jax.Array:
    # Imported here because it brings the whole of Pallas for TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    t, h, k = query_bthk.shape[1:]
    mask = splash.MultiHeadMask([splash.CausalMask((t, t))] * h)
    kernel: Any = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (query_bthk * k**-0.5, key_btgk, value_btgk)]
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first), 1, 2)
