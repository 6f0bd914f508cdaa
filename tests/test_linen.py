"""The Linen modules equal the nnx ones given the same parameters."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnres_jax
from attnres_jax import Bank, linen, rms_norm
from tests import oracles

B, T, D = 2, 3, 8


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def normal(seed, *shape):
    return float32(oracles.normal(seed, *shape))


@pytest.mark.parametrize("form", ["tuple", "bank"])
def test_a_read_equals_the_nnx_read(form):
    rows = [normal(i, B, T, D) for i in range(4)]
    # The bank has one row that is not filled.
    sources = tuple(rows[:3]) if form == "tuple" else Bank(jnp.stack(rows), jnp.int32(3))
    params = {"query": normal(5, D), "gain": normal(6, D)}
    read = attnres_jax.AttentionResidual(D, eps=0.1)
    read.query[...], read.gain[...] = params["query"], params["gain"]
    graphdef, state = nnx.split(read, nnx.Param)
    cotangent = normal(7, B, T, D)

    @jax.jit
    def run(params, state):
        actual = jax.vjp(
            lambda p: linen.AttentionResidual(eps=0.1).apply({"params": p}, sources), params
        )
        expected = jax.vjp(lambda s: nnx.merge(graphdef, s)(sources), state)
        return [(value, pullback(cotangent)[0]) for value, pullback in (actual, expected)]

    (actual, grads), (expected, expected_grads) = run(params, state)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    for name in ("query", "gain"):
        np.testing.assert_allclose(grads[name], expected_grads[name][...], rtol=1e-5, atol=1e-5)


class Sublayer(nn.Module):
    """The oracle's sub-layer with its own norm inside: `tanh(slope * rms_norm(x) + shift)`."""

    @nn.compact
    def __call__(self, x):
        ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
        norm_gain = self.param("norm_gain", ones, (D,))
        slope = self.param("slope", ones, (1, 1, D))
        shift = self.param("shift", zeros, (1, 1, D))
        return jnp.tanh(slope * rms_norm(x, norm_gain, eps=1e-6) + shift)


def params_of(parameters):
    """The oracle's parameters under the names of the Linen stack."""
    sublayers = {
        f"sublayers_{i}": {
            "norm_gain": gain,
            "slope": slope[None, None],
            "shift": shift[None, None],
        }
        for i, (gain, slope, shift) in enumerate(
            zip(parameters.norm_gains, parameters.slopes, parameters.shifts, strict=False)
        )
    }
    return sublayers | {
        "query": parameters.queries[:-1],
        "gain": parameters.gains[:-1],
        "final_read": {"query": parameters.queries[-1], "gain": parameters.gains[-1]},
    }


def new_stack(num_sublayers, block_size, **kwargs):
    sublayers = [Sublayer() for _ in range(num_sublayers)]
    return linen.AttentionResidualStack(sublayers, block_size=block_size, **kwargs)


@pytest.mark.parametrize("num_sublayers, block_size, reads_per_group", [(3, 1, None), (5, 3, 2)])
def test_a_stack_matches_the_oracle_in_value_and_every_gradient(
    num_sublayers, block_size, reads_per_group
):
    embedding = normal(1, B, T, D)
    parameters = float32(oracles.stack_parameters(2, num_sublayers, D, 1.5))
    cotangent = normal(3, B, T, D)
    stack = new_stack(num_sublayers, block_size, reads_per_group=reads_per_group)

    @jax.jit
    def run(embedding, parameters):
        def function(embedding, parameters):
            hidden = stack.apply({"params": params_of(parameters)}, embedding)
            return rms_norm(hidden, parameters.norm_gains[-1], eps=1e-6)

        value, pullback = jax.vjp(function, embedding, parameters)
        return value, pullback(cotangent)

    value, (dembedding, dparameters) = run(embedding, parameters)
    exact = oracles.float64((embedding, parameters))
    expected = oracles.stack(*exact, block_size).hidden
    assert oracles.relative_error(value, expected) <= 1e-5
    grads = oracles.stack_gradients(*exact, block_size, oracles.float64(cotangent))
    assert oracles.relative_error(dembedding, grads[0]) <= 2e-5
    for field, got, want in zip(parameters._fields, dparameters, grads[1], strict=True):
        assert oracles.relative_error(got, want) <= 2e-5, field


def test_a_stack_equals_the_nnx_stack_around_the_same_functions():
    sublayers = [jnp.tanh, jnp.sin, functools.partial(jnp.roll, shift=1, axis=-1)]
    params = {
        "query": normal(1, 3, D),
        "gain": normal(2, 3, D),
        "final_read": {"query": normal(3, D), "gain": normal(4, D)},
    }
    stack = attnres_jax.AttentionResidualStack(sublayers, D, block_size=2, eps=0.1)
    stack.reads.query[...], stack.reads.gain[...] = params["query"], params["gain"]
    stack.final_read.query[...] = params["final_read"]["query"]
    stack.final_read.gain[...] = params["final_read"]["gain"]
    embedding = normal(5, B, T, D)
    of_linen = linen.AttentionResidualStack(sublayers, block_size=2, eps=0.1)
    actual, expected = jax.jit(lambda x: (of_linen.apply({"params": params}, x), stack(x)))(
        embedding
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_init_makes_zero_queries_and_unit_gains(jit):
    init = functools.partial(new_stack(3, 2).init, jax.random.key(0))
    variables = (jax.jit(init) if jit else init)(jnp.ones((B, T, D)))
    assert variables.keys() == {"params"}
    params = variables["params"]
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == jax.tree.map(jnp.shape, params_of(oracles.stack_parameters(0, 3, D)))
    for reads in (params, params["final_read"]):
        assert (reads["query"] == 0).all() and (reads["gain"] == 1).all()
        assert reads["query"].dtype == reads["gain"].dtype == jnp.float32


def test_a_stack_is_a_submodule_like_any_other():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            sublayers = [nn.Dense(D, name=f"dense_{i}") for i in range(3)]
            hidden = linen.AttentionResidualStack(sublayers, block_size=2)(x)
            return nn.Dense(4, name="head")(hidden)

    model, x = Model(), normal(1, B, T, D)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    grads = jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, x)).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}
    assert sum("dense_" in name and "kernel" in name for name in flat) == 3
    assert all(np.abs(leaf).max() > 0 for name, leaf in flat.items() if "kernel" in name)


@pytest.mark.parametrize(
    "kwargs, message",
    [({"block_size": 0}, "block_size=0"), ({"block_size": 2, "reads_per_group": 0}, "reads_per")],
)
def test_bad_sizes_are_refused(kwargs, message):
    stack = linen.AttentionResidualStack([jnp.tanh], **kwargs)
    with pytest.raises(ValueError, match=message):
        stack.init(jax.random.key(0), jnp.ones((1, 2, 3)))
