"""Attention, feed-forward and RMSNorm modules against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.modules import Attention, FeedForward, RMSNorm
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D, K = 2, 5, 12, 6


def rotate(x_bthk, theta):
    """The halves of a head are real and imaginary parts; position turns each number's phase."""
    real, imaginary = np.split(x_bthk, 2, axis=-1)
    frequency = theta ** (-2 * np.arange(real.shape[-1]) / x_bthk.shape[-1])
    turned = (real + 1j * imaginary) * np.exp(
        1j * np.arange(x_bthk.shape[1])[:, None] * frequency
    ).reshape(1, x_bthk.shape[1], 1, -1)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def causal_attention(x, kernels, theta):
    query, key, value, output = kernels
    repeats = query.shape[1] // key.shape[1]
    q = rotate(np.einsum("btd,dhk->bthk", x, query), theta)
    k = rotate(np.einsum("btd,dgk->btgk", x, key), theta).repeat(repeats, axis=2)
    v = np.einsum("btd,dgk->btgk", x, value).repeat(repeats, axis=2)
    logits = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshk,hkd->btd", weights, v, output)


def attention_of(num_heads, num_kv_heads, theta=100.0):
    return Attention(D, num_heads, num_kv_heads, K, rope_theta=theta, rngs=nnx.Rngs(3))


def kernels_of(module):
    names = ("query_kernel", "key_kernel", "value_kernel", "output_kernel")
    return [getattr(module, name) for name in names]


def inputs():
    return jnp.asarray(oracles.normal(5, B, T, D), jnp.float32)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (4, 2), (3, 1)])
def test_attention_matches_numpy(num_heads, num_kv_heads):
    module = attention_of(num_heads, num_kv_heads)
    assert [kernel.shape for kernel in kernels_of(module)] == [
        (D, num_heads, K),
        (D, num_kv_heads, K),
        (D, num_kv_heads, K),
        (num_heads, K, D),
    ]
    exact = [oracles.float64(kernel[...]) for kernel in kernels_of(module)]
    expected = causal_attention(oracles.float64(inputs()), exact, 100.0)
    assert oracles.relative_error(module(inputs()), expected) <= 1e-5


def test_grouped_queries_equal_full_attention_with_repeated_key_value_heads():
    grouped, full = attention_of(4, 2), attention_of(4, 4)
    for name in ("query_kernel", "output_kernel"):
        getattr(full, name)[...] = getattr(grouped, name)[...]
    for name in ("key_kernel", "value_kernel"):
        getattr(full, name)[...] = jnp.repeat(getattr(grouped, name)[...], 2, axis=1)
    assert oracles.relative_error(grouped(inputs()), full(inputs())) <= 1e-6


def test_rotary_positions_are_relative():
    # Constant inputs: only distances matter, and with one key alone, not even those.
    module = attention_of(2, 2)
    x = jnp.broadcast_to(inputs()[:1, :1], (1, T, D))
    first, *others = module(x)[0]
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["attention", "feed_forward", "norm"])
def test_results_have_the_dtype_of_the_input_and_parameters_are_float32(kind, dtype):
    module = {
        "attention": lambda: attention_of(4, 2),
        "feed_forward": lambda: FeedForward(D, 20, rngs=nnx.Rngs(3)),
        "norm": lambda: RMSNorm(D),
    }[kind]()
    kwargs = {"eps": 1e-6} if kind == "norm" else {}
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(module)))
    # jax.nn.dot_product_attention itself does not run where promotion to float32 is forbidden.
    promotion = "standard" if kind == "attention" else "strict"
    with jax.numpy_dtype_promotion(promotion):
        result = module(inputs().astype(dtype), **kwargs)
    assert result.dtype == dtype
    exact = module(inputs().astype(dtype).astype(jnp.float32), **kwargs)
    assert oracles.relative_error(result, exact) <= 16 * jnp.finfo(dtype).eps


def test_feed_forward_matches_numpy():
    module = FeedForward(D, 20, rngs=nnx.Rngs(3))
    x = oracles.float64(inputs())
    gate, up, down = (
        oracles.float64(kernel[...])
        for kernel in (module.gate_kernel, module.up_kernel, module.down_kernel)
    )
    inner = x @ gate
    expected = (inner / (1 + np.exp(-inner)) * (x @ up)) @ down
    assert oracles.relative_error(module(inputs()), expected) <= 1e-5


def test_rms_norm_matches_numpy_and_starts_with_a_gain_of_one():
    module = RMSNorm(D)
    assert (module.gain[...] == 1).all()
    gain = oracles.normal(6, D)
    module.gain[...] = jnp.asarray(gain, jnp.float32)
    expected = oracles.rms_norm(oracles.float64(inputs()), gain, 0.1)
    assert oracles.relative_error(module(inputs(), eps=0.1), expected) <= 1e-5


def test_kernels_start_with_a_variance_of_one_over_their_inputs():
    width = 128
    attention = Attention(width, 8, 2, 16, rngs=nnx.Rngs(0))
    feed_forward = FeedForward(width, 256, rngs=nnx.Rngs(1))
    fan_in = [
        (attention.query_kernel, width),
        (attention.key_kernel, width),
        (attention.value_kernel, width),
        (attention.output_kernel, 8 * 16),
        (feed_forward.gate_kernel, width),
        (feed_forward.up_kernel, width),
        (feed_forward.down_kernel, 256),
    ]
    for kernel, inputs_of_one in fan_in:
        assert float(jnp.std(kernel[...])) == pytest.approx(inputs_of_one**-0.5, rel=0.05)
