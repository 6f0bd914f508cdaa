"""Whole runs on meshes of emulated devices: what one device computes, and checkpoints for all."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from attnres_jax.parallel import MeshConfig, PipelineConfig, collectives_of_hlo, make_mesh
from tests.train.tiny_run import tiny_config
from train.checkpoint import Checkpoints
from train.loop import prepare, train
from train.metrics import read_metrics
from train.placement import make_placement, parameter_names
from train.setup import abstract_setup, load_run
from train.streams import needed_streams

pytestmark = pytest.mark.usefixtures("quick_compilation")

STAGED = {
    "mesh": MeshConfig(stage=2, data=2, tensor=2),
    "pipeline": PipelineConfig(virtual_stages=2, microbatches=2),
}
SPLIT = {"mesh": MeshConfig(fsdp=2, sequence=2, tensor=2)}


def config_of(folder, name, **changes):
    """Three layers in blocks of two sub-layers, so that four chunks are uneven."""
    defaults = {"steps": 3, "evaluate_every": 3, "checkpoint_every": 2, "optimizer__name": "muon"}
    model = {"num_layers": 3, "block_size": 2, "vocab_size": 258, "tie_embeddings": False}
    defaults |= {f"model__{key}": value for key, value in model.items()}
    return tiny_config(pathlib.Path(folder), workdir=str(folder / name), **defaults | changes)


def leave_one_device(monkeypatch):
    monkeypatch.setattr(
        "train.placement.make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1])
    )
    monkeypatch.setattr("train.setup.jax.device_count", lambda: 1)


def restored(config):
    """The newest state in layer order, as it is trained, and that in layer order again."""
    setup = abstract_setup(config)
    checkpoints = Checkpoints(config.workdir, read_only=True)
    stored = checkpoints.restore(setup.stored, None)
    checkpoints.close()
    as_stored = jax.device_get(stored)
    trained = setup.to_training(stored)
    return as_stored, trained, jax.device_get(setup.to_stored(trained))


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_same_run(expected, config):
    """All that was recorded, and the parameters at the end."""
    records = [read_metrics(folder) for folder in (expected.workdir, config.workdir)]
    for one, other in zip(*records, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"tokens_per_second"}:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name)
    params = [load_run(folder)[2] for folder in (expected.workdir, config.workdir)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), *params)


def test_every_mesh_trains_the_same_run_and_restores_its_checkpoints(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        leave_one_device(patch)
        single = config_of(tmp_path, "single", data__shards=2)
        assert train(prepare(single), "x") == 0
    staged = config_of(tmp_path, "staged", data__shards=2, sample_tokens=2, **STAGED)
    capsys.readouterr()
    assert train(prepare(staged), "x") == 0
    shown = capsys.readouterr().out
    assert "8 x cpu (stage=2, data=2, tensor=2)" in shown
    assert "a sample of 2 tokens at most" in shown
    assert_same_run(single, staged)

    as_stored, trained, back = restored(staged)
    assert_equal(as_stored, back)
    kernel = trained.params["attention"]["query_kernel"]
    assert kernel.sharding.spec[1] == "stage" and kernel.addressable_shards[0].data.shape[1] == 1
    elsewhere = dataclasses.replace(
        staged, mesh=MeshConfig(stage=4, fsdp=2), pipeline=PipelineConfig(microbatches=4)
    )
    as_other, _, back = restored(elsewhere)
    assert_equal(as_stored, as_other)
    assert_equal(as_stored, back)
    with pytest.MonkeyPatch.context() as patch:
        leave_one_device(patch)
        alone = dataclasses.replace(single, workdir=staged.workdir)
        assert_equal(as_stored, restored(alone)[0])
        # And the run goes on there, with the batches that come next.
        for config in (single, alone):
            assert train(prepare(dataclasses.replace(config, steps=4)), "x") == 0
        assert_same_run(single, alone)


def test_a_single_stage_splits_batch_parameters_time_and_heads(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        leave_one_device(patch)
        single = config_of(tmp_path, "single", data__shards=4)
        assert train(prepare(single), "x") == 0
        load_run(single.workdir)  # On fewer devices than its batches have shards.
    split = config_of(tmp_path, "split", data__shards=4, **SPLIT)
    assert train(prepare(split), "x") == 0
    assert_same_run(single, split)


@pytest.mark.parametrize("mesh", [STAGED, SPLIT])
def test_moments_lie_where_their_parameters_do(tmp_path, mesh):
    template = abstract_setup(config_of(tmp_path, "none", **mesh)).template
    of_params = {
        parameter_names(path): leaf.sharding
        for path, leaf in jax.tree.leaves_with_path(template.params)
    }
    kernels = [sharding for names, sharding in of_params.items() if "kernel" in names[-1]]
    assert len(kernels) == 8 and not any(sharding.is_fully_replicated for sharding in kernels)
    moments = [
        (parameter_names(path), leaf.sharding)
        for path, leaf in jax.tree.leaves_with_path(template.optimizer)
        if parameter_names(path)
    ]
    assert all(sharding == of_params[names] for names, sharding in moments)
    assert len(moments) > len(of_params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(stage=3)}, r"mesh: .* 8 devices"),
        (
            {**STAGED, "pipeline": PipelineConfig(virtual_stages=4)},
            "stages=2 times virtual_stages=4 is 8 chunks, but the model has 6 sub-layers",
        ),
        (
            {**STAGED, "batch_size": 9},
            r"batch_size: 9 sequences cannot be shared evenly by pipeline\.microbatches=2 times"
            r" mesh\.data=2; the nearest that can: 8 or 12",
        ),
        ({"mesh": MeshConfig(sequence=8), "context": 12}, r"context: 12 .* mesh\.sequence=8"),
        ({"mesh": MeshConfig(tensor=4)}, "axis g has 2 entries, which tensor=4"),
        ({"data__shards": 3}, r"data\.shards: 3 must divide batch_size \(8\)"),
    ],
)
def test_refused_before_anything_is_compiled(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message), jax.log_compiles():
        make_placement(config_of(tmp_path, "none", **changes))
        abstract_setup(config_of(tmp_path, "none", **changes))


def test_processes_read_the_streams_of_their_sequences(tmp_path):
    """Sixteen rows in eight streams, over two replicas with four devices each."""
    mesh = make_mesh(MeshConfig(stage=4, data=2))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    class Partly:
        """The sharding as a process with the devices of one replica sees it."""

        def __init__(self, replica):
            self.devices = set(mesh.devices[:, replica].ravel())

        def addressable_devices_indices_map(self, shape):
            every = sharding.devices_indices_map(shape)
            return {device: where for device, where in every.items() if device in self.devices}

    assert needed_streams(sharding, 16, 8) == list(range(8))
    assert needed_streams(Partly(0), 16, 8) == [0, 1, 2, 3]
    assert needed_streams(Partly(1), 16, 8) == [4, 5, 6, 7]
    assert needed_streams(Partly(1), 16, 1) == [0]


def test_kernels_are_gathered_for_activations_and_not_the_other_way_round(tmp_path):
    rows, context = 16, 24
    model = {"num_layers": 3, "block_size": 6, "vocab_size": 256, "feed_forward_width": 40}
    changes = {f"model__{name}": value for name, value in model.items()}
    config = tiny_config(
        tmp_path, batch_size=rows, context=context, mesh=MeshConfig(fsdp=8), **changes
    )
    setup = abstract_setup(config)
    tokens_bt = jax.ShapeDtypeStruct((rows, context + 1), np.int32)
    with jax.set_mesh(setup.mesh):
        step = setup.make_train_step(1)
        text = step.lower(setup.template, {"tokens": tokens_bt}).compile().as_text()
    found = collectives_of_hlo(text)
    assert any(one.kind == "all-gather" and one.in_loop for one in found)
    assert not [one for one in found if context in one.shape]
