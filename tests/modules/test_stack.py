"""Every form of a stack, two-phase and direct, held to the float64 oracle and to each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from attnres_jax import AttentionResidual, AttentionResidualStack, depth_attention, rms_norm
from attnres_jax.ops.block import BlockState
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D = 2, 3, 8

# Sub-layers, block size (None: one source for each output), reads that share a first phase.
CASES = [
    (1, 4, None),
    (4, 1, None),
    (3, 1, 2),
    (5, 3, 2),
    (4, 8, 1),
]


class Sublayer(nnx.Module):
    """The oracle's sub-layer with its own norm inside: `tanh(slope * rms_norm(x) + shift)`."""

    def __init__(self, norm_gain, slope, shift):
        self.norm_gain, self.slope, self.shift = map(nnx.Param, (norm_gain, slope, shift))

    def __call__(self, x):
        normed = rms_norm(x, self.norm_gain[...], eps=1e-6)
        shape = (1,) * (x.ndim - 1) + (-1,)
        return jnp.tanh(self.slope[...].reshape(shape) * normed + self.shift[...].reshape(shape))


def sublayers_of(parameters):
    rows = zip(parameters.norm_gains, parameters.slopes, parameters.shifts, strict=False)
    return tuple(Sublayer(*row) for row in rows)


def direct_form(embedding, parameters, block_size, sublayers):
    """Every read attends to all its sources at once; no phases."""
    finished, opened, results = [embedding], [], []
    for i, sublayer in enumerate(sublayers):
        sources = [*finished, sum(opened)] if opened else finished
        opened.append(
            sublayer(depth_attention(sources, parameters.queries[i], parameters.gains[i]))
        )
        results.append(opened[-1])
        if len(opened) == block_size:
            finished, opened = [*finished, sum(opened)], []
    sources = [*finished, sum(opened)] if opened else finished
    return depth_attention(sources, parameters.queries[-1], parameters.gains[-1])


def two_phase_form(embedding, parameters, block_size, sublayers, reads_per_group=None):
    stack = AttentionResidualStack(
        sublayers, D, block_size=block_size, reads_per_group=reads_per_group
    )
    stack.reads.query[...] = parameters.queries[:-1]
    stack.reads.gain[...] = parameters.gains[:-1]
    stack.final_read.query[...] = parameters.queries[-1]
    stack.final_read.gain[...] = parameters.gains[-1]
    return stack(embedding)


def read_and_write_form(embedding, parameters, block_size, sublayers):
    state = BlockState.create(embedding, block_size=block_size)
    for i, sublayer in enumerate([*sublayers, None]):
        read = AttentionResidual(D)
        read.query[...], read.gain[...] = parameters.queries[i], parameters.gains[i]
        hidden = read(state.sources)
        if sublayer is None:
            return hidden
        state = state.write(sublayer(hidden))


FORMS = {
    "two-phase": two_phase_form,
    "direct": direct_form,
    "read and write": read_and_write_form,
}


def case(num_sublayers, query_scale=1.5):
    embedding = oracles.normal(7, B, T, D)
    parameters = oracles.stack_parameters(11, num_sublayers, D, query_scale)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (embedding, parameters))


def values_and_gradients(form, embedding, parameters, cotangent):
    def function(embedding, parameters):
        hidden = form(embedding, parameters, sublayers=sublayers_of(parameters))
        return rms_norm(hidden, parameters.norm_gains[-1], eps=1e-6)

    value, pullback = jax.vjp(function, embedding, parameters)
    return value, pullback(cotangent)


def assert_matches_the_oracle(actual, embedding, parameters, block_size, cotangent, name):
    value, (dembedding, dparameters) = actual
    exact = oracles.float64((embedding, parameters))
    expected = oracles.stack(*exact, block_size).hidden
    grads = oracles.stack_gradients(*exact, block_size, oracles.float64(cotangent))
    assert oracles.relative_error(value, expected) <= 1e-5, name
    assert oracles.relative_error(dembedding, grads[0]) <= 2e-5, f"{name}: embedding"
    for field, got, want in zip(parameters._fields, dparameters, grads[1], strict=True):
        assert oracles.relative_error(got, want) <= 2e-5, f"{name}: {field}"


