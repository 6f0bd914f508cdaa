"""Phase 1 through kernels, under jax's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_jax import ops
from pallas_kernels import chips
from pallas_kernels.inter_block import op, tiling
from tests import oracles
from tests.pallas_kernels.programs import count_launches, equations, launches

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORWARD, BACKWARD = "attnres_inter_block_forward", "attnres_inter_block_backward"
TPU = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
EPS = 1e-3
inter_block = partial(op.inter_block, eps=EPS, implementation="mosaic_tpu", interpret=True)
on_tpu = partial(op.inter_block, eps=EPS, implementation="mosaic_tpu")


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def sources(n, *shape, dtype=jnp.float32):
    return tuple(jnp.asarray((1 + i % 3) * oracles.normal(i, *shape), dtype) for i in range(n))


def queries(s, d, seed=50):
    return float32(1.5 * oracles.normal(seed, s, d) / np.sqrt(d))


def assert_near(actual, expected, tolerance, name=""):
    if actual.dtype == jnp.bfloat16:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(actual.dtype))
    error = oracles.relative_error(actual, expected)
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


def group_read(values, folded):
    """Float64 outputs, log-sum-exp and logits."""
    values, folded = oracles.float64((values, folded))
    reads = oracles.group_read(values, folded, np.ones_like(folded), eps=EPS)
    keys = [oracles.rms_norm(v, np.ones(v.shape[-1]), EPS) for v in values]
    logits = np.einsum("n...d,sd->sn...", np.stack(keys), folded)
    return [r.output for r in reads], np.stack([r.lse for r in reads]), logits


def gradients(values, folded, doutputs, dlse=None):
    """Float64 gradients to each of the values and to the folded queries."""
    values, folded, *cotangents = oracles.float64((values, folded, doutputs, dlse))
    ones = np.ones_like(folded)
    right = oracles.group_read_gradients(values, folded, ones, *cotangents, eps=EPS)
    return right.sources, right.query


# --- Values and gradients ------------------------------------------------------------------------


def test_any_token_axes_a_source_listed_twice_and_every_cotangent():
    (a, b), folded = sources(2, 2, 64, 100), queries(2, 100)
    doutputs = float32(tuple(oracles.normal(60, 2, 2, 64, 100)))
    dlse, dlogits = float32((oracles.normal(61, 2, 2, 64), oracles.normal(62, 2, 3, 2, 64)))
    dvalues = float32(tuple(oracles.normal(63, 3, 2, 64, 100)))

    @jax.jit
    def values_and_gradients(a, b, folded):
        def function(a, b, folded):
            result = on_tpu((a, b, a), folded, interpret=TPU)
            return result.outputs, result.lse, result.logits, result.values

        outputs, pullback = jax.vjp(function, a, b, folded)
        return outputs, pullback((doutputs, dlse, dlogits, dvalues))

    (outputs, lse, logits, values), (da, db, dfolded) = values_and_gradients(a, b, folded)
    right_outputs, right_lse, right_logits = group_read((a, b, a), folded)
    for actual, expected in zip(outputs, right_outputs, strict=True):
        assert_near(actual, expected, 1e-5)
    assert_near(lse, right_lse, 1e-5)
    assert_near(logits, right_logits, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, values, (a, b, a))

    right, right_folded = gradients((a, b, a), folded, doutputs, dlse)
    exact_folded, exact_dlogits = oracles.float64((folded, dlogits))
    ones = np.ones(100)
    for i, v in enumerate(oracles.float64((a, b, a))):
        dkeys = np.einsum("sbt,sd->btd", exact_dlogits[:, i], exact_folded)
        right[i] = right[i] + oracles.rms_norm_gradients(v, ones, EPS, dkeys)[0]
        right[i] += oracles.float64(dvalues[i])
        keys = oracles.rms_norm(v, ones, EPS)
        right_folded += np.einsum("sbt,btd->sd", exact_dlogits[:, i], keys)
    assert_near(da, right[0] + right[2], 2e-5, "a")
    assert_near(db, right[1], 2e-5, "b")
    assert_near(dfolded, right_folded, 2e-5, "queries")


def test_more_sources_than_fit_are_read_in_several_launches(monkeypatch):
    monkeypatch.setattr(tiling, "MAX_SOURCES", 2)
    dtype = jnp.bfloat16
    values, folded = sources(5, 7, 100, dtype=dtype), queries(2, 100)
    doutputs = tuple(jnp.asarray(oracles.normal(60 + s, 7, 100), dtype) for s in range(2))
    dlse = float32(oracles.normal(61, 2, 7))
    # Of two, two and one; the inverse RMS of the first three is known.
    known = [jax.lax.rsqrt(jnp.mean(jnp.square(v.astype(jnp.float32)), -1) + EPS) for v in values]

    @jax.jit
    def values_and_gradients(values, folded):
        def function(values, folded):
            result = inter_block(values, folded, inverse_rms=jnp.stack(known[:3]))
            return result[:2]

        outputs, pullback = jax.vjp(function, values, folded)
        return outputs, pullback((doutputs, dlse))

    (outputs, lse), (dvalues, dfolded) = values_and_gradients(values, folded)
    right_outputs, right_lse, _ = group_read(values, folded)
    for actual, expected in zip(outputs, right_outputs, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, expected, 1e-5)
    assert_near(lse, right_lse, 1e-5)
    right, right_folded = gradients(values, folded, doutputs, dlse)
    for actual, expected in zip(dvalues, right, strict=True):
        assert_near(actual, expected, 2e-5)
    assert_near(dfolded, right_folded, 2e-5)


def test_fifty_sources_are_read_in_two_launches():
    values = (jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16),) * 50
    folded = jax.ShapeDtypeStruct((2, 256), jnp.float32)

    def loss(values, folded):
        return sum(jnp.sum(o.astype(jnp.float32)) for o in on_tpu(values, folded).outputs)

    assert count_launches(jax.grad(loss, argnums=(0, 1)), values, folded) == {
        FORWARD: 2,
        BACKWARD: 2,
    }


def test_nothing_flows_back_to_the_logits_of_rows_that_do_not_count():
    values, folded = jnp.stack(sources(3, 7, 100)), queries(1, 100)
    cotangents = float32((oracles.normal(60, 1, 7), oracles.normal(61, 1, 3, 7)))

    @jax.jit
    def gradient(values, folded, count, dlogits):
        def function(values, folded):
            result = inter_block(values, folded, count=count)
            return result.lse, result.logits

        return jax.vjp(function, values, folded)[1]((cotangents[0], dlogits))

    count = jnp.int32(2)
    dvalues, dfolded = gradient(values.at[2:].set(jnp.nan), folded, count, cotangents[1])
    right, right_folded = gradient(values, folded, count, cotangents[1].at[:, 2:].set(0.0))
    np.testing.assert_array_equal(dvalues, right)
    np.testing.assert_array_equal(dfolded, right_folded)
    np.testing.assert_array_equal(dvalues[2], np.zeros((7, 100)))
    assert np.linalg.norm(dvalues[:2]) > 1


@pytest.mark.parametrize("bank", [False, True])
def test_zero_tokens(bank):
    values = jnp.zeros((3, 2, 0, 16), jnp.bfloat16)
    count = jnp.int32(2) if bank else None
    if not bank:
        values = tuple(values)

    def function(values, folded):
        return on_tpu(values, folded, count=count)

    result, pullback = jax.vjp(function, values, jnp.ones((4, 16)))
    assert [x.shape for x in result.outputs] == [(2, 0, 16)] * 4
    assert result.lse.shape == (4, 2, 0) and result.logits.shape == (4, 3, 2, 0)
    assert result.inverse_rms.shape == (3, 2, 0)
    dvalues, dfolded = pullback(result)
    assert [(x.shape, x.dtype) for x in dvalues] == [((2, 0, 16), jnp.bfloat16)] * 3
    np.testing.assert_array_equal(dfolded, np.zeros((4, 16)))


# --- What the gradient's program consists of -----------------------------------------------------


WIDE = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)
FOLDED = jax.ShapeDtypeStruct((3, 256), jnp.float32)


def loss(values, folded, read=on_tpu):
    result = read(values, folded)
    wide = sum(jnp.sum(jnp.sin(o.astype(jnp.float32))) for o in result.outputs)
    return wide + jnp.sum(jnp.sin(result.lse))


def test_values_and_gradients_are_computed_by_kernels():
    values = (WIDE,) * 3
    assert count_launches(loss, values, FOLDED) == {FORWARD: 1}
    both = {FORWARD: 1, BACKWARD: 1}
    assert count_launches(jax.grad(loss, argnums=(0, 1)), values, FOLDED) == both
    assert count_launches(jax.value_and_grad(loss), values, FOLDED) == both

    def of_bank(values, folded, count):
        return loss(values, folded, partial(on_tpu, count=count))

    bank = jax.ShapeDtypeStruct((3, *WIDE.shape), WIDE.dtype)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    assert count_launches(jax.jit(jax.grad(of_bank)), bank, FOLDED, count) == both


def test_forward_mode_is_refused():
    values, folded = sources(2, 7, 16), queries(1, 16)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .* custom_vjp"):
        jax.jvp(lambda folded: inter_block(values, folded).lse, (folded,), (folded,))


def test_saved_statistics_and_outputs_spare_the_forward_kernel():
    def sublayer(values, folded):
        return loss([jnp.sin(v) for v in values], folded, lambda v, f: on_tpu(tuple(v), f))

    def count(policy):
        remat = jax.checkpoint(sublayer, policy=policy)
        return count_launches(jax.value_and_grad(remat, argnums=(0, 1)), [WIDE] * 3, FOLDED)

    names = jax.checkpoint_policies.save_only_these_names(op.STATISTICS_NAME, op.OUTPUT_NAME)
    assert count(names) == {FORWARD: 1, BACKWARD: 1}
    assert count(jax.checkpoint_policies.nothing_saveable) == {FORWARD: 2, BACKWARD: 1}
    # Either of the two by itself is not enough.
    for name in (op.STATISTICS_NAME, op.OUTPUT_NAME):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        assert count(policy) == {FORWARD: 2, BACKWARD: 1}


def test_names_are_those_of_the_library():
    assert (op.STATISTICS_NAME, op.OUTPUT_NAME) == (ops.STATISTICS_NAME, ops.OUTPUT_NAME)


def read_twice(values, first, second, pass_on):
    one = on_tpu(values, first)
    following, known = (one.values, one.inverse_rms) if pass_on else (values, None)
    two = on_tpu(following, second, inverse_rms=known)
    return sum(jnp.sum(jnp.sin(o.astype(jnp.float32))) for o in (*one.outputs, *two.outputs))


@pytest.mark.parametrize("pass_on", [False, True])
def test_gradients_of_later_reads_are_added_to_in_place(pass_on):
    values = (WIDE,) * 3
    gradient = jax.grad(partial(read_twice, pass_on=pass_on), argnums=(0, 1, 2))
    backward = [
        e.params["input_output_aliases"]
        for e in launches(gradient, values, FOLDED, FOLDED)
        if e.params["name"] == BACKWARD
    ]
    # The last read is differentiated first, and its gradients are the first's to add to.
    second, first = backward
    assert second == () and [output for _, output in first] == ([0, 1, 2] if pass_on else [])
    sums = [
        e.outvars[0].aval.shape
        for e in equations(jax.make_jaxpr(gradient)(values, FOLDED, FOLDED))
        if e.primitive.name == "add_any" and e.outvars[0].aval.size >= 128 * 256
    ]
    assert len(sums) == (0 if pass_on else 3)


# --- Transformations -----------------------------------------------------------------------------


def test_reading_what_a_read_returns_is_reading_the_sources():
    values, first, second = sources(2, 128, 100), queries(1, 100), queries(2, 100, seed=51)

    @jax.jit
    def value_and_gradients(values, first, second):
        def loss(values, first, second):
            one = inter_block(values, first)
            # One more source, whose inverse RMS is not known.
            following = (*one.values, one.outputs[0])
            two = inter_block(following, second, inverse_rms=one.inverse_rms)
            return sum(jnp.sum(jnp.sin(o)) for o in (*one.outputs, *two.outputs))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(values, first, second)

    loss, (dvalues, dfirst, dsecond) = value_and_gradients(values, first, second)
    (one,), *_ = group_read(values, first)
    two, *_ = group_read((*values, one), second)
    assert float(loss) == pytest.approx(np.sin(one).sum() + sum(np.sin(o).sum() for o in two))
    (*right, done), right_second = gradients((*values, one), second, [np.cos(o) for o in two])
    more, right_first = gradients(values, first, [done + np.cos(one)])
    for actual, a, b in zip(dvalues, right, more, strict=True):
        assert_near(actual, a + b, 2e-5)
    assert_near(dfirst, right_first, 2e-5)
    assert_near(dsecond, right_second, 2e-5)


@pytest.mark.parametrize("batched", ["sources", "sources and queries"])
def test_vmap_equals_a_loop(batched):
    batch, s, t, d = 3, 1, 5, 16
    values = tuple(oracles.normal(i, batch, t, d) for i in range(2))
    folded = oracles.normal(50, batch, s, d) / 2
    doutputs = (oracles.normal(60, batch, t, d),)
    values, folded, doutputs = float32((values, folded, doutputs))
    axes = (0 if "sources" in batched else None, 0 if "queries" in batched else None)
    given = (
        jax.tree.map(lambda x: x if axes[0] == 0 else x[0], values),
        folded if axes[1] == 0 else folded[0],
    )

    def values_and_gradients(values, folded, doutputs):
        outputs, pullback = jax.vjp(lambda *xs: inter_block(*xs).outputs, values, folded)
        return outputs, pullback(doutputs)

    outputs, (dvalues, dfolded) = jax.jit(jax.vmap(values_and_gradients, in_axes=(*axes, 0)))(
        *given, doutputs
    )
    for b in range(batch):
        one = (
            [v[b if axes[0] == 0 else 0] for v in values],
            folded[b if axes[1] == 0 else 0],
        )
        right_outputs, *_ = group_read(*one)
        assert_near(outputs[0][b], right_outputs[0], 1e-5)
        right, right_folded = gradients(*one, [doutputs[0][b]])
        for actual, expected in zip(dvalues, right, strict=True):
            assert_near(actual[b], expected, 2e-5)
        assert_near(dfolded[b], right_folded, 2e-5)


def test_vmap_over_examples_with_their_own_counts():
    t, d = 5, 16
    banks, folded = float32((oracles.normal(0, 3, 3, t, d), oracles.normal(50, 1, d) / 2))
    counts = jnp.array([1, 2, 3], jnp.int32)
    filled = jnp.arange(3)[None, :] < counts[:, None]
    dirty = jnp.where(filled[:, :, None, None], banks, jnp.nan)

    def total(bank, folded, count):
        (output,), lse, *_ = inter_block(bank, folded, count=count)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

    gradient = jax.vmap(jax.grad(total, argnums=(0, 1)), in_axes=(0, None, 0))
    dbanks, dfolded = jax.jit(gradient)(dirty, folded, counts)
    for b in range(3):
        values = list(banks[b, : b + 1])
        (output,), *_ = group_read(values, folded)
        right, right_folded = gradients(values, folded, [np.cos(output)], np.ones((1, t)))
        for i, expected in enumerate(right):
            assert_near(dbanks[b, i], expected, 2e-5)
        assert_near(dfolded[b], right_folded, 2e-5)
    np.testing.assert_array_equal(jnp.where(filled[:, :, None, None], 0.0, dbanks), 0 * banks)


def test_full_attention_residuals_as_one_scan_over_all_layers():
    n_sublayers, t, d = 3, 5, 16
    parameters = float32(oracles.stack_parameters(0, n_sublayers, d, query_scale=2.0))
    embedding, cotangent = float32((oracles.normal(10, t, d), oracles.normal(11, t, d)))

    def read(bank, query, gain, norm_gain):
        folded = (query * gain)[None]
        (output,), *_ = inter_block(bank.values, folded, count=bank.count)
        return ops.rms_norm(output, norm_gain, eps=EPS)

    def layer(bank, p):
        hidden = read(bank, p.queries, p.gains, p.norm_gains)
        return bank.append(jnp.tanh(p.slopes[None] * hidden + p.shifts[None])), None

    @jax.jit
    def values_and_gradients(embedding, parameters):
        def stack(embedding, p):
            layers = jax.tree.map(lambda leaf: leaf[:n_sublayers], p)
            bank, _ = jax.lax.scan(
                jax.checkpoint(layer), ops.Bank.create(embedding, n_sublayers + 1), layers
            )
            last = ops.depth_attention(bank, p.queries[-1], p.gains[-1], eps=EPS)
            return ops.rms_norm(last, p.norm_gains[-1], eps=EPS)

        hidden, pullback = jax.vjp(stack, embedding, parameters)
        return hidden, *pullback(cotangent)

    hidden, dembedding, dparameters = values_and_gradients(embedding, parameters)
    exact = oracles.float64((embedding, parameters))
    right = oracles.stack_gradients(*exact, None, oracles.float64(cotangent), EPS, EPS)
    assert_near(hidden, oracles.stack(*exact, None, EPS, EPS).hidden, 1e-5)
    assert_near(dembedding, right[0], 2e-5)
    for name, actual in dparameters._asdict().items():
        assert_near(actual, getattr(right[1], name), 2e-5, name)


# --- What does not fit ---------------------------------------------------------------------------


def test_what_the_kernels_cannot_read():
    def reason(values, s=1, name="mosaic_tpu"):
        return op.unsupported(values, s, name)

    wide = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    assert reason((wide,) * 3) is None
    assert reason((wide,) * 129) is None  # in several launches
    half = jax.ShapeDtypeStruct((128, 256), jnp.float16)
    assert "float16" in reason((half,) * 3)
    bank = jnp.zeros((tiling.MAX_SOURCES + 1, 1, 1))
    assert f"{tiling.MAX_SOURCES} rows, got {tiling.MAX_SOURCES + 1}" in reason(bank)
    assert reason(bank[:-1]) is None
    huge = jax.ShapeDtypeStruct((128, 2**20), jnp.bfloat16)
    assert "width 1048576" in reason((huge,) * 3, 2)
    nothing = jax.ShapeDtypeStruct((0, 2**20), jnp.bfloat16)
    assert reason((nothing,) * 3) is None


def test_a_launch_that_does_not_fit_is_refused_before_compilation(monkeypatch):
    monkeypatch.setattr(chips, "current", lambda: chips.Chip(2**16, 128, 1))
    with pytest.raises(ValueError, match=r"no tile of 2 sources, 3 reads and width 256 fits"):
        jax.eval_shape(on_tpu, (WIDE,) * 2, FOLDED)


def test_a_given_tile_is_taken():
    tile = tiling.Tiling(32, 128, 256, 2, 2**25, 128)
    (launch,) = launches(partial(on_tpu, tiling=tile), (WIDE,) * 2, FOLDED)
    assert launch.params["grid_mapping"].grid == (1, 2, 4)
    assert launch.params["compiler_params"].vmem_limit_bytes == 2**25
