"""A bank, with a traced number of filled rows, equals a tuple of as many sources."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.ops import Bank, depth_attention, inter_block, rms_norm
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

N_MAX, B, T, D = 5, 2, 3, 16


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def case(dtype=jnp.float32, n_reads=2):
    values = jnp.asarray(oracles.normal(0, N_MAX, B, T, D), dtype)
    queries = jnp.asarray(2 * oracles.normal(1, n_reads, D) / 4, dtype)
    gains = jnp.asarray(1 + 0.3 * oracles.normal(2, n_reads, D), dtype)
    return values, queries, gains


@pytest.mark.parametrize("filler", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("count", range(1, N_MAX + 1))
def test_bank_equals_tuple_whatever_the_unfilled_rows_hold(count, filler):
    values, queries, gains = case()
    values = values.at[count:].set(filler)
    doutputs = tuple(float32(oracles.normal(3, 2, B, T, D)))
    dlse = float32(oracles.normal(4, 2, B, T))
    dweights = float32(oracles.normal(5, 2, N_MAX, B, T))

    @jax.jit
    def of_bank(values, queries, gains, count):
        def function(values, queries, gains):
            return inter_block(Bank(values, count), queries, gains, return_weights=True)

        outputs, pullback = jax.vjp(function, values, queries, gains)
        return outputs, pullback((doutputs, dlse, dweights))

    (outputs, lse, weights), grads = of_bank(values, queries, gains, jnp.int32(count))
    exact = oracles.float64((list(values[:count]), queries, gains))
    expected = oracles.group_read(*exact)
    right = oracles.group_read_gradients(
        *exact, *oracles.float64((doutputs, dlse, dweights[:, :count]))
    )
    for s in range(2):
        assert oracles.relative_error(outputs[s], expected[s].output) <= 1e-5
        assert oracles.relative_error(lse[s], expected[s].lse) <= 1e-5
        assert oracles.relative_error(weights[s, :count], expected[s].weights) <= 1e-5
    np.testing.assert_array_equal(weights[:, count:], np.zeros((2, N_MAX - count, B, T)))
    assert oracles.relative_error(grads[0][:count], np.stack(right.sources)) <= 2e-5
    np.testing.assert_array_equal(grads[0][count:], np.zeros((N_MAX - count, B, T, D)))
    assert oracles.relative_error(grads[1], right.query) <= 2e-5
    assert oracles.relative_error(grads[2], right.gain) <= 2e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_bank_of_one_source_is_the_identity_and_its_query_gets_no_gradient(dtype):
    values, queries, gains = case(dtype)
    values = values.at[1:].set(jnp.nan)
    cotangent = jnp.asarray(oracles.normal(3, B, T, D), dtype)

    @jax.jit
    def values_and_gradients(values, query, gain, count):
        def function(values, query, gain):
            return depth_attention(Bank(values, count), query, gain, return_weights=True)

        outputs, pullback = jax.vjp(function, values, query, gain)
        return outputs, pullback((cotangent, jnp.ones((N_MAX, B, T))))

    (output, weights), (dvalues, dquery, dgain) = values_and_gradients(
        values, 30 * queries[0], gains[0], jnp.int32(1)
    )
    np.testing.assert_array_equal(output, values[0])
    np.testing.assert_array_equal(weights[0], np.ones((B, T)))
    np.testing.assert_array_equal(weights[1:], np.zeros((N_MAX - 1, B, T)))
    np.testing.assert_array_equal(dvalues[0], cotangent)
    np.testing.assert_array_equal(dvalues[1:], np.zeros((N_MAX - 1, B, T, D)))
    np.testing.assert_array_equal(dquery, np.zeros(D))
    np.testing.assert_array_equal(dgain, np.zeros(D))


def test_forward_mode_ignores_unfilled_rows():
    values, queries, gains = case()
    tangents = oracles.normal(3, N_MAX, B, T, D)

    def function(values):
        return depth_attention(Bank(values, jnp.int32(3)), queries[0], gains[0])

    dirty = values.at[3:].set(jnp.nan)
    output, doutput = jax.jvp(function, (dirty,), (float32(tangents).at[3:].set(jnp.nan),))
    expected = oracles.directional_derivative(
        lambda *sources: oracles.read(sources, *oracles.float64((queries[0], gains[0]))).output,
        tuple(oracles.float64(values[:3])),
        tuple(oracles.float64(float32(tangents[:3]))),
    )
    assert bool(jnp.isfinite(output).all())
    assert oracles.relative_error(doutput, expected) <= 2e-5


def test_zero_query_weighs_the_filled_rows_alike():
    values, _, gains = case()
    for count in range(1, N_MAX + 1):
        bank = Bank(values.at[count:].set(jnp.nan), jnp.int32(count))
        _, weights = depth_attention(bank, jnp.zeros(D), gains[0], return_weights=True)
        np.testing.assert_allclose(weights[:count], np.full((count, B, T), 1 / count), rtol=3e-7)


def test_create_and_append_fill_rows_in_order():
    rows = float32(oracles.normal(0, 3, T, D))
    bank = Bank.create(rows[0], n_max=3)
    assert bank.values.shape == (3, T, D) and bank.count == 1
    np.testing.assert_array_equal(bank.values[0], rows[0])
    bank = bank.append(rows[1]).append(rows[2])
    assert bank.count == 3
    np.testing.assert_array_equal(bank.values, rows)


def test_a_bank_of_one_row():
    row = float32(oracles.normal(0, T, D))
    output = depth_attention(Bank.create(row, n_max=1), jnp.ones(D), jnp.ones(D))
    np.testing.assert_array_equal(output, row)


def test_appending_to_a_full_bank_replaces_its_last_row():
    rows = float32(oracles.normal(0, 3, T, D))
    bank = Bank.create(rows[0], n_max=2).append(rows[1]).append(rows[2])
    np.testing.assert_array_equal(bank.values, rows[jnp.array([0, 2])])
    query, gain = float32(oracles.normal(1, 2, D))
    expected = depth_attention([rows[0], rows[2]], query, gain)
    np.testing.assert_allclose(depth_attention(bank, query, gain), expected, rtol=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_full_attention_residuals_as_one_scan_over_all_layers(remat):
    # The number of sources is traced: one compiled layer serves every depth.
    n_sublayers, eps = 6, 1e-5
    parameters = float32(oracles.stack_parameters(0, n_sublayers, D, query_scale=2.0))
    embedding, cotangent = float32((oracles.normal(10, T, D), oracles.normal(11, T, D)))

    def read(bank, query, gain, norm_gain):
        return rms_norm(depth_attention(bank, query, gain, eps=eps), norm_gain, eps=eps)

    def layer(bank, p):
        hidden = read(bank, p.queries, p.gains, p.norm_gains)
        return bank.append(jnp.tanh(p.slopes[None] * hidden + p.shifts[None])), None

    def stack(embedding, p):
        layers = jax.tree.map(lambda leaf: leaf[:n_sublayers], p)
        body = jax.checkpoint(layer) if remat else layer
        bank, _ = jax.lax.scan(body, Bank.create(embedding, n_sublayers + 1), layers)
        return read(bank, p.queries[-1], p.gains[-1], p.norm_gains[-1])

    @jax.jit
    def values_and_gradients(embedding, parameters):
        hidden, pullback = jax.vjp(stack, embedding, parameters)
        return hidden, *pullback(cotangent)

    hidden, dembedding, dparameters = values_and_gradients(embedding, parameters)
    exact = oracles.float64((embedding, parameters))
    expected = oracles.stack(*exact, None, eps, eps).hidden
    right = oracles.stack_gradients(*exact, None, oracles.float64(cotangent), eps, eps)
    assert oracles.relative_error(hidden, expected) <= 1e-5
    assert oracles.relative_error(dembedding, right[0]) <= 2e-5
    for actual, one in zip(dparameters, right[1], strict=True):
        for i in range(len(one)):
            assert oracles.relative_error(actual[i], one[i]) <= 2e-5


def test_programs_of_different_counts_are_one_program():
    values, queries, gains = case()
    traces = []

    @jax.jit
    def read(values, count):
        traces.append(count)
        return depth_attention(Bank(values, count), queries[0], gains[0])

    for count in range(1, N_MAX + 1):
        read(values, jnp.int32(count))
    assert len(traces) == 1


def test_vmap_over_examples_with_their_own_counts():
    values, queries, gains = case()
    values = jnp.stack([values, 2 * values, -values])
    counts = jnp.array([1, 3, 5], jnp.int32)
    outputs = jax.vmap(lambda v, c: depth_attention(Bank(v, c), queries[0], gains[0]))(
        values, counts
    )
    for output, v, count in zip(outputs, values, counts, strict=True):
        expected = depth_attention(tuple(v[: int(count)]), queries[0], gains[0])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
