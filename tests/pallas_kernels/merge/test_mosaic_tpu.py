"""Phase-2 TPU kernels, run by both of Pallas's interpreters, held to the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import token_tiles
from pallas_kernels.merge import mosaic_tpu
from pallas_kernels.merge.tiling import Tiling, choose_tiling, tile_bytes
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
        tolerance = 1e-5 if name in ("summed", "hidden", "gate") else 2e-5
    else:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(actual.dtype))
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


def test_parts_of_two_factors_multiply_to_the_float32_product():
    x_t, y_d = (jnp.asarray(oracles.normal(i, 1, 128), jnp.float32) for i in range(2))
    left = token_tiles.bfloat16_parts(x_t, token_tiles.LEFT)
    right = token_tiles.bfloat16_parts(y_d, token_tiles.RIGHT)
    assert left.dtype == right.dtype == jnp.bfloat16
    product_td = oracles.float64(left).T @ oracles.float64(right)
    expected_td = oracles.float64(x_t).T * oracles.float64(y_d)
    np.testing.assert_allclose(product_td, expected_td, rtol=2**-23)


@pytest.mark.parametrize("interpret", INTERPRETERS)
@pytest.mark.parametrize(
    "t, d, dtype, sum_dtype, options",
    [
        (129, 300, jnp.float32, jnp.float32, {}),
        (256, 400, jnp.bfloat16, jnp.bfloat16, {}),  # two tiles: one for each half of the sums
        (129, 144, jnp.bfloat16, jnp.bfloat16, {"with_norm": False}),
        (300, 144, jnp.bfloat16, jnp.float32, {"with_dgate": False, "tokens": 256}),
        # From three registers of tokens on, each is added up while the one before is read.
        (390, 144, jnp.bfloat16, jnp.bfloat16, {"tokens": 512}),
        (384, 100, jnp.float32, jnp.float32, {"with_norm": False, "tokens": 384}),
        (7, 100, jnp.float16, jnp.float16, {"with_partial": False}),
        (1, 1, jnp.float32, jnp.float32, {"with_update": False, "norm_eps": 0.1}),
    ],
)
def test_kernels_match_the_oracle(t, d, dtype, sum_dtype, options, interpret):
    options = {"norm_eps": 1e-5, "tokens": 128} | options
    eps, norm_eps = 1e-3, options["norm_eps"]
    tiling = Tiling(options["tokens"])
    output, update = (jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(2))
    partial_sum = jnp.asarray(oracles.normal(2, t, d), sum_dtype)
    parts = [
        partial_sum if options.get("with_partial", True) else None,
        update if options.get("with_update", True) else None,
    ]
    lse = float32(oracles.normal(3, t))
    folded = float32(2 * oracles.normal(4, d) / np.sqrt(d))
    norm_gain = float32(1 + 0.3 * oracles.normal(6, d)) if options.get("with_norm", True) else None
    summed, hidden, gate, kept = mosaic_tpu.forward(
        output,
        lse,
        *parts,
        folded,
        norm_gain,
        eps=eps,
        norm_eps=norm_eps,
        tiling=tiling,
        interpret=interpret,
    )
    # The sum is rounded before it is read: the stored value is the one that counts.
    total = sum(oracles.float64(x) for x in parts if x is not None)
    total = jnp.asarray(total.astype(np.float32)).astype(summed.dtype)
    np.testing.assert_array_equal(summed, total)
    exact = oracles.float64((output, lse, total, folded, jnp.ones(d)))
    following = oracles.float64(norm_gain)
    expected = oracles.merge(*exact, following, eps=eps, norm_eps=norm_eps)
    assert hidden.dtype == dtype
    assert_near(hidden, expected.hidden, "hidden")
    assert_near(gate, expected.gate, "gate")

    dsummed = jnp.asarray(oracles.normal(8, t, d), summed.dtype)
    dhidden = jnp.asarray(oracles.normal(9, t, d), dtype)
    dgate = float32(oracles.normal(10, t)) if options.get("with_dgate", True) else None
    *grads, dnorm_gain = mosaic_tpu.backward(
        output,
        summed,
        folded,
        norm_gain,
        kept,
        dsummed,
        dhidden,
        dgate,
        tiling=tiling,
        interpret=interpret,
    )
    right = oracles.merge_gradients(
        *exact,
        *oracles.float64((dsummed, dhidden, dgate)),
        norm_gain=following,
        eps=eps,
        norm_eps=norm_eps,
    )
    assert [x.dtype for x in grads] == [dtype, jnp.float32, summed.dtype, jnp.float32]
    # With gains of one, the gradient of folded is that of the query.
    for name, actual in zip(("output", "lse", "summed", "query"), grads, strict=True):
        assert_near(actual, getattr(right, name), name)
    assert (dnorm_gain is None) == (norm_gain is None)
    if dnorm_gain is not None:
        assert_near(dnorm_gain, right.norm_gain, "norm_gain")


def run_both(output, lse, summed, folded, norm_gain, dsummed, dhidden, interpret=True):
    """Hidden and all gradients."""
    summed, hidden, _, kept = mosaic_tpu.forward(
        output,
        lse,
        summed,
        None,
        folded,
        norm_gain,
        eps=1e-6,
        norm_eps=1e-6,
        tiling=Tiling(128),
        interpret=interpret,
    )
    return hidden, mosaic_tpu.backward(
        output,
        summed,
        folded,
        norm_gain,
        kept,
        dsummed,
        dhidden,
        tiling=Tiling(128),
        interpret=interpret,
    )


@pytest.mark.parametrize("interpret", INTERPRETERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_vanishing_part(dtype, interpret):
    # Four tokens: logits of 1e4 against -1e4 and 0, each way round.
    t, d = 4, 128
    unit = np.where(oracles.normal(0, d) > 0, 1.0, -1.0)
    finished = np.array([1e4, -1e4, 1e4, 0.0])
    unfinished = np.array([-1e4, 1e4, 0.0, 1e4])
    across = unit * np.repeat([1.0, -1.0], d // 2)
    direction = np.where(unfinished[:, None] == 0, across, np.sign(unfinished)[:, None] * unit)
    summed = jnp.asarray(2 * direction, dtype)
    output, dhidden = (jnp.asarray(oracles.normal(i, t, d), dtype) for i in (1, 2))
    folded = float32(unit * 1e4 / d)
    zeros = jnp.zeros_like(summed)
    hidden, (doutput, dlse, dsum, dfolded, _) = run_both(
        output, float32(finished), summed, folded, None, zeros, dhidden, interpret
    )
    kept = finished > unfinished
    np.testing.assert_array_equal(hidden, jnp.where(kept[:, None], output, summed))
    np.testing.assert_array_equal(doutput, jnp.where(kept[:, None], dhidden, zeros))
    np.testing.assert_array_equal(dsum, jnp.where(kept[:, None], zeros, dhidden))
    np.testing.assert_array_equal(dlse, np.zeros(t))
    np.testing.assert_array_equal(dfolded, np.zeros(d))


def test_gradients_of_a_nearly_closed_or_open_gate():
    t, d = 4, 16
    output, summed = float32([oracles.normal(i, t, d) for i in range(2)])
    folded, norm_gain = float32([oracles.normal(2, d) / 4, oracles.normal(4, d)])
    exact = oracles.float64((output, summed, folded, jnp.ones(d)))
    gate = oracles.merge(exact[0], 0 * exact[0][:, 0], *exact[1:]).gate
    lse = float32(np.log(gate / (1 - gate)) - np.array([-16, -8, 8, 16]))
    cotangents = float32(tuple(oracles.normal(5, 2, t, d)))
    _, grads = run_both(output, lse, summed, folded, norm_gain, *cotangents)
    for i in range(t):  # One by one, because the four differ in size by factors of a million.
        right = oracles.merge_gradients(
            exact[0][i : i + 1],
            oracles.float64(lse)[i : i + 1],
            exact[1][i : i + 1],
            *exact[2:],
            *(x[i : i + 1] for x in oracles.float64(cotangents)),
            norm_gain=oracles.float64(norm_gain),
        )
        for name, actual in zip(("output", "lse", "summed"), grads, strict=False):
            assert_near(actual[i : i + 1], getattr(right, name), f"{name} of token {i}")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_that_is_nan_stays_alone_and_repeats_are_identical(dtype):
    t, d = 130, 144
    output, summed, dsummed, dhidden = (
        jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(4)
    )
    vectors = float32([oracles.normal(4, d) / 4, oracles.normal(5, d)])
    lse = float32(oracles.normal(6, t))
    run = jax.jit(lambda *rows: run_both(rows[0], lse, rows[1], *vectors, *rows[2:]))
    clean = run(output, summed, dsummed, dhidden)
    jax.tree.map(np.testing.assert_array_equal, clean, run(output, summed, dsummed, dhidden))
    hidden, (doutput, dlse, dsum, *_) = run(
        output, summed.at[70].set(jnp.nan), dsummed, dhidden.at[3].set(jnp.nan)
    )
    others = np.delete(np.arange(t), [3, 70])
    before = clean[0], *clean[1][:3]
    for actual, expected in zip((hidden, doutput, dlse, dsum), before, strict=True):
        np.testing.assert_array_equal(actual[others], expected[others])


def test_zero_tokens():
    rows, scalars, vector = jnp.zeros((0, 16), jnp.bfloat16), jnp.zeros(0), jnp.ones(16)
    hidden, grads = run_both(rows, scalars, rows, vector, vector, rows, rows, interpret=False)
    assert hidden.shape == (0, 16)
    assert [g.shape for g in grads] == [(0, 16), (0,), (0, 16), (16,), (16,)]
    np.testing.assert_array_equal(grads[3], np.zeros(16))


def launches(jaxpr):
    """The `pallas_call` equations of a program, by name."""
    equations = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    return {e.params["name"]: e.params for e in equations}


def test_launches_are_named_priced_and_reuse_memory():
    t, d = 256, 384
    rows, scalars = jax.ShapeDtypeStruct((t, d), jnp.bfloat16), jax.ShapeDtypeStruct((t,), "f4")
    vector = jax.ShapeDtypeStruct((d,), jnp.float32)
    jaxpr = jax.make_jaxpr(run_both)(rows, scalars, rows, vector, vector, rows, rows)
    found = launches(jaxpr)
    assert set(found) == {"attnres_merge_forward", "attnres_merge_backward"}
    (alias,) = found["attnres_merge_backward"]["input_output_aliases"]
    assert alias == (3, 2)
    # One row fewer forward than with both a partial sum and an update, which is not written.
    for name, n_rows in (("attnres_merge_forward", 3), ("attnres_merge_backward", 6)):
        moved = found[name]["cost_estimate"].bytes_accessed
        besides = 4 * 16 * t + 4 * 40 * d
        assert n_rows * t * d * 2 <= moved <= n_rows * t * d * 2 + besides


@pytest.mark.parametrize("kind, n_rows", [("forward", 5), ("backward", 6)])
def test_tiles_fit_and_come_out_even(kind, n_rows):
    for vmem, d, t in itertools.product((64, 128), (1, 1168, 2048, 2304, 7168), (1, 129, 8192)):
        tiling = choose_tiling(kind, t, d, jnp.bfloat16, vmem_bytes=vmem * MIB)
        assert tiling is not None and 128 <= tiling.tokens <= max(128, t + 127)
        windows = 2 * n_rows * tiling.tokens * d * 2
        assert windows <= tile_bytes(kind, tiling.tokens, d, jnp.bfloat16) <= 0.85 * vmem * MIB
        assert t != 8192 or t % tiling.tokens == 0
    assert choose_tiling(kind, 8192, 10**6, jnp.bfloat16, vmem_bytes=64 * MIB) is None
    given = choose_tiling(kind, 8192, 2048, jnp.bfloat16, vmem_bytes=64 * MIB, tokens=256)
    assert given is not None and given.tokens == 256


@pytest.mark.parametrize("tokens", [-128, 0, 64, 200])
def test_a_tile_that_is_no_multiple_of_128_is_refused(tokens):
    with pytest.raises(ValueError, match=f"tokens: expected a positive multiple of 128.*{tokens}"):
        choose_tiling("forward", 8192, 2048, jnp.bfloat16, vmem_bytes=64 * MIB, tokens=tokens)


def test_a_tile_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"tokens: 8192 rows of width 2048 .* pass fewer tokens"):
        choose_tiling("backward", 8192, 2048, jnp.bfloat16, vmem_bytes=64 * MIB, tokens=8192)
