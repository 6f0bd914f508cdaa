"""A model split once into a graph and parameters, and used as a pure function of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from attnres_jax import TransformerLM
from tests.models import reference
from tests.models.programs import V, apply, tiny, tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tiny(num_layers=2, block_size=3)


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


def test_split_then_merge_is_the_same_model():
    model = TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    through_state = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    np.testing.assert_array_equal(
        through_state(params, tokens()), nnx.jit(lambda model, x: model(x))(model, tokens())
    )
    np.testing.assert_array_equal(
        through_state(params, tokens()),
        jax.jit(functools.partial(apply, CONFIG))(nnx.to_pure_dict(params), tokens()),
    )


def test_calling_a_model_changes_nothing_in_it():
    model = TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    graphdef, before = nnx.graphdef(model), jax.tree.map(np.array, nnx.state(model))

    @jax.jit
    def twice(params):
        model = nnx.merge(graphdef, params)
        first, second = model(tokens()), model(tokens(), capture=True)[0]
        assert nnx.graphdef(model) == graphdef
        return first, second, nnx.state(model)

    first, second, after = twice(nnx.state(model))
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_sequences_of_a_batch_do_not_see_each_other():
    params = reference.random_params(CONFIG)
    run = jax.jit(jax.vmap(functools.partial(apply, CONFIG), in_axes=(None, 0)))
    one_by_one = run(params, tokens()[:, None])[:, 0]
    together = jax.jit(functools.partial(apply, CONFIG))(params, tokens())
    np.testing.assert_allclose(together, one_by_one, rtol=1e-4, atol=1e-4)


def test_a_shorter_context_gives_the_first_logits():
    params = reference.random_params(CONFIG)
    run = jax.jit(functools.partial(apply, CONFIG))
    np.testing.assert_allclose(
        run(params, tokens()[:, :1]), run(params, tokens())[:, :1], rtol=1e-4, atol=1e-4
    )
