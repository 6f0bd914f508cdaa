"""A model split once into a graph and parameters, and used as a pure function of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.models import reference
from tests.models.programs import V, apply, graphdef_of, logits_of, tiny, tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tiny(num_layers=1, block_size=1)


def loss(params, tokens_bt):
    logits = apply(CONFIG, params, tokens_bt)
    return jnp.square(logits - jnp.sin(logits)).sum()


def test_gradients_are_the_same_on_devices_that_share_a_batch():
    params = jax.tree.map(jnp.asarray, reference.random_params(CONFIG))
    tokens_bt = np.random.default_rng(3).integers(0, V, (16, 5), dtype=np.int32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local_gradients(params, tokens_bt):
        # Gradients to what all devices hold alike are summed over them.
        return jax.grad(lambda params: jax.lax.psum(loss(params, tokens_bt), "data"))(params)

    sharded = jax.jit(
        jax.shard_map(local_gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    )
    expected = jax.jit(jax.grad(loss))(params, tokens_bt)
    actual = sharded(params, tokens_bt)
    for (name, got), (_, want) in zip(
        reference.leaves(actual), reference.leaves(expected), strict=True
    ):
        assert len(got.sharding.device_set) == 8
        difference = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        assert difference <= 2e-5, name


def test_a_split_model_is_the_same_function_of_state_or_of_nested_dicts():
    params = reference.random_params(CONFIG)
    graphdef = graphdef_of(CONFIG)
    state = nnx.from_flat_state(
        [(tuple(name.split(".")), nnx.Param(leaf)) for name, leaf in reference.leaves(params)]
    )

    @jax.jit
    def twice(state):
        model = nnx.merge(graphdef, state)
        first, second = model(tokens()), model(tokens(), capture=True)[0]
        assert nnx.graphdef(model) == graphdef
        return first, second, nnx.state(model)

    first, second, after = twice(state)
    # Neither call has changed anything in the model.
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(after))
    np.testing.assert_allclose(first, logits_of(CONFIG)(params, tokens()), rtol=1e-5, atol=1e-5)


def test_sequences_of_a_batch_do_not_see_each_other():
    params = reference.random_params(CONFIG)
    run = jax.jit(jax.vmap(functools.partial(apply, CONFIG), in_axes=(None, 0)))
    one_by_one = run(params, tokens()[:, None])[:, 0]
    together = logits_of(CONFIG)(params, tokens())
    np.testing.assert_allclose(together, one_by_one, rtol=1e-4, atol=1e-4)


def test_a_shorter_context_gives_the_first_logits():
    params = reference.random_params(CONFIG)
    np.testing.assert_allclose(
        logits_of(CONFIG)(params, tokens()[:, :1]),
        logits_of(CONFIG)(params, tokens())[:, :1],
        rtol=1e-4,
        atol=1e-4,
    )
