"""Meshes, shardings and layouts on eight emulated devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from attnres_jax import ModelConfig, TransformerLM
from attnres_jax.parallel.layout import to_layer_order, to_pipeline
from attnres_jax.parallel.mesh import AXES, MeshConfig, device_grid, make_mesh
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.sharding import (
    axis_letters,
    parameter_shardings,
    partition_spec,
    sharded_init,
)

CONFIG = ModelConfig(
    vocab_size=16,
    width=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=2,
    feed_forward_width=12,
    tie_embeddings=False,
)
PARTITION = Partition(4, 4, 2)


def new_params(partition=PARTITION):
    params = nnx.state(TransformerLM(CONFIG, rngs=nnx.Rngs(3)), nnx.Param)
    return to_pipeline(nnx.to_pure_dict(params), partition)


def test_axes_from_outer_to_inner_and_data_takes_the_rest():
    mesh = make_mesh(MeshConfig(stage=2, tensor=2))
    assert mesh.axis_names == AXES == ("stage", "data", "fsdp", "sequence", "tensor")
    assert dict(mesh.shape) == {"stage": 2, "data": 2, "fsdp": 1, "sequence": 1, "tensor": 2}
    assert make_mesh(MeshConfig()).shape["data"] == 8


@pytest.mark.parametrize(
    "config, parts",
    [
        (MeshConfig(stage=2, data=3), ["stage=2", "data=3", "is 6", "8 devices", "set data=4"]),
        (MeshConfig(stage=3), ["stage=3", "is 3", "8 devices", "must divide 8"]),
        (MeshConfig(tensor=16), ["tensor=16", "is 16", "8 devices", "must divide 8"]),
    ],
)
def test_axes_that_do_not_multiply_to_the_devices_are_refused(config, parts):
    with pytest.raises(ValueError) as error:
        make_mesh(config)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_size_below_one_is_refused():
    with pytest.raises(
        ValueError, match=r"mesh\.fsdp: expected a whole number of at least 1, got 0"
    ):
        MeshConfig(fsdp=0)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What the layout of several slices asks a device for."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "fake"


def slices(count, each):
    return [FakeDevice(i, i // each, i // each) for i in range(count * each)]


def test_stage_spans_slices_first_then_data_then_fsdp():
    sizes = {"stage": 2, "data": 2, "fsdp": 2, "sequence": 1, "tensor": 1}
    index = np.vectorize(lambda device: device.slice_index)
    over_two = index(device_grid(sizes, slices(2, 4)))[:, :, :, 0, 0]
    np.testing.assert_array_equal(over_two, np.arange(2)[:, None, None] * np.ones((1, 2, 2)))
    over_four = index(device_grid(sizes, slices(4, 2)))[:, :, :, 0, 0]
    assert all(len(set(row)) == 1 for row in over_four.reshape(4, 2).tolist())
    assert len(np.unique(over_four)) == 4
    sizes |= {"stage": 1, "data": 1, "fsdp": 4, "tensor": 2}
    over_four = index(device_grid(sizes, slices(4, 2)))[0, 0, :, 0, :]
    assert sorted(row[0] for row in over_four.tolist() if len(set(row)) == 1) == [0, 1, 2, 3]


def test_slices_that_no_outer_axis_can_span_are_refused():
    sizes = {"stage": 1, "data": 1, "fsdp": 1, "sequence": 1, "tensor": 8}
    with pytest.raises(ValueError, match=r"stage=1 times data=1 .* 2 slices .*multiple of 2"):
        device_grid(sizes, slices(2, 4))


def test_every_parameter_has_letters_of_its_rank():
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(new_params))
    letters = {jax.tree_util.keystr(path): axis_letters(path) for path, _ in flat}
    assert all(len(axis_letters(path)) == leaf.ndim for path, leaf in flat), letters
    assert letters["['attention']['query_kernel']"] == "cpldhk"
    assert letters["['final_norm']['gain']"] == "d"


def test_the_table_gives_specs():
    def spec(letters):
        return partition_spec(letters, name="it")

    assert spec("cpldhk") == PartitionSpec(None, ("stage",), None, ("fsdp",), ("tensor",), None)
    assert spec("mbt") == PartitionSpec(None, ("data", "fsdp"), ("sequence",))


def test_a_collision_names_array_and_axes():
    with pytest.raises(ValueError, match=r"activation \[b, t, d\]: axes b and d.*'fsdp'"):
        partition_spec("btd", name="activation")


@pytest.mark.parametrize(
    "config, parts",
    [
        (MeshConfig(tensor=4), ["attention.key_kernel", "axis g has 2", "tensor=4"]),
        (MeshConfig(stage=8), ["axis p has 2", "stage=8"]),
    ],
)
def test_an_uneven_split_names_parameter_and_axis(config, parts):
    with pytest.raises(ValueError) as error:
        parameter_shardings(jax.eval_shape(new_params), make_mesh(config))
    assert all(part in str(error.value) for part in parts), error.value


def test_init_is_sharded_and_equal_to_that_of_one_device():
    def init():
        kernel = jax.random.normal(jax.random.key(0), (1, 2, 2, 8, 4, 2))
        return {"attention": {"query_kernel": kernel}, "final_norm": {"gain": jnp.ones(8)}}

    params, shardings = sharded_init(init, make_mesh(MeshConfig(stage=2, fsdp=2, tensor=2)))
    for leaf, sharding in zip(*map(jax.tree.leaves, (params, shardings)), strict=True):
        assert leaf.sharding == sharding
    kernel = params["attention"]["query_kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    jax.tree.map(np.testing.assert_array_equal, params, jax.jit(init)())


@pytest.mark.parametrize("stages, virtual, layers", [(2, 2, 5), (4, 1, 5), (1, 3, 3), (4, 2, 5)])
def test_layouts_convert_bit_for_bit(stages, virtual, layers):
    rng = np.random.default_rng(0)
    partition = Partition(2 * layers, 3, stages, virtual)
    params = {
        "attention": {"query_kernel": rng.standard_normal((layers, 2, 3))},
        "feed_forward_norm": {"gain": rng.standard_normal((layers, 2))},
        "reads": {"query": rng.standard_normal((2 * layers, 2))},
        "final_norm": {"gain": rng.standard_normal(2)},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    staged = to_pipeline(params, partition)
    assert staged["reads"]["query"].shape == (virtual, stages, partition.num_slots, 2)
    jax.tree.map(np.testing.assert_array_equal, to_layer_order(staged, partition), params)
    for chunk, (start, size) in enumerate(
        zip(partition.boundaries[:-1], partition.sizes, strict=True)
    ):
        rows = staged["reads"]["query"][chunk // stages, chunk % stages]
        np.testing.assert_array_equal(rows[:size], params["reads"]["query"][start : start + size])
        np.testing.assert_array_equal(rows[size:], 0)
