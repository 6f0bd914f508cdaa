"""Phase 2 through kernels, under jax's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_jax import ops
from pallas_kernels import chips
from pallas_kernels.merge import op
from pallas_kernels.merge.tiling import Tiling
from tests import oracles
from tests.pallas_kernels.programs import count_launches, launches

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORWARD, BACKWARD = "attnres_merge_forward", "attnres_merge_backward"
TPU = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
EPS = {"eps": 1e-3, "norm_eps": 1e-2}
on_tpu = partial(op.merge, implementation="mosaic_tpu", **EPS)
merge = partial(on_tpu, interpret=True)
NAMES = ("output", "lse", "partial_sum", "update", "query", "norm_gain")
BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def no_race(capsys):
    """The interpreter prints races and goes on."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


def primals(*shape, dtype=jnp.float32, sum_dtype=None, **without):
    """Arguments of a merge, by position; those named in `without` are None."""
    output, partial_sum, update = oracles.normal(0, 3, *shape)
    values = {
        "output": jnp.asarray(output, dtype),
        "lse": jnp.asarray(oracles.normal(1, *shape[:-1]), jnp.float32),
        "partial_sum": jnp.asarray(partial_sum, sum_dtype or dtype),
        "update": jnp.asarray(update, dtype),
        "query": jnp.asarray(2 * oracles.normal(2, shape[-1]) / np.sqrt(shape[-1]), jnp.float32),
        "norm_gain": jnp.asarray(1 + 0.3 * oracles.normal(3, shape[-1]), jnp.float32),
    }
    return tuple((values | without)[name] for name in NAMES)


def cotangents(results):
    """Of the sum, hidden and the gate."""
    return tuple(
        jnp.asarray(oracles.normal(10 + i, *x.shape), x.dtype) for i, x in enumerate(results)
    )


def assert_near(actual, expected, tolerance, name):
    if actual.dtype == BF16:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(BF16))
    error = oracles.relative_error(actual, expected)
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


def assert_matches_the_oracle(arguments, results, gradients, dresults):
    output, lse, partial_sum, update, query, norm_gain = arguments
    summed, hidden, gate = results
    parts = [x for x in (partial_sum, update) if x is not None]
    total = sum(oracles.float64(x) for x in parts).astype(np.float32)
    total = jnp.asarray(total).astype(parts[0].dtype)
    np.testing.assert_array_equal(summed, total)
    assert summed.dtype == parts[0].dtype and hidden.dtype == output.dtype
    exact = oracles.float64((output, lse, total, query, jnp.ones_like(query)))
    following = oracles.float64(norm_gain)
    right = oracles.merge(*exact, following, **EPS)
    assert_near(hidden, right.hidden, 1e-5, "hidden")
    assert_near(gate, right.gate, 1e-5, "gate")
    right = oracles.merge_gradients(*exact, *oracles.float64(dresults), following, **EPS)
    rights = right.output, right.lse, right.summed, right.summed, right.query, right.norm_gain
    for name, argument, actual, expected in zip(NAMES, arguments, gradients, rights, strict=True):
        assert (actual is None) == (argument is None)
        if actual is not None:
            assert actual.dtype == argument.dtype and actual.shape == argument.shape
            assert_near(actual, expected, 2e-5, name)


@pytest.mark.parametrize(
    "shape, options, interpret",
    [
        ((2, 3, 100), {}, True),
        ((2, 64, 100), {}, TPU),
        ((5, 130), {"partial_sum": None, "dtype": BF16}, TPU),
        ((2, 2, 2, 130), {"update": None, "norm_gain": None}, True),
        ((129, 64), {"dtype": BF16, "sum_dtype": jnp.float32}, True),
    ],
)
def test_any_token_axes_and_missing_arguments(shape, options, interpret):
    arguments = primals(*shape, **options)
    function = partial(on_tpu, interpret=interpret)
    dresults = cotangents(jax.eval_shape(function, *arguments))

    @jax.jit
    def values_and_gradients(*arguments):
        results, pullback = jax.vjp(function, *arguments)
        return results, pullback(dresults)

    assert_matches_the_oracle(arguments, *values_and_gradients(*arguments), dresults)


def test_any_one_of_the_results_can_be_differentiated():
    # The cotangents of the others are not arrays of zeros then.
    arguments = primals(3, 16)
    results = jax.jit(merge)(*arguments)
    for i, cotangent in enumerate(cotangents(results)):

        @jax.jit
        def gradient(*arguments, i=i, cotangent=cotangent):
            return jax.grad(
                lambda *xs: jnp.sum(merge(*xs)[i] * cotangent), argnums=tuple(range(6))
            )(*arguments)

        dresults = tuple(cotangent if k == i else jnp.zeros_like(x) for k, x in enumerate(results))
        assert_matches_the_oracle(arguments, results, gradient(*arguments), dresults)


