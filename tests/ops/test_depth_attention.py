"""One read of a tuple of sources, held to the float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.ops import depth_attention
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@partial(jax.jit, static_argnames="eps")
def read_and_gradients(sources, query_d, gain_d, cotangents, eps=1e-6):
    function = partial(depth_attention, eps=eps, return_weights=True)
    outputs, pullback = jax.vjp(function, sources, query_d, gain_d)
    return outputs, pullback(cotangents)


def case(n, shape, dtype=jnp.float32, query_scale=2.0):
    """Sources of unlike scales, a query that makes uneven weights, a gain that is not one."""
    width = shape[-1]
    sources = [jnp.asarray((1 + i % 3) * oracles.normal(i, *shape), dtype) for i in range(n)]
    query = jnp.asarray(query_scale * oracles.normal(100, width) / np.sqrt(width), dtype)
    gain = jnp.asarray(1 + 0.3 * oracles.normal(101, width), dtype)
    doutput = jnp.asarray(oracles.normal(102, *shape), dtype)
    dweights = jnp.asarray(oracles.normal(103, n, *shape[:-1]), jnp.float32)
    return sources, query, gain, doutput, dweights


def assert_matches_oracle(sources, query, gain, doutput, dweights=None, eps=1e-6):
    if dweights is None:
        dweights = jnp.zeros((len(sources), *doutput.shape[:-1]))
    (output, weights), grads = read_and_gradients(sources, query, gain, (doutput, dweights), eps)
    inputs = oracles.float64((sources, query, gain))
    expected = oracles.read(*inputs, eps=eps)
    dexpected = oracles.read_gradients(
        *inputs, oracles.float64(doutput), dweights=oracles.float64(dweights), eps=eps
    )
    assert oracles.relative_error(output, expected.output) <= 1e-5
    assert oracles.relative_error(weights, expected.weights) <= 1e-5
    for i in range(len(sources)):
        assert oracles.relative_error(grads[0][i], dexpected.sources[i]) <= 2e-5, f"source {i}"
    assert oracles.relative_error(grads[1], dexpected.query) <= 2e-5, "query"
    assert oracles.relative_error(grads[2], dexpected.gain) <= 2e-5, "gain"


@pytest.mark.parametrize("width", [1, 7, 96, 100, 384, 1000, 7168])
def test_any_width(width):
    assert_matches_oracle(*case(3, (7, width)))


@pytest.mark.parametrize("shape", [(96,), (129, 96), (2, 1, 2, 5)])
def test_any_token_axes(shape):
    assert_matches_oracle(*case(4, shape))


@pytest.mark.parametrize(
    "n, width", [(1, 1), (1, 4096), (2, 96), (5, 123), (9, 1024), (8, 8192), (33, 257)]
)
def test_any_number_of_sources(n, width):
    assert_matches_oracle(*case(n, (2, width), query_scale=1.0))


def test_many_sources():
    sources, query, gain, *_ = case(65, (2, 257))
    output, weights = depth_attention(sources, query, gain, return_weights=True)
    expected = oracles.read(*oracles.float64((sources, query, gain)))
    assert oracles.relative_error(output, expected.output) <= 1e-5
    assert oracles.relative_error(weights, expected.weights) <= 1e-5


@pytest.mark.parametrize("n, width", [(3, 4096), (15, 7186)])
def test_unscaled_random_query_in_float16(n, width):
    # Logits have standard deviation sqrt(d), about 85 at the wider: most tokens saturate.
    sources, query, gain, doutput, _ = case(n, (9, width), jnp.float16, np.sqrt(width))
    dweights = jnp.zeros((n, 9))
    (output, weights), grads = read_and_gradients(sources, query, gain, (doutput, dweights))
    inputs = oracles.float64((sources, query, gain))
    expected = oracles.read(*inputs)
    dexpected = oracles.read_gradients(*inputs, oracles.float64(doutput))
    for actual, right in [
        (output, expected.output),
        (weights, expected.weights),
        (jnp.stack(grads[0]), np.stack(dexpected.sources)),
        (grads[1], dexpected.query),
        (grads[2], dexpected.gain),
    ]:
        assert oracles.relative_error(actual, right) <= 0.005


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_eps_is_added_inside_the_root_mean_square(eps):
    # Of sources as small as sqrt(eps), so that the place of eps decides the logits.
    sources, query, gain, doutput, dweights = case(3, (7, 32), query_scale=4.0)
    small = [np.float32(np.sqrt(eps)) * source for source in sources]
    assert_matches_oracle(small, query, gain, doutput, dweights, eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_sources_stay_finite(dtype):
    sources, query, gain, doutput, dweights = case(3, (7, 32), dtype)
    sources[1] = jnp.zeros_like(sources[1])
    outputs, grads = read_and_gradients(sources, query, gain, (doutput, dweights))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((outputs, grads)))
    if dtype == jnp.float32:
        assert_matches_oracle(sources, query, gain, doutput, dweights)


def test_logit_is_not_divided_by_the_root_of_the_width():
    # w = u, v = c u with a unit vector u: RMSNorm(v) = sqrt(d) u, so the logit is sqrt(d) = 16.
    unit = jnp.zeros(256).at[3].set(1.0)
    _, weights = depth_attention(
        [5 * unit, -2 * unit], unit, jnp.ones(256), eps=1e-12, return_weights=True
    )
    np.testing.assert_allclose(weights[1] / weights[0], np.exp(-32.0), rtol=1e-5)


def test_values_are_not_normalised():
    sources = [jnp.full((4,), 10.0), jnp.full((4,), 30.0)]
    output = depth_attention(sources, jnp.zeros(4), jnp.ones(4))
    np.testing.assert_allclose(output, np.full(4, 20.0), rtol=1e-6)


def test_weights_have_the_sources_first_and_sum_to_one_over_them():
    # Four sizes, no two alike: a softmax over any other axis cannot pass.
    sources, query, gain, *_ = case(4, (2, 3, 8))
    output, weights = depth_attention(sources, query, gain, return_weights=True)
    assert weights.shape == (4, 2, 3) and weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(0), np.ones((2, 3)), atol=1e-6)
    assert (weights >= 0).all()
    weighted = np.einsum("nbt,nbtd->btd", weights, np.stack(sources))
    np.testing.assert_allclose(output, weighted, rtol=1e-5, atol=1e-5)


def test_output_is_a_convex_combination():
    sources, query, gain, *_ = case(5, (6, 8), query_scale=20.0)
    output = depth_attention(sources, query, gain)
    stacked = np.stack(sources)
    assert (output <= stacked.max(0) + 1e-5).all() and (output >= stacked.min(0) - 1e-5).all()
    norms = np.linalg.norm(stacked, axis=-1)
    assert (np.linalg.norm(output, axis=-1) <= norms.max(0) + 1e-5).all()


def test_permuting_sources_permutes_weights_and_gradients():
    sources, query, gain, doutput, dweights = case(5, (2, 3, 16))
    order = np.array([3, 0, 4, 1, 2])
    (output, weights), grads = read_and_gradients(sources, query, gain, (doutput, dweights))
    (output_p, weights_p), grads_p = read_and_gradients(
        [sources[i] for i in order], query, gain, (doutput, dweights[order])
    )
    assert oracles.relative_error(output_p, output) <= 1e-6
    assert oracles.relative_error(weights_p, weights[order]) <= 1e-6
    for i, j in enumerate(order):
        assert oracles.relative_error(grads_p[0][i], grads[0][j]) <= 2e-6
    for actual, expected in zip(grads_p[1:], grads[1:], strict=True):
        assert oracles.relative_error(actual, expected) <= 2e-6


@pytest.mark.parametrize("dtype, jit", [*[(dtype, True) for dtype in DTYPES], (DTYPES[0], False)])
def test_one_source_is_the_identity_and_its_query_gets_no_gradient(dtype, jit):
    (source,), query, gain, doutput, dweights = case(1, (2, 5, 16), dtype, query_scale=50.0)

    def function(source, query, gain):
        return depth_attention([source], query, gain, return_weights=True)

    run = jax.jit(function) if jit else function
    (output, weights), pullback = jax.vjp(run, source, query, gain)
    dsource, dquery, dgain = pullback((doutput, dweights))
    np.testing.assert_array_equal(output, source)
    np.testing.assert_array_equal(weights, np.ones((1, 2, 5)))
    np.testing.assert_array_equal(dsource, doutput)
    np.testing.assert_array_equal(dquery, np.zeros(16))
    np.testing.assert_array_equal(dgain, np.zeros(16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 7])
def test_zero_query_weighs_every_source_alike(n, dtype):
    sources, _, gain, *_ = case(n, (2, 3, 16), dtype)
    query = jnp.zeros(16, dtype)
    output, weights = depth_attention(sources, query, gain, return_weights=True)
    np.testing.assert_allclose(weights, np.full((n, 2, 3), 1 / n), rtol=3e-7)
    mean = np.mean(oracles.float64(sources), axis=0)
    # The mean and not the sum; rounded once.
    assert oracles.relative_error(output, mean) <= max(
        1e-6, 1.05 * oracles.rounding_floor(mean, np.dtype(dtype))
    )


def test_zero_query_still_gets_a_gradient_and_the_gain_gets_none():
    sources, query, gain, doutput, dweights = case(4, (5, 16))
    zero = jnp.zeros_like(query)
    assert_matches_oracle(sources, zero, gain, doutput, dweights)
    _, grads = read_and_gradients(sources, zero, gain, (doutput, dweights))
    assert np.linalg.norm(grads[1]) > 0.1
    np.testing.assert_array_equal(grads[2], np.zeros(16))


def test_gain_and_query_are_not_interchanged():
    # Their product decides the value, but each gradient carries the other as its factor.
    sources, query, gain, doutput, dweights = case(4, (5, 16))
    query = query.at[0].set(0.0)
    assert_matches_oracle(sources, query, gain, doutput, dweights)
    assert_matches_oracle(sources, gain, query, doutput, dweights)
    _, grads = read_and_gradients(sources, query, gain, (doutput, dweights))
    assert grads[2][0] == 0 and grads[1][0] != 0


def test_folding_the_gain_into_the_query_changes_nothing():
    sources, query, gain, *_ = case(4, (5, 16))
    separate = depth_attention(sources, query, gain, eps=1e-5)
    folded = depth_attention(sources, query * gain, jnp.ones(16), eps=1e-5)
    assert oracles.relative_error(folded, separate) <= 1e-6


@pytest.mark.parametrize("gap, dominant", [(4, 0), (8, 2), (12, 0), (16, 2)])
def test_gradients_where_one_weight_is_nearly_one(gap, dominant):
    # The dominant logit leads by about `gap`. The query's gradient is then of the order of
    # exp(-gap): differences from the dominant source must not be taken between rounded sums.
    width = 64
    unit = oracles.normal(50, width)
    unit /= np.linalg.norm(unit)
    sources = [oracles.normal(i, 7, width) for i in range(3)]
    sources = [v - (v @ unit)[:, None] * unit for v in sources]
    sources[dominant] += 10 * unit
    leading = np.mean(np.sum(unit * oracles.rms_norm(sources[dominant], 1.0, 1e-6), -1))
    query = unit * gap / leading
    case32 = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        (sources, query, np.ones(width), oracles.normal(51, 7, width)),
    )
    assert_matches_oracle(*case32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit", [20.0, 128.0, 1e4])
def test_saturated_softmax_selects_the_source_and_routes_its_gradient(logit, dtype):
    # exp overflows above 11.1 in float16 and 88.7 in float32.
    width = 256
    unit = np.where(oracles.normal(0, width) > 0, 1.0, -1.0)
    sources = [jnp.asarray(s * unit * np.ones((3, 1)), dtype) for s in (-3.0, 2.0, -1.0)]
    query = jnp.asarray(unit * logit / width, dtype)
    gain = jnp.ones(width, dtype)
    doutput = jnp.asarray(oracles.normal(1, 3, width), dtype)
    (output, weights), (dsources, dquery, dgain) = read_and_gradients(
        sources, query, gain, (doutput, jnp.zeros((3, 3)))
    )
    np.testing.assert_array_equal(output, sources[1])
    np.testing.assert_allclose(weights[1], np.ones(3), rtol=1e-7)
    # The other weights are at most exp(-40): no trace is left beside the cotangent.
    np.testing.assert_array_equal(dsources[1], doutput)
    for x in (dsources[0], dsources[2], dquery, dgain):
        np.testing.assert_allclose(oracles.float64(x), np.zeros(x.shape), atol=1e-12)


def test_logit_of_128_from_a_query_of_norm_two():
    width = 4096
    direction = oracles.normal(0, width)
    direction /= np.linalg.norm(direction)
    sources = [oracles.normal(i, 3, width) for i in range(1, 4)]
    sources[2] = 50 * direction + np.zeros((3, 1))
    inputs = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        (sources, 2 * direction, np.ones(width), oracles.normal(9, 3, width)),
    )
    (output, weights), grads = read_and_gradients(*inputs[:3], (inputs[3], jnp.zeros((3, 3))))
    assert oracles.relative_error(output, inputs[0][2]) <= 1e-7
    assert oracles.relative_error(grads[0][2], inputs[3]) <= 1e-7
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((weights, grads)))


@pytest.mark.parametrize("logit", [100.0, 1e4])
def test_equal_large_logits_share_the_weight(logit):
    # The log-sum-exp of float32 logits of 1e4 is rounded to steps of 1e-3, the weights are not.
    source = jnp.ones((2, 64))
    query = jnp.full((64,), logit / 64)
    output, weights = depth_attention(
        [source, -source, source], query, jnp.ones(64), return_weights=True
    )
    np.testing.assert_allclose(output, source, rtol=1e-6)
    np.testing.assert_allclose(weights, [[0.5] * 2, [0.0] * 2, [0.5] * 2], rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_source_that_is_listed_twice_gets_both_contributions(jit):
    (first, second, _), query, gain, doutput, _ = case(3, (2, 3, 16))

    def aliased(first, second, query, gain):
        # `second` is its own source and a term of another: storage shared in both ways.
        return depth_attention([first, second, first, first + second], query, gain)

    run = jax.jit(aliased) if jit else aliased
    output, pullback = jax.vjp(run, first, second, query, gain)
    grads = pullback(doutput)
    a, b, w, g, u = oracles.float64((first, second, query, gain, doutput))
    sources = [a, b, a, np.asarray(first + second, np.float64)]
    expected = oracles.read_gradients(sources, w, g, u)
    d = expected.sources
    assert oracles.relative_error(output, oracles.read(sources, w, g).output) <= 1e-5
    rights = (d[0] + d[2] + d[3], d[1] + d[3], expected.query, expected.gain)
    for actual, right in zip(grads, rights, strict=True):
        assert oracles.relative_error(actual, right) <= 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_sources_give_that_source(dtype):
    source = jnp.asarray(oracles.normal(0, 3, 16), dtype)
    output = depth_attention([source] * 5, jnp.ones(16, dtype), jnp.ones(16, dtype))
    np.testing.assert_allclose(oracles.float64(output), oracles.float64(source), rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, parameter_dtype",
    [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)],
)
def test_dtypes_of_values_and_gradients(dtype, parameter_dtype):
    sources, query, gain, doutput, dweights = case(3, (2, 8), dtype)
    query, gain = query.astype(parameter_dtype), gain.astype(parameter_dtype)
    (output, weights), grads = read_and_gradients(sources, query, gain, (doutput, dweights))
    assert output.dtype == dtype and weights.dtype == jnp.float32
    assert [g.dtype for g in grads[0]] == [dtype] * 3
    assert grads[1].dtype == grads[2].dtype == parameter_dtype


def test_large_float16_sources_are_squared_in_float32():
    # 300**2 overflows float16; 1e-4**2 underflows it.
    for scale in (300.0, 1e-4):
        source = jnp.full((2, 16), scale, jnp.float16)
        query, gain = jnp.full((16,), 0.1, jnp.float16), jnp.ones(16, jnp.float16)
        _, weights = depth_attention([source, -source], query, gain, eps=0.0, return_weights=True)
        expected = oracles.read(
            oracles.float64([source, -source]), oracles.float64(query), np.ones(16), eps=0.0
        )
        assert oracles.relative_error(weights, expected.weights) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_gradients_are_bit_identical_over_repeats(dtype):
    arguments = case(5, (64, 128), dtype)
    cotangents = arguments[3:]
    runs = [read_and_gradients(*arguments[:3], cotangents)[1] for _ in range(5)]
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, runs[0])


def test_only_the_wanted_gradient_can_be_taken():
    sources, query, gain, doutput, _ = case(3, (2, 8))

    def loss(sources, query, gain):
        return jnp.vdot(depth_attention(sources, query, gain), doutput)

    everything = jax.grad(loss, argnums=(0, 1, 2))(sources, query, gain)
    for i in range(3):
        one = jax.grad(loss, argnums=i)(sources, query, gain)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, everything[i]
        )
    # One source of several.
    one = jax.grad(lambda v: loss([sources[0], v, sources[2]], query, gain))(sources[1])
    np.testing.assert_allclose(one, everything[0][1], rtol=1e-5, atol=1e-6)


def test_list_and_tuple_of_sources_are_the_same():
    sources, query, gain, *_ = case(3, (2, 8))
    np.testing.assert_array_equal(
        depth_attention(sources, query, gain), depth_attention(tuple(sources), query, gain)
    )
