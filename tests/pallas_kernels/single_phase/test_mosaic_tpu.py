"""TPU kernels of a single read in both of Pallas's interpreters, held to the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.merge.tiling import Tiling
from pallas_kernels.single_phase import mosaic_tpu
from pallas_kernels.single_phase.tiling import choose_tiling, tile_bytes
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The second simulates the memories of a TPU: unwritten memory is NaN, and reading what is not
# there, or what is being written, is an error.
INTERPRETERS = [
    pytest.param(True, id="hlo"),
    pytest.param(
        pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
        ),
        id="tpu",
    ),
]
MIB = 2**20


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def assert_near(actual, expected, name):
    error = oracles.relative_error(actual, expected)
    if actual.dtype == jnp.float32:
        tolerance = 1e-5 if name in ("summed", "hidden", "weights") else 2e-5
    else:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(actual.dtype))
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


def expected_read(sources, folded, norm_gain, eps, norm_eps):
    """Hidden and weights; with gains of one, the folded query is the query."""
    output, _, weights = oracles.read(sources, folded, np.ones_like(folded), eps)
    if norm_gain is not None:
        output = oracles.rms_norm(output, norm_gain, norm_eps)
    return output, weights


def expected_gradients(sources, folded, norm_gain, dhidden, dweights, eps, norm_eps):
    """To each source, to the query and to the gain of the norm."""
    ones, dnorm_gain = np.ones_like(folded), None
    if norm_gain is not None:
        output = oracles.read(sources, folded, ones, eps).output
        dhidden, dnorm_gain = oracles.rms_norm_gradients(output, norm_gain, norm_eps, dhidden)
    grads = oracles.read_gradients(sources, folded, ones, dhidden, dweights=dweights, eps=eps)
    return grads.sources, grads.query, dnorm_gain


@pytest.mark.parametrize("interpret", INTERPRETERS)
@pytest.mark.parametrize(
    "n, t, d, dtype, sum_dtype, options",
    [
        (2, 129, 130, jnp.float32, jnp.float32, {}),
        (2, 256, 144, jnp.bfloat16, jnp.bfloat16, {}),  # two tiles: one for each half of the sums
        (1, 129, 100, jnp.bfloat16, jnp.bfloat16, {"with_norm": False}),
        (1, 7, 130, jnp.bfloat16, jnp.float32, {"with_dweights": False, "accumulate": False}),
        (2, 7, 100, jnp.float16, jnp.float16, {"with_partial": False, "accumulate": False}),
        (1, 1, 1, jnp.float32, jnp.float32, {"with_update": False, "norm_eps": 0.1}),
    ],
)
def test_kernels_match_the_oracle(n, t, d, dtype, sum_dtype, options, interpret):
    norm_eps, eps = options.get("norm_eps", 1e-5), 1e-3
    settings = {"tiling": Tiling(128), "interpret": interpret}
    values = tuple(jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(n))
    parts = [
        jnp.asarray(oracles.normal(11, t, d), sum_dtype),
        jnp.asarray(oracles.normal(12, t, d), dtype),
    ]
    for i, name in enumerate(("with_partial", "with_update")):
        parts[i] = parts[i] if options.get(name, True) else None
    folded = float32(2 * oracles.normal(13, d) / np.sqrt(d))
    norm_gain = float32(1 + 0.3 * oracles.normal(14, d)) if options.get("with_norm", True) else None
    summed, hidden, weights, kept = mosaic_tpu.forward(
        values, *parts, folded, norm_gain, eps=eps, norm_eps=norm_eps, **settings
    )
    # The sum is rounded before it is read: the stored value is the one that counts.
    total = sum(oracles.float64(x) for x in parts if x is not None)
    np.testing.assert_array_equal(summed, jnp.asarray(total.astype(np.float32), summed.dtype))
    exact = oracles.float64(([*values, summed], folded, norm_gain))
    right = expected_read(*exact, eps, norm_eps)
    assert hidden.dtype == dtype
    assert_near(hidden, right[0], "hidden")
    assert_near(weights, right[1], "weights")

    dsummed = jnp.asarray(oracles.normal(15, t, d), summed.dtype)
    dhidden = jnp.asarray(oracles.normal(16, t, d), dtype)
    dweights = float32(oracles.normal(17, n + 1, t))
    dweights = dweights if options.get("with_dweights", True) else None
    dvalues = None
    if options.get("accumulate", True):
        dvalues = tuple(jnp.asarray(oracles.normal(20 + i, t, d), dtype) for i in range(n))
    cotangents = oracles.float64((dhidden, dweights))
    before = oracles.float64([*(dvalues or [np.zeros((t, d))] * n), dsummed])
    dvalues, dsum, dfolded, dnorm_gain = mosaic_tpu.backward(
        values,
        summed,
        folded,
        norm_gain,
        kept,
        dsummed,
        dhidden,
        dweights,
        dvalues=dvalues,
        **settings,
    )
    dsources = [*dvalues, dsum]
    right = expected_gradients(*exact, *cotangents, eps, norm_eps)
    assert [x.dtype for x in dsources] == [*[dtype] * n, summed.dtype]
    for i, (actual, gradient) in enumerate(zip(dsources, right[0], strict=True)):
        assert_near(actual, gradient + before[i], f"source {i}")
    assert_near(dfolded, right[1], "folded")
    assert (dnorm_gain is None) == (norm_gain is None)
    if dnorm_gain is not None:
        assert_near(dnorm_gain, right[2], "norm_gain")


def run_both(values, summed, folded, norm_gain, dsummed, dhidden, interpret=True, dvalues=None):
    """Hidden and all gradients."""
    settings = {"tiling": Tiling(128), "interpret": interpret}
    summed, hidden, _, kept = mosaic_tpu.forward(
        values, summed, None, folded, norm_gain, eps=1e-6, norm_eps=1e-6, **settings
    )
    return hidden, mosaic_tpu.backward(
        values, summed, folded, norm_gain, kept, dsummed, dhidden, dvalues=dvalues, **settings
    )


@pytest.mark.parametrize("n, dtype", [(1, jnp.float32), (2, jnp.bfloat16)])
def test_parts_that_vanish(n, dtype):
    # Logits of 1e4, 0 and -1e4, or two of them, in every order: one token for each.
    d = 128
    unit = np.where(oracles.normal(0, d) > 0, 1.0, -1.0)
    directions = {1e4: unit, 0.0: unit * np.repeat([1.0, -1.0], d // 2), -1e4: -unit}
    orders = list(itertools.permutations(directions, n + 1))
    sources = [
        jnp.asarray([2 * directions[order[i]] for order in orders], dtype) for i in range(n + 1)
    ]
    folded, t = float32(unit * 1e4 / d), len(orders)
    dhidden, zeros = jnp.asarray(oracles.normal(1, t, d), dtype), jnp.zeros((t, d), dtype)
    *values, summed = sources
    hidden, (dvalues, dsum, dfolded, _) = run_both(
        tuple(values), summed, folded, None, zeros, dhidden
    )
    for i, gradient in enumerate((*dvalues, dsum)):
        kept = np.array([order[i] == max(order) for order in orders])[:, None]
        np.testing.assert_array_equal(hidden[kept[:, 0]], sources[i][kept[:, 0]])
        np.testing.assert_array_equal(gradient, jnp.where(kept, dhidden, zeros))
    np.testing.assert_array_equal(dfolded, np.zeros(d))


def test_gradients_where_one_weight_is_nearly_one():
    # The sources lie along the query, against it, or across it, whichever way round: logits of
    # about 9, -9 and 0.
    t, d, n = 6, 64, 2
    direction = oracles.normal(0, d)
    direction /= np.sqrt(np.mean(direction**2))
    along = np.array(list(itertools.permutations((1.0, 0.0, -1.0)))).T  # [n + 1, t]
    noise = 0.3 * oracles.normal(1, n + 1, t, d)
    sources = float32(list(along[..., None] * direction + noise))
    folded, norm_gain = float32((9 * direction / d, oracles.normal(2, d)))
    dsummed, dhidden = float32(tuple(oracles.normal(3, 2, t, d)))
    *values, summed = sources
    _, (dvalues, dsum, *_) = run_both(tuple(values), summed, folded, norm_gain, dsummed, dhidden)
    exact = oracles.float64((sources, folded, norm_gain))
    weights = expected_read(*exact, 1e-6, 1e-6)[1]
    assert 1 - weights.max() < 1e-3 and weights.min() < 1e-6
    for token in range(t):  # One by one, because they differ in size by factors of a million.
        one = slice(token, token + 1)
        right, *_ = expected_gradients(
            [x[one] for x in exact[0]], *exact[1:], oracles.float64(dhidden)[one], None, 1e-6, 1e-6
        )
        right[n] = right[n] + oracles.float64(dsummed)[one]
        for i, actual in enumerate((*dvalues, dsum)):
            assert_near(actual[one], right[i], f"source {i} of token {token}")


def test_a_token_that_is_nan_stays_alone_and_repeats_are_identical():
    t, d, dtype = 130, 40, jnp.bfloat16
    *rows, dsummed, dhidden = (jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(5))
    vectors = float32([oracles.normal(5, d) / 4, oracles.normal(6, d)])
    run = jax.jit(lambda *rows: run_both(rows[:2], rows[2], *vectors, *rows[3:]))
    clean = run(*rows, dsummed, dhidden)
    jax.tree.map(np.testing.assert_array_equal, clean, run(*rows, dsummed, dhidden))
    rows = [x.at[70 + i].set(jnp.nan) for i, x in enumerate(rows)]
    hidden, (dvalues, dsum, *_) = run(*rows, dsummed, dhidden.at[3].set(jnp.nan))
    others = np.delete(np.arange(t), [3, 70, 71, 72])
    before = clean[0], *clean[1][0], clean[1][1]
    for actual, expected in zip((hidden, *dvalues, dsum), before, strict=True):
        np.testing.assert_array_equal(actual[others], expected[others])


def test_zero_tokens():
    rows, vector = jnp.zeros((0, 16), jnp.bfloat16), jnp.ones(16)
    hidden, (dvalues, *grads) = run_both((rows, rows), rows, vector, vector, rows, rows, False)
    assert hidden.shape == (0, 16)
    assert [g.shape for g in (*dvalues, *grads)] == [(0, 16)] * 3 + [(16,)] * 2
    np.testing.assert_array_equal(grads[1], np.zeros(16))


@pytest.mark.parametrize("accumulate", [False, True])
def test_launches_are_named_priced_and_reuse_memory(accumulate):
    t, d, n = 256, 384, 2
    rows = jax.ShapeDtypeStruct((t, d), jnp.bfloat16)
    vector, values = jax.ShapeDtypeStruct((d,), jnp.float32), (rows,) * n
    jaxpr = jax.make_jaxpr(lambda *arguments: run_both(*arguments[:-1], dvalues=arguments[-1]))(
        values, rows, vector, vector, rows, rows, values if accumulate else None
    )
    found = {e.params["name"]: e.params for e in jaxpr.eqns if e.primitive.name == "pallas_call"}
    assert set(found) == {"attnres_single_phase_forward", "attnres_single_phase_backward"}
    backward = found["attnres_single_phase_backward"]
    aliases = dict(backward["input_output_aliases"])
    assert aliases == ({4: 2, 5: 0, 6: 1} if accumulate else {4: 2})
    # Forward one row fewer than with both a partial sum and an update, and the sum not written.
    counts = {
        "attnres_single_phase_forward": n + 2,
        "attnres_single_phase_backward": (3 if accumulate else 2) * n + 4,
    }
    for name, n_rows in counts.items():
        moved = found[name]["cost_estimate"].bytes_accessed
        besides = 4 * 20 * t + 4 * 40 * d
        assert n_rows * t * d * 2 <= moved <= n_rows * t * d * 2 + besides


@pytest.mark.parametrize("kind, n_rows", [("forward", 6), ("backward", 10)])
def test_tiles_fit_and_come_out_even(kind, n_rows):
    for vmem, d, t in itertools.product((64, 128), (1, 1168, 2048, 2304, 7168), (1, 129, 8192)):
        tiling = choose_tiling(kind, 2, t, d, jnp.bfloat16, vmem_bytes=vmem * MIB)
        assert tiling is not None and 128 <= tiling.tokens <= max(128, t + 127)
        windows = 2 * n_rows * tiling.tokens * d * 2
        assert windows <= tile_bytes(kind, tiling.tokens, 2, d, jnp.bfloat16) <= 0.85 * vmem * MIB
        assert t != 8192 or t % tiling.tokens == 0
    assert choose_tiling(kind, 2, 8192, 10**6, jnp.bfloat16, vmem_bytes=64 * MIB) is None