@pytest.mark.parametrize("num_sublayers, block_size, reads_per_group", CASES)
def test_all_forms_match_the_oracle_in_value_and_every_gradient(
    num_sublayers, block_size, reads_per_group
):
    embedding, parameters = case(num_sublayers)
    cotangent = jnp.asarray(oracles.normal(13, B, T, D), jnp.float32)
    grouped = functools.partial(two_phase_form, reads_per_group=reads_per_group)
    forms = FORMS | {"two-phase": grouped}

    @jax.jit
    def run(embedding, parameters):
        return {
            name: values_and_gradients(
                functools.partial(form, block_size=block_size), embedding, parameters, cotangent
            )
            for name, form in forms.items()
        }

    for name, actual in run(embedding, parameters).items():
        assert_matches_the_oracle(actual, embedding, parameters, block_size, cotangent, name)
        if block_size == 1:  # Full, whose sources the oracle lists without any blocks.
            assert_matches_the_oracle(actual, embedding, parameters, None, cotangent, name)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow_through_the_block_sum_that_the_final_read_selects(form):
    # With the final read on source 1 alone, nothing else carries a gradient to the first block.
    num_sublayers, block_size = 4, 2
    embedding, parameters = case(num_sublayers)
    embedding = embedding[:1, :2]
    parameters = parameters._replace(gains=jnp.ones_like(parameters.gains))
    outputs = oracles.stack(*oracles.float64((embedding, parameters)), block_size).outputs
    sources = np.stack([outputs[0], outputs[1] + outputs[2], outputs[3] + outputs[4]])
    keys = oracles.rms_norm(sources, np.ones(D), 1e-6).reshape(-1, D)
    # Logits of 10 for source 1 and of 0 for the others, at both tokens.
    wanted = np.repeat([0.0, 10.0, 0.0], 2)
    query = jnp.asarray(np.linalg.lstsq(keys, wanted)[0], jnp.float32)
    parameters = parameters._replace(queries=parameters.queries.at[-1].set(query))
    weights = oracles.stack(*oracles.float64((embedding, parameters)), block_size).reads[-1].weights
    assert weights[1].min() > 0.99, "the query of this test must select source 1"
    cotangent = jnp.asarray(oracles.normal(13, *embedding.shape), jnp.float32)
    run = jax.jit(
        functools.partial(
            values_and_gradients, functools.partial(FORMS[form], block_size=block_size)
        )
    )
    actual = run(embedding, parameters, cotangent)
    assert_matches_the_oracle(actual, embedding, parameters, block_size, cotangent, form)
    _, (dembedding, dparameters) = actual
    assert np.abs(dembedding).max() > 0
    assert np.abs(dparameters.slopes[:2]).max() > 0


class Scale(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(jnp.asarray(scale))

    def __call__(self, x):
        return self.scale[...] * jnp.tanh(x)

    def halved(self, x):
        return self(x) / 2


def test_modules_functions_partials_and_methods_mix_as_sublayers():
    sublayers = (
        Scale(2.0),
        jnp.sin,
        functools.partial(jnp.roll, shift=1, axis=-1),
        lambda x: x * x,
        Scale(3.0).halved,
    )
    embedding, parameters = case(len(sublayers))
    stack = AttentionResidualStack(sublayers, D, block_size=2)
    graphdef, params = nnx.split(stack, nnx.Param)
    expected, actual = jax.jit(
        lambda params, embedding: (
            direct_form(embedding, parameters, 2, sublayers),
            two_phase_form(embedding, parameters, 2, sublayers),
        )
    )(params, embedding)
    assert oracles.relative_error(actual, expected) <= 1e-5
    assert nnx.to_pure_dict(params)["sublayers"][0]["scale"].shape == ()
    hidden = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, embedding)
    assert hidden.shape == embedding.shape


def new_stack(**kwargs):
    _, parameters = case(5)
    return AttentionResidualStack(sublayers_of(parameters), D, **{"block_size": 2} | kwargs)


def test_a_new_stack_has_zero_queries_and_unit_gains():
    stack = new_stack()
    assert stack.reads.query.shape == stack.reads.gain.shape == (5, D)
    for reads in (stack.reads, stack.final_read):
        assert (reads.query[...] == 0).all()
        assert (reads.gain[...] == 1).all()
        assert reads.query.dtype == reads.gain.dtype == jnp.float32


def test_a_stack_holds_parameters_only_and_calling_it_twice_changes_nothing():
    stack = new_stack()
    before = nnx.state(stack)
    assert all(isinstance(leaf, nnx.Param) for _, leaf in nnx.to_flat_state(before))
    before = jax.tree.map(np.array, before)
    graphdef = nnx.graphdef(stack)
    embedding, _ = case(5)

    @jax.jit
    def twice(params):
        stack = nnx.merge(graphdef, params)
        first, second = stack(embedding), stack(embedding)
        assert nnx.graphdef(stack) == graphdef
        return first, second, nnx.state(stack)

    first, second, after = twice(nnx.state(stack))
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    stack(embedding)
    assert nnx.graphdef(stack) == graphdef
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(stack))


def test_depth_weights_change_nothing_and_sum_to_one():
    embedding, parameters = case(5)
    stack = AttentionResidualStack(sublayers_of(parameters), D, block_size=2)
    stack.reads.query[...] = parameters.queries[:-1]
    stack.final_read.query[...] = parameters.queries[-1]
    graphdef, params = nnx.split(stack, nnx.Param)

    @jax.jit
    def run(params):
        stack = nnx.merge(graphdef, params)
        return stack(embedding), *stack(embedding, return_weights=True)

    hidden, hidden_beside_weights, weights = run(params)
    np.testing.assert_array_equal(hidden, hidden_beside_weights)
    exact = parameters._replace(gains=jnp.ones_like(parameters.gains))
    reads = oracles.stack(*oracles.float64((embedding, exact)), 2).reads
    for got, read in zip(weights, reads, strict=True):
        np.testing.assert_allclose(got.sum(0), 1, rtol=1e-6)
        np.testing.assert_allclose(got, read.weights, atol=2e-6)


