"""Half-precision results are as good as the exact ones rounded once.

The floor is the error of the float64 result, computed from the inputs as they are in the tested
dtype, when it is rounded to that dtype. It is the best that any implementation can do.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.ops import depth_attention, inter_block, merge, rms_norm
from tests import oracles

N, T, D = 9, 512, 1024
HALF_DTYPES = [jnp.bfloat16, jnp.float16]


def assert_near_the_floor(actual, expected, name):
    error = oracles.relative_error(actual, expected)
    if actual.dtype == jnp.float32:
        assert error <= 2e-5, f"{name}: relative error {error}"
    else:
        floor = oracles.rounding_floor(expected, np.dtype(actual.dtype))
        assert error <= 1.05 * floor, f"{name}: {error / floor:.3f} times the rounding floor"


def vectors(seed, *shape, dtype):
    queries = jnp.asarray(2 * oracles.normal(seed, *shape) / np.sqrt(D), dtype)
    return queries, jnp.asarray(1 + 0.3 * oracles.normal(seed + 1, *shape), dtype)


@pytest.mark.parametrize(
    "dtype, parameter_dtype, jit",
    [
        (jnp.bfloat16, jnp.bfloat16, True),
        (jnp.bfloat16, jnp.bfloat16, False),
        (jnp.bfloat16, jnp.float32, True),
        (jnp.float16, jnp.float16, True),
    ],
)
def test_depth_attention(dtype, parameter_dtype, jit):
    sources = [jnp.asarray(oracles.normal(i, T, D), dtype) for i in range(N)]
    inputs = (sources, *vectors(20, D, dtype=parameter_dtype))
    cotangent = jnp.asarray(oracles.normal(30, T, D), dtype)

    def values_and_gradients(*inputs):
        output, pullback = jax.vjp(depth_attention, *inputs)
        return output, pullback(cotangent)

    output, grads = (jax.jit(values_and_gradients) if jit else values_and_gradients)(*inputs)
    exact = oracles.float64(inputs)
    right = oracles.read_gradients(*exact, oracles.float64(cotangent))
    assert_near_the_floor(output, oracles.read(*exact).output, "output")
    assert_near_the_floor(grads[1], right.query, "query")
    assert_near_the_floor(grads[2], right.gain, "gain")
    for i in range(N):
        assert_near_the_floor(grads[0][i], right.sources[i], f"source {i}")


@pytest.mark.parametrize("jit", [True, False])
def test_gradients_of_a_group_are_summed_before_they_are_rounded(jit):
    n_reads, n_tokens, dtype = 4, 128, jnp.bfloat16
    sources = [jnp.asarray(oracles.normal(i, n_tokens, D), dtype) for i in range(N)]
    inputs = (sources, *vectors(20, n_reads, D, dtype=dtype))
    doutputs = tuple(
        jnp.asarray(oracles.normal(30 + s, n_tokens, D), dtype) for s in range(n_reads)
    )
    dlse = jnp.asarray(oracles.normal(40, n_reads, n_tokens), jnp.float32)

    def values_and_gradients(*inputs):
        outputs, pullback = jax.vjp(inter_block, *inputs)
        return outputs, pullback((doutputs, dlse))

    run = jax.jit(values_and_gradients) if jit else values_and_gradients
    (outputs, lse), grads = run(*inputs)
    exact = oracles.float64(inputs)
    expected = oracles.group_read(*exact)
    right = oracles.group_read_gradients(*exact, oracles.float64(doutputs), oracles.float64(dlse))
    for s in range(n_reads):
        assert_near_the_floor(outputs[s], expected[s].output, f"output {s}")
    assert_near_the_floor(lse, np.stack([read.lse for read in expected]), "lse")
    assert_near_the_floor(grads[1], right.query, "query")
    assert_near_the_floor(grads[2], right.gain, "gain")
    for i in range(N):
        assert_near_the_floor(grads[0][i], right.sources[i], f"source {i}")


@pytest.mark.parametrize(
    "dtype, sum_dtype, with_norm, jit",
    [
        (jnp.bfloat16, jnp.bfloat16, False, True),
        (jnp.bfloat16, jnp.bfloat16, True, True),
        (jnp.bfloat16, jnp.bfloat16, True, False),
        (jnp.bfloat16, jnp.float32, True, True),
        (jnp.float16, jnp.float16, False, True),
        (jnp.float16, jnp.float32, True, False),
    ],
)
def test_merge(dtype, sum_dtype, with_norm, jit):
    output, update = (jnp.asarray(oracles.normal(i, T, D), dtype) for i in range(2))
    partial_sum = jnp.asarray(oracles.normal(2, T, D), sum_dtype)
    lse = jnp.asarray(oracles.normal(3, T), jnp.float32)
    query, gain = vectors(4, D, dtype=dtype)
    norm_gain = vectors(6, D, dtype=dtype)[1]
    inputs = [output, lse, partial_sum, update, query, gain] + [norm_gain] * with_norm
    cotangents = (
        jnp.asarray(oracles.normal(8, T, D), sum_dtype),
        jnp.asarray(oracles.normal(9, T, D), dtype),
        jnp.asarray(oracles.normal(10, T), jnp.float32),
    )

    def function(*inputs):
        following = inputs[6] if with_norm else None
        return merge(*inputs[:6], norm_gain_d=following, return_gate=True)

    def values_and_gradients(*inputs):
        outputs, pullback = jax.vjp(function, *inputs)
        return outputs, pullback(cotangents)

    run = jax.jit(values_and_gradients) if jit else values_and_gradients
    (summed, hidden, gate), grads = run(*inputs)
    # The sum is rounded before it is read: the stored value is the one that counts.
    total = oracles.float64(partial_sum) + oracles.float64(update)
    rounded = total.astype(np.float32).astype(np.dtype(sum_dtype))
    exact = oracles.float64([output, lse, rounded, query, gain])
    following = oracles.float64(norm_gain) if with_norm else None
    expected = oracles.merge(*exact, following)
    right = oracles.merge_gradients(*exact, *oracles.float64(cotangents), following)
    np.testing.assert_array_equal(summed, rounded)
    assert_near_the_floor(hidden, expected.hidden, "hidden")
    assert_near_the_floor(gate, expected.gate, "gate")
    rights = [right.output, right.lse, right.summed, right.summed, right.query, right.gain]
    names = ["output", "lse", "partial_sum", "update", "query", "gain", "norm_gain"]
    for name, actual, one in zip(names, grads, [*rights, right.norm_gain], strict=False):
        assert_near_the_floor(actual, one, name)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rms_norm_is_rounded_once(dtype):
    x = jnp.asarray(oracles.normal(0, T, D), dtype)
    gain = vectors(1, D, dtype=dtype)[1]
    right = oracles.rms_norm(oracles.float64(x), oracles.float64(gain), 1e-6)
    assert_near_the_floor(rms_norm(x, gain, eps=1e-6), right, "output")


def run_block(sources, queries, gains, slopes, *, sum_dtype):
    """A block of tanh sub-layers; returns its sum."""
    outputs, lse = inter_block(sources, queries, gains)
    dtype = sources[0].dtype
    partial_sum, update, hidden = None, None, outputs[0]
    for s in range(len(outputs)):
        if s == 1:
            partial_sum, update = update.astype(sum_dtype), None
        if s > 0:
            partial_sum, hidden = merge(
                outputs[s], lse[s], partial_sum, update, queries[s], gains[s]
            )
        update = jnp.tanh(hidden.astype(jnp.float32) * slopes[s][None]).astype(dtype)
    return partial_sum.astype(jnp.float32) + update.astype(jnp.float32)


def test_a_float32_partial_sum_makes_a_bfloat16_block_more_exact():
    # In bfloat16 the error of a block comes mostly from rounding the sum after every sub-layer.
    n, n_reads, n_tokens, width = 4, 8, 128, 256
    sources = [jnp.asarray(oracles.normal(i, n_tokens, width), jnp.bfloat16) for i in range(n)]
    queries, gains = (
        jnp.asarray(x, jnp.bfloat16)
        for x in (
            2 * oracles.normal(20, n_reads, width) / np.sqrt(width),
            1 + 0.3 * oracles.normal(21, n_reads, width),
        )
    )
    slopes = jnp.asarray(1 + 0.3 * oracles.normal(22, n_reads, width), jnp.float32)
    exact = oracles.float64((sources, queries, gains, slopes))
    total = 0.0
    for s in range(n_reads):
        read_sources = exact[0] if s == 0 else [*exact[0], total]
        hidden = oracles.read(read_sources, exact[1][s], exact[2][s]).output
        total = total + np.tanh(hidden * exact[3][s])
    errors = {
        dtype: oracles.relative_error(
            jax.jit(partial(run_block, sum_dtype=dtype))(sources, queries, gains, slopes), total
        )
        for dtype in (jnp.bfloat16, jnp.float32)
    }
    assert errors[jnp.float32] < 0.75 * errors[jnp.bfloat16] < 0.01
