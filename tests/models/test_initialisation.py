"""What a new model's parameters are, however it is created."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnres_jax import TransformerLM
from tests.models import reference
from tests.models.programs import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tiny(num_layers=4, block_size=3, tie_embeddings=False, embedding_std=0.5, vocab_size=512)


def create():
    return nnx.state(TransformerLM(CONFIG, rngs=nnx.Rngs(5)), nnx.Param)


def create_plainly():
    return create()


def create_in_a_compiled_program():
    return jax.jit(create)()


def create_spread_over_eight_devices():
    """Every leaf with a dimension of a multiple of eight is split along it."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding_of(leaf):
        axes = [axis for axis, size in enumerate(leaf.shape) if size % 8 == 0]
        spec = P(*[None] * axes[-1], "model") if axes else P()
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(sharding_of, jax.eval_shape(create))
    params = jax.jit(create, out_shardings=shardings)()
    assert not params["reads"]["query"].sharding.is_fully_replicated
    assert not params["final_read"]["query"].sharding.is_fully_replicated
    return params


@pytest.mark.parametrize(
    "create", [create_plainly, create_in_a_compiled_program, create_spread_over_eight_devices]
)
def test_queries_are_zero_and_gains_one_and_kernels_are_neither(create):
    params = nnx.to_pure_dict(create())
    leaves = dict(reference.leaves(params))
    # Queries and gains of the reads before eight sub-layers, and of the final read.
    assert leaves["reads.query"].shape == leaves["reads.gain"].shape == (8, 16)
    assert leaves["final_read.query"].shape == leaves["final_read.gain"].shape == (16,)
    for name, leaf in leaves.items():
        leaf = np.asarray(leaf)
        assert leaf.dtype == np.float32
        if name.endswith("query"):
            assert (leaf == 0).all(), name
        elif name.endswith("gain"):
            assert (leaf == 1).all(), name
        else:
            assert 0.01 < leaf.std() < 1 and abs(leaf.mean()) < 0.1, name
    assert np.std(leaves["embedding_table"]) == pytest.approx(0.5, rel=0.05)


def test_layers_start_different_from_each_other():
    for name, leaf in reference.leaves(nnx.to_pure_dict(create())):
        if name.startswith(("attention.", "feed_forward.")):
            for layer in np.asarray(leaf)[1:]:
                assert not np.array_equal(layer, leaf[0]), name


def test_a_seed_gives_the_same_parameters_again():
    jax.tree.map(np.testing.assert_array_equal, create(), create())


def test_a_standard_model_has_no_reads_and_a_tied_model_no_head():
    abstract = nnx.eval_shape(lambda: TransformerLM(tiny(residual="standard"), rngs=nnx.Rngs(0)))
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(abstract))}
    assert names == {
        "embedding_table",
        "attention",
        "attention_norm",
        "feed_forward",
        "feed_forward_norm",
        "final_norm",
    }


def test_a_model_holds_parameters_only():
    abstract = nnx.eval_shape(lambda: TransformerLM(CONFIG, rngs=nnx.Rngs(0)))
    assert all(isinstance(leaf, nnx.Param) for _, leaf in nnx.to_flat_state(nnx.state(abstract)))
