"""The ops under jax's transformations: forward mode, second order, vmap, scan, remat, shard_map."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attnres_jax.ops import Bank, depth_attention, inter_block, merge
from attnres_jax.ops.depth_attention import OUTPUT_NAME, STATISTICS_NAME
from attnres_jax.ops.two_phase import PARTIAL_SUM_NAME
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, S, B, T, D = 3, 2, 2, 4, 8


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def assert_trees_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert oracles.relative_error(a, b) <= tolerance


# Each op with its oracle, as functions of the same tuple of differentiable inputs.


def direct(sources, query, gain):
    return depth_attention(sources, query, gain, return_weights=True)


def direct_oracle(sources, query, gain):
    read = oracles.read(sources, query, gain)
    return read.output, read.weights


def phase_1(sources, queries, gains):
    outputs, lse, weights = inter_block(sources, queries, gains, return_weights=True)
    return jnp.stack(outputs), lse, weights


def phase_1_oracle(sources, queries, gains):
    reads = oracles.group_read(sources, queries, gains)
    return tuple(np.stack([read[i] for read in reads]) for i in range(3))


def phase_2(output, lse, partial_sum, update, query, gain, norm_gain):
    return merge(
        output, lse, partial_sum, update, query, gain, norm_gain_d=norm_gain, return_gate=True
    )


def phase_2_oracle(output, lse, partial_sum, update, query, gain, norm_gain):
    return tuple(oracles.merge(output, lse, partial_sum + update, query, gain, norm_gain))


SOURCES = [oracles.normal(i, B, T, D) for i in range(N)]
ONE_SOURCE = SOURCES[:1]
VECTORS = (oracles.normal(10, S, D), oracles.normal(11, S, D))
DIRECT = (SOURCES, VECTORS[0][0], VECTORS[1][0])
PHASE_2 = (
    *oracles.normal(20, 1, B, T, D),
    oracles.normal(21, B, T),
    *oracles.normal(22, 2, B, T, D),
    *oracles.normal(23, 3, D),
)
OPS = {
    "direct": (direct, direct_oracle, DIRECT),
    "direct, one source": (direct, direct_oracle, (ONE_SOURCE, *DIRECT[1:])),
    "phase 1": (phase_1, phase_1_oracle, (SOURCES, *VECTORS)),
    "phase 1, one source": (phase_1, phase_1_oracle, (ONE_SOURCE, *VECTORS)),
    "phase 2": (phase_2, phase_2_oracle, PHASE_2),
}
every_op = pytest.mark.parametrize("name", OPS)


def op_case(name):
    op, oracle, inputs = OPS[name]
    return op, oracle, float32(inputs)


# --- Derivatives of first and second order -------------------------------------------------------


@pytest.mark.parametrize("name, jit", [*[(name, True) for name in OPS], ("phase 1", False)])
def test_forward_mode_matches_the_oracle_and_reverse_mode(name, jit):
    op, oracle, inputs = op_case(name)
    tangents = float32(oracles.normal_like(1, inputs))
    forward = partial(jax.jvp, op)
    outputs, doutputs = (jax.jit(forward) if jit else forward)(inputs, tangents)
    exact, exact_tangents = oracles.float64((inputs, tangents))
    assert_trees_close(outputs, oracle(*exact), 1e-5)
    expected = oracles.directional_derivative(oracle, exact, exact_tangents)
    for actual, right in zip(doutputs, expected, strict=True):
        if name.endswith("one source") and right.ndim > 1 and right.shape[-1] != D:
            # Weights of one source, whose derivative is zero, or a log-sum-exp.
            np.testing.assert_allclose(actual, right, atol=2e-5)
        else:
            assert oracles.relative_error(actual, right) <= 2e-5
    cotangents = float32(oracles.normal_like(2, outputs))

    def reverse(*inputs):
        return jax.vjp(op, *inputs)[1](cotangents)

    gradients = (jax.jit(reverse) if jit else reverse)(*inputs)
    assert oracles.inner(doutputs, cotangents) == pytest.approx(
        oracles.inner(tangents, gradients), rel=1e-5, abs=1e-4
    )


@every_op
def test_second_derivatives(name):
    # Along a direction, of the gradient: forward over reverse, reverse over reverse and reverse
    # over forward, against differences of the oracle's own differences.
    op, oracle, inputs = op_case(name)
    u = float32(oracles.normal_like(3, jax.eval_shape(op, *inputs)))
    t, r = (float32(oracles.normal_like(seed, inputs)) for seed in (4, 5))

    def loss(*inputs):
        outputs = op(*inputs)
        return sum(jnp.vdot(a, b) for a, b in zip(outputs, u, strict=True))

    def along(function, tangent):
        return lambda *inputs: jax.jvp(function, inputs, tangent)[1]

    def inner(a, b):
        return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, a, b))

    gradient = jax.grad(loss, argnums=tuple(range(len(inputs))))
    second = {
        "forward over reverse": lambda *x: inner(along(gradient, t)(*x), r),
        "reverse over reverse": lambda *x: inner(
            jax.grad(lambda *y: inner(gradient(*y), t), argnums=tuple(range(len(x))))(*x), r
        ),
        "reverse over forward": lambda *x: inner(
            jax.grad(along(loss, t), argnums=tuple(range(len(x))))(*x), r
        ),
        "forward over forward": along(along(loss, t), r),
    }

    exact, t64, r64, u64 = oracles.float64((inputs, t, r, u))

    def value(a, b):
        moved = oracles.add(oracles.add(exact, t64, a), r64, b)
        return oracles.inner(oracle(*moved), u64)

    h = 1e-3
    stencil = {-2: 1 / 12, -1: -8 / 12, 1: 8 / 12, 2: -1 / 12}
    expected = sum(
        p * q * value(a * h, b * h) / h**2 for a, p in stencil.items() for b, q in stencil.items()
    )
    for mode, function in second.items():
        assert float(jax.jit(function)(*inputs)) == pytest.approx(expected, rel=1e-4, abs=1e-4), (
            mode
        )


def test_hessian_with_respect_to_the_query_is_symmetric():
    sources, query, gain = float32(DIRECT)

    def loss(query):
        return jnp.sum(jnp.sin(depth_attention(sources, query, gain)))

    forward_over_reverse = jax.jit(jax.hessian(loss))(query)
    reverse_over_reverse = jax.jit(jax.jacrev(jax.grad(loss)))(query)
    assert np.linalg.norm(forward_over_reverse) > 0.1
    np.testing.assert_allclose(forward_over_reverse, forward_over_reverse.T, atol=1e-4)
    np.testing.assert_allclose(forward_over_reverse, reverse_over_reverse, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
@every_op
def test_forward_mode_keeps_the_dtypes(name, dtype):
    op, _, inputs = op_case(name)
    inputs = jax.tree.map(lambda x: x.astype(dtype) if x.shape[-1] == D else x, inputs)
    forward = jax.jit(partial(jax.jvp, op))
    outputs, doutputs = forward(inputs, jax.tree.map(jnp.ones_like, inputs))
    assert [x.dtype for x in doutputs] == [x.dtype for x in outputs]
    assert all(bool(jnp.isfinite(x).all()) for x in doutputs)


# --- Batching ------------------------------------------------------------------------------------


def stacked(results):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@every_op
def test_vmap_over_tokens_of_values_and_gradients_equals_a_loop(name):
    op, _, inputs = op_case(name)
    in_axes = tuple(
        jax.tree.map(
            lambda x: 0 if x.shape[0] == B and x.ndim > 1 and x.shape != (S, D) else None, x
        )
        for x in inputs
    )

    def value_and_gradient(*inputs):
        outputs, pullback = jax.vjp(op, *inputs)
        return outputs, pullback(jax.tree.map(jnp.ones_like, outputs))

    run = jax.vmap(value_and_gradient, in_axes=in_axes)
    actual = jax.jit(run)(*inputs)
    batched = [axes is not None for axes in jax.tree.leaves(in_axes, is_leaf=lambda x: x is None)]
    leaves, structure = jax.tree.flatten(inputs)
    alone = jax.jit(value_and_gradient)
    each = [
        alone(
            *structure.unflatten(
                [x[b] if yes else x for x, yes in zip(leaves, batched, strict=True)]
            )
        )
        for b in range(B)
    ]
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(stacked(each)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_vmap_over_queries_equals_a_group(size):
    sources = float32(SOURCES)
    queries, gains = float32((oracles.normal(10, size, D), oracles.normal(11, size, D)))
    batched = jax.jit(jax.vmap(depth_attention, in_axes=(None, 0, 0)))
    outputs = batched(sources, queries, gains)
    expected, _ = jax.jit(inter_block)(sources, queries, gains)
    np.testing.assert_allclose(outputs, jnp.stack(expected), rtol=1e-5, atol=1e-6)
    # The gain alone batched, with the query shared.
    batched = jax.jit(jax.vmap(depth_attention, in_axes=(None, None, 0)))
    outputs = batched(sources, queries[0], gains)
    alone = jax.jit(depth_attention)
    for output, gain in zip(outputs, gains, strict=True):
        np.testing.assert_allclose(output, alone(sources, queries[0], gain), rtol=1e-5, atol=1e-6)


def test_per_example_gradients():
    sources, query, gain = float32(DIRECT)

    def loss(query, sources):
        return jnp.sum(jnp.sin(depth_attention(sources, query, gain)))

    per_example = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(query, sources)
    assert per_example.shape == (B, D)
    np.testing.assert_allclose(
        per_example.sum(0), jax.jit(jax.grad(loss))(query, sources), rtol=1e-4, atol=1e-5
    )


# --- scan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_the_sublayers_of_a_block(remat):
    # The finished sources stay outside; the carry is the open partial sum.
    n_reads = 4
    sources = float32(SOURCES)
    queries, gains, norm_gains, slopes = float32(tuple(oracles.normal(12, 4, n_reads, D)))

    def loop(sources, queries, gains, norm_gains, slopes, *, scanned):
        outputs, lse = inter_block(sources, queries, gains)
        first = jnp.tanh(outputs[0])

        def sublayer(partial_sum, xs):
            output, lse, query, gain, norm_gain, slope = xs
            partial_sum, hidden = merge(
                output, lse, partial_sum, None, query, gain, norm_gain_d=norm_gain
            )
            return partial_sum + jnp.tanh(slope[None, None] * hidden), None

        xs = (jnp.stack(outputs), lse, queries, gains, norm_gains, slopes)
        rest = jax.tree.map(lambda x: x[1:], xs)
        if scanned:
            return jax.lax.scan(jax.checkpoint(sublayer) if remat else sublayer, first, rest)[0]
        for s in range(n_reads - 1):
            first, _ = sublayer(first, jax.tree.map(lambda x, s=s: x[s], rest))
        return first

    inputs = (sources, queries, gains, norm_gains, slopes)
    cotangent = float32(oracles.normal(13, B, T, D))

    @partial(jax.jit, static_argnames="scanned")
    def values_and_gradients(*inputs, scanned):
        outputs, pullback = jax.vjp(partial(loop, scanned=scanned), *inputs)
        return outputs, pullback(cotangent)

    actual = values_and_gradients(*inputs, scanned=True)
    expected = values_and_gradients(*inputs, scanned=False)
    assert oracles.relative_error(actual[0], expected[0]) <= 1e-6
    for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- Rematerialisation ---------------------------------------------------------------------------

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "statistics": jax.checkpoint_policies.save_only_these_names(STATISTICS_NAME),
    "outputs": jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME),
    "partial sum": jax.checkpoint_policies.save_only_these_names(PARTIAL_SUM_NAME),
    "all names": jax.checkpoint_policies.save_only_these_names(
        STATISTICS_NAME, OUTPUT_NAME, PARTIAL_SUM_NAME
    ),
}


def chain(sources, update, queries, gains):
    """Both phases with elementwise functions between, so that each named value is needed again."""
    outputs, lse = inter_block([jnp.sin(v) for v in sources], queries, gains)
    update = jnp.tanh(update + outputs[0])
    summed, hidden = merge(outputs[1], lse[1], outputs[0], update, queries[1], gains[1])
    return jnp.sum(jnp.sin(hidden) * jnp.cos(summed))


CHAIN = float32((SOURCES, oracles.normal(9, B, T, D), *VECTORS))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_under_every_checkpoint_policy(policy):
    def gradient(function):
        return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2, 3)))(*CHAIN)

    actual = gradient(jax.checkpoint(chain, policy=POLICIES[policy]))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(gradient(chain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def kept_shapes(policy):
    """Shapes that a rematerialised chain keeps beyond its inputs."""
    _, pullback = jax.vjp(jax.checkpoint(chain, policy=POLICIES[policy]), *CHAIN)
    inputs = {id(leaf) for leaf in jax.tree.leaves(CHAIN)}
    leaves = [x for x in jax.tree.leaves(pullback) if hasattr(x, "shape") and x.ndim > 0]
    inputs = jax.tree.leaves(CHAIN)
    return [
        x.shape
        for x in leaves
        if not any(x.shape == y.shape and bool((x == y).all()) for y in inputs)
    ]


def backward_primitives(policy):
    _, pullback = jax.vjp(jax.checkpoint(chain, policy=POLICIES[policy]), *CHAIN)
    return str(jax.make_jaxpr(pullback)(jnp.float32(1)))


def test_policies_save_what_they_name():
    wide = (B, T, D)
    assert kept_shapes("nothing") == []
    statistics = kept_shapes("statistics")
    assert (S, B, T) in statistics and (S, N, B, T) in statistics  # log-sum-exp, logits
    assert wide not in statistics
    # Two phase-1 outputs, and what the merge returns as far as the backward pass needs it.
    outputs = kept_shapes("outputs")
    assert outputs.count(wide) in (2, 3) and len(outputs) == outputs.count(wide)
    assert kept_shapes("partial sum") == [wide]
    assert kept_shapes("all names").count(wide) in (3, 4)


def test_saved_statistics_are_not_computed_again():
    # `rsqrt` is the root mean square of each source and of the partial sum.
    assert len(re.findall(r"\brsqrt\b", backward_primitives("nothing"))) >= N + 1
    assert len(re.findall(r"\brsqrt\b", backward_primitives("all names"))) == 0
    assert len(re.findall(r"\bdot_general\b", backward_primitives("all names"))) < len(
        re.findall(r"\bdot_general\b", backward_primitives("nothing"))
    )


# --- Sharding ------------------------------------------------------------------------------------


def mesh():
    return jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def gradient_of(op):
    def loss(*inputs):
        outputs = op(*inputs)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(outputs))

    return loss


@pytest.mark.parametrize("inside", [False, True])
@every_op
def test_shard_map_of_tokens_with_replicated_parameters(name, inside):
    # check_vma is on: the parameters' gradients must be summed over all devices by themselves.
    op, _, inputs = op_case(name)
    loss = gradient_of(op)
    arguments = tuple(range(len(inputs)))
    specs = tuple(
        jax.tree.map(lambda x: P("data", "sequence") if x.shape[:2] == (B, T) else P(), argument)
        for argument in inputs
    )
    if inside:
        # The gradient of a local loss, taken on each device.
        run = jax.shard_map(
            jax.grad(loss, argnums=arguments), mesh=mesh(), in_specs=specs, out_specs=specs
        )
    else:

        def summed(*inputs):
            return jax.lax.psum(loss(*inputs), ("data", "sequence"))

        run = jax.grad(
            jax.shard_map(summed, mesh=mesh(), in_specs=specs, out_specs=P()), argnums=arguments
        )
    actual = jax.jit(run)(*inputs)
    expected = jax.jit(jax.grad(loss, argnums=arguments))(*inputs)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_shard_map_of_a_bank_with_another_count_on_every_device():
    # As pipeline stages do: one program, each device with its own number of sources and parameters.
    n_devices = 8
    values = float32(oracles.normal(0, n_devices, 4, T, D))
    counts = jnp.array([1, 2, 3, 4, 4, 3, 2, 1], jnp.int32)
    queries, gains = float32(oracles.normal(1, 2, n_devices, D))
    devices = jax.make_mesh((n_devices,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    dirty = jnp.where(
        jnp.arange(4)[None, :, None, None] < counts[:, None, None, None], values, jnp.nan
    )

    def local(values, count, query, gain):
        def loss(values, query, gain):
            return jnp.sum(jnp.sin(depth_attention(Bank(values[0], count[0]), query[0], gain[0])))

        value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(values, query, gain)
        return value[None], grads

    run = jax.shard_map(local, mesh=devices, in_specs=P("stage"), out_specs=P("stage"))
    value, grads = jax.jit(run)(dirty, counts, queries, gains)
    alone = jax.jit(local)
    for i in range(n_devices):
        one = slice(i, i + 1)
        expected, right = alone(dirty[one], counts[one], queries[one], gains[one])
        np.testing.assert_allclose(value[one], expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(grads, right, strict=True):
            np.testing.assert_allclose(a[one], b, rtol=1e-4, atol=1e-5)
    assert bool(jnp.isfinite(grads[0]).all())


def test_shard_map_over_parameters_with_replicated_sources():
    # Each device reads the same sources with a query of its own.
    sources = float32(SOURCES)
    queries, gains = float32(oracles.normal(1, 2, 8, D))
    devices = jax.make_mesh((8,), ("reads",), axis_types=(jax.sharding.AxisType.Auto,))

    for listed in (sources, sources[:1]):

        def loss(sources, queries, gains):
            outputs, lse = inter_block(sources, queries, gains)
            total = jnp.sum(jnp.sin(outputs[0])) + jnp.sum(jnp.sin(lse))
            return jax.lax.psum(total, "reads")

        run = jax.shard_map(
            loss, mesh=devices, in_specs=(P(), P("reads"), P("reads")), out_specs=P()
        )
        actual = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(listed, queries, gains)

        def whole(sources, queries, gains):
            outputs, lse = inter_block(sources, queries, gains)
            return sum(jnp.sum(jnp.sin(o)) for o in outputs) + jnp.sum(jnp.sin(lse))

        expected = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(listed, queries, gains)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_automatic_partitioning_needs_no_gather_of_the_sources():
    sources, query, gain = float32(DIRECT)
    grid = mesh()
    sharding = jax.sharding.NamedSharding(grid, P("data", "sequence"))
    sources = [jax.device_put(v, sharding) for v in sources]
    program = jax.jit(depth_attention).lower(sources, query, gain).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute", program.as_text())
    assert program.output_shardings.spec == P("data", "sequence")