@pytest.mark.parametrize("batched", ["rows", "vectors"])
def test_vmap_equals_a_loop(batched):
    batch = 3
    arguments = primals(batch, 5, 16)
    vectors = tuple(jnp.stack([(1 + 0.5 * i) * v for i in range(batch)]) for v in arguments[4:])
    if batched == "rows":
        given, axes = arguments, (0, 0, 0, 0, None, None)
    else:
        given, axes = (*(x[0] for x in arguments[:4]), *vectors), (None,) * 4 + (0, 0)
    dresults = tuple(
        jnp.asarray(oracles.normal(10 + i, batch, 5, *width), jnp.float32)
        for i, width in enumerate([(16,), (16,), ()])
    )

    def values_and_gradients(dresults, *arguments):
        results, pullback = jax.vjp(merge, *arguments)
        return results, pullback(dresults)

    results, gradients = jax.jit(jax.vmap(values_and_gradients, in_axes=(0, *axes)))(
        dresults, *given
    )
    for b in range(batch):
        one = [x if axis is None else x[b] for x, axis in zip(given, axes, strict=True)]
        trees = jax.tree.map(lambda x, b=b: x[b], (results, gradients, dresults))
        assert_matches_the_oracle(one, *trees)


@pytest.mark.parametrize("norm_gain", [jnp.ones(16), None])
def test_zero_tokens(norm_gain):
    rows, lse = jnp.zeros((2, 0, 16), BF16), jnp.zeros((2, 0))
    arguments = rows, lse, rows.astype(jnp.float32), rows, jnp.ones(16), norm_gain
    results, pullback = jax.vjp(on_tpu, *arguments)
    assert [(x.shape, x.dtype) for x in results] == [
        ((2, 0, 16), jnp.float32),
        ((2, 0, 16), BF16),
        ((2, 0), jnp.float32),
    ]
    gradients = pullback(results)
    jax.tree.map(lambda x, g: np.testing.assert_array_equal(0 * x, g), arguments, gradients)
    assert [g.dtype for g in jax.tree.leaves(gradients)] == [
        x.dtype for x in jax.tree.leaves(arguments)
    ]


# --- What the gradient's program consists of -----------------------------------------------------


def loss(*arguments):
    summed, hidden, gate = on_tpu(*arguments)
    total = jnp.sin(summed.astype(jnp.float32)) + jnp.sin(hidden.astype(jnp.float32))
    return jnp.sum(total) + jnp.sum(jnp.sin(gate))


def test_values_and_gradients_are_computed_by_kernels():
    arguments = primals(2, 128, 256, dtype=BF16)
    assert count_launches(loss, *arguments) == {FORWARD: 1}
    every = tuple(range(6))
    both = {FORWARD: 1, BACKWARD: 1}
    assert count_launches(jax.value_and_grad(loss, argnums=every), *arguments) == both
    assert count_launches(jax.jit(jax.grad(loss, argnums=(4,))), *arguments) == both


def test_saved_names_spare_the_forward_kernel():
    arguments = primals(2, 128, 256, dtype=BF16)

    def sublayer(*arguments):
        rows = [jnp.sin(x) for x in arguments[:4]]
        return loss(*rows, *arguments[4:])

    def count(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        remat = jax.checkpoint(sublayer, policy=policy)
        return count_launches(jax.value_and_grad(remat, argnums=tuple(range(6))), *arguments)

    every = op.STATISTICS_NAME, op.OUTPUT_NAME, op.PARTIAL_SUM_NAME
    assert count() == {FORWARD: 2, BACKWARD: 1}
    assert count(*every[1:]) == {FORWARD: 2, BACKWARD: 1}
    assert count(*every) == {FORWARD: 1, BACKWARD: 1}


def test_names_are_those_of_the_library():
    assert op.STATISTICS_NAME == ops.STATISTICS_NAME
    assert op.OUTPUT_NAME == ops.OUTPUT_NAME
    assert op.PARTIAL_SUM_NAME == ops.PARTIAL_SUM_NAME


def test_forward_mode_is_refused():
    arguments = primals(3, 16)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .* custom_vjp"):
        jax.jvp(lambda q: merge(*arguments[:4], q, None)[1], (arguments[4],), (arguments[4],))


# --- What does not fit ---------------------------------------------------------------------------


def test_what_the_kernels_cannot_merge():
    def reason(dtype, sum_dtype, width=256, tokens=128, name="mosaic_tpu"):
        rows = (jax.ShapeDtypeStruct((tokens, width), x) for x in (dtype, sum_dtype))
        return op.unsupported(*rows, name)

    for dtype in (BF16, jnp.float32):
        for sum_dtype in (BF16, jnp.float32):
            assert reason(dtype, sum_dtype) is None
    assert "float16" in reason(jnp.float16, jnp.float32)
    assert "float16" in reason(BF16, jnp.float16)
    assert "width 1048576" in reason(BF16, BF16, width=2**20)
    assert reason(BF16, BF16, width=2**20, tokens=0) is None


def test_the_tile_is_planned_for_the_wider_dtype(monkeypatch):
    monkeypatch.setattr(chips, "current", lambda: chips.Chip(16 * 2**20, 128, 1))

    def tokens(**options):
        (launch,) = launches(on_tpu, *primals(8, 128, 1024, **options))
        return launch.params["grid_mapping"].grid

    assert tokens(dtype=BF16, sum_dtype=jnp.float32) == tokens(dtype=jnp.float32)
    assert tokens(dtype=BF16) != tokens(dtype=jnp.float32)


def test_a_given_tile_is_taken():
    arguments = primals(2, 256, 256)
    tile = Tiling(128, 2**25)
    for launch in launches(jax.grad(lambda *xs: on_tpu(*xs, tiling=tile)[1].sum()), *arguments):
        assert np.prod(launch.params["grid_mapping"].grid) == 4
        assert launch.params["compiler_params"].vmem_limit_bytes == 2**25