def test_a_read_of_one_source_is_that_source_and_its_query_gets_no_gradient():
    read = AttentionResidual(D)
    graphdef, params = nnx.split(read, nnx.Param)
    params["query"][...] = jnp.asarray(oracles.normal(3, D), jnp.float32)
    source = jnp.asarray(oracles.normal(4, B, T, D), jnp.float32)

    def loss(params, source):
        return (nnx.merge(graphdef, params)((source,)) * jnp.sin(source)).sum()

    np.testing.assert_array_equal(nnx.merge(graphdef, params)((source,)), source)
    grads, dsource = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, source)
    assert (grads["query"][...] == 0).all() and (grads["gain"][...] == 0).all()
    np.testing.assert_allclose(dsource, np.sin(source) + source * np.cos(source), rtol=1e-5)


def test_a_read_keeps_the_raw_scale_of_its_sources_and_divides_by_no_width():
    # Logits are sqrt(width) and 0: the exact weights would show a 1/sqrt(width) in them.
    width = 256
    read = AttentionResidual(width)
    read.query[...] = jnp.zeros(width).at[0].set(0.125)
    sources = [jnp.zeros((1, width)).at[0, i].set(5.0) for i in (0, 1)]
    hidden, weights = read(sources, return_weights=True)
    alpha = 1 / (1 + np.exp(-0.125 * 16))
    np.testing.assert_allclose(weights[:, 0], [alpha, 1 - alpha], rtol=1e-5)
    np.testing.assert_allclose(hidden[0, :2], [5 * alpha, 5 * (1 - alpha)], rtol=1e-5)


@pytest.mark.parametrize("form", ["read", "stack"])
def test_eps_reaches_every_read(form):
    # Sources far below eps have keys near zero, whatever the query: the weights are even.
    embedding = 1e-3 * jnp.ones((1, 1, D))
    if form == "read":
        read = AttentionResidual(D, eps=1e6)
        read.query[...] = 100 * jnp.ones(D)
        weights = [read((embedding, -embedding), return_weights=True)[1]]
    else:
        stack = AttentionResidualStack([jnp.negative] * 3, D, block_size=2, eps=1e6)
        stack.reads.query[...] = 100 * jnp.ones((3, D))
        stack.final_read.query[...] = 100 * jnp.ones(D)
        weights = stack(embedding, return_weights=True)[1]
    for one in weights:
        np.testing.assert_allclose(one, 1 / len(one), rtol=1e-3)


def test_gradients_of_a_split_stack_are_the_same_on_devices_that_share_a_batch():
    embedding, _ = case(5)
    batch = jnp.concatenate([embedding, 2 * embedding, -embedding, embedding + 1])
    graphdef, params = nnx.split(new_stack(), nnx.Param)

    def loss(params, batch):
        return jnp.square(nnx.merge(graphdef, params)(batch)).sum()

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local_gradients(params, batch):
        return jax.lax.psum(
            jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), batch), "data"
        )

    sharded = jax.jit(
        jax.shard_map(local_gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    )
    expected = jax.jit(jax.grad(loss))(params, batch)
    actual = sharded(params, batch)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(actual))


def test_the_program_of_a_stack_keeps_no_float32_copies_of_its_sources():
    # Twelve sub-layers in blocks of three: sources, phase-1 outputs, partial sums, outputs.
    width, num_sublayers, tokens = 64, 12, 32
    stack = AttentionResidualStack([jnp.tanh] * num_sublayers, width, block_size=3)
    graphdef, params = nnx.split(stack, nnx.Param)
    embedding = jax.ShapeDtypeStruct((2, tokens, width), jnp.bfloat16)

    def pullback_of(params, embedding):
        return jax.vjp(lambda p, x: nnx.merge(graphdef, p)(x), params, embedding)[1]

    kept = [x for x in jax.tree.leaves(jax.eval_shape(pullback_of, params, embedding))]
    wide = [x for x in kept if np.prod(x.shape) >= 2 * tokens * width]
    assert {(x.shape, x.dtype.name) for x in wide} == {((2, tokens, width), "bfloat16")}
    # Five sources, and per sub-layer its phase-1 output, input, tanh and partial sum.
    assert len(wide) <= 5 + 4 * num_sublayers
    narrow = [x for x in kept if x.shape[:1] != () and np.prod(x.shape) < 2 * tokens * width]
    assert sum(np.prod(x.shape) for x in narrow if tokens in x.shape) <= 2 * tokens * (
        num_sublayers * (2 * 5 + 6)
    )
