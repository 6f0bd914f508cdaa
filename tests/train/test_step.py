import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.parallel import MeshConfig, make_mesh
from tests.train.tiny_run import VOCAB, StandIn, one_device
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.placement import batch_sharding
from train.step import (
    initial_state,
    make_evaluation_step,
    make_train_step,
)
from train.streams import to_devices

CONFIG = OptimizerConfig(learning_rate=0.01, warmup_steps=3)


def build(config=CONFIG, *, model=None, mesh=None):
    graphdef, params = nnx.split(model or StandIn(), nnx.Param)
    mesh = mesh or one_device()
    optimizer, schedule = make_optimizer(config, 50)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.jit(lambda p: initial_state(p, optimizer), out_shardings=replicated)(
        nnx.to_pure_dict(params)
    )
    step = make_train_step(graphdef, optimizer, schedule, mesh, config.accumulate)
    return step, state, mesh, graphdef


def batch(mesh, seed=0, rows=16):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (rows, 7), dtype=np.int32)
    return to_devices({"tokens": tokens}, batch_sharding(mesh))


def copy(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left, right, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), left, right)


def test_learns_and_reports():
    step, state, mesh, _ = build()
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch(mesh))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 30
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(state.params)))
    np.testing.assert_allclose(metrics["parameter_norm"], norm, rtol=1e-5)


def test_many_devices_agree_with_one():
    results = []
    for mesh in (one_device(), make_mesh(MeshConfig())):
        step, state, mesh, _ = build(mesh=mesh)
        state, metrics = step(state, batch(mesh))
        results.append((copy(state.params), copy(metrics)))
    assert make_mesh(MeshConfig()).size == 8
    assert_close(*results, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    results = []
    for accumulate in (1, 2):
        config = OptimizerConfig(warmup_steps=0, accumulate=accumulate)
        step, state, mesh, _ = build(config, mesh=make_mesh(MeshConfig()))
        state, metrics = step(state, batch(mesh))
        results.append((copy(state.params), copy(metrics)))
    assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_step_that_is_not_finite_changes_nothing_but_the_counters(name):
    step, state, mesh, _ = build(OptimizerConfig(name=name, warmup_steps=3))
    state, first = step(state, batch(mesh))
    before = copy(state)
    poisoned = np.array(batch(mesh)["tokens"])
    poisoned[3, -1] = VOCAB  # A target outside the vocabulary has a loss of NaN.
    state, bad = step(state, to_devices({"tokens": poisoned}, batch_sharding(mesh)))
    assert not np.isfinite(bad["loss"])
    assert_equal(copy(state.params), before.params)
    assert_equal(copy(state.optimizer), before.optimizer)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (2, 1, 1)
    state, good = step(state, batch(mesh))
    assert (int(good["skipped_steps"]), int(good["skipped_in_row"])) == (1, 0)
    # The schedule goes on where it was: two updates have been made.
    np.testing.assert_allclose(good["learning_rate"], 2 * first["learning_rate"], rtol=1e-6)
    assert np.all(np.array(state.params["embedding_table"]) != before.params["embedding_table"])


def test_schedule_is_what_the_optimizer_applies():
    config = OptimizerConfig(
        learning_rate=0.01, warmup_steps=3, weight_decay=0.0, clip_norm=0.0, epsilon=1e-30
    )
    step, state, mesh, _ = build(config)
    before = copy(state.params)
    state, metrics = step(state, batch(mesh))
    # Adam's first update of an entry with a gradient is the learning rate itself.
    change = np.abs(
        np.array(state.params["feed_forward"]["up_kernel"]) - before["feed_forward"]["up_kernel"]
    )
    np.testing.assert_allclose(change, metrics["learning_rate"], rtol=1e-3)


def test_bfloat16_compute_keeps_updates_below_its_resolution():
    config = OptimizerConfig(
        learning_rate=1e-5, schedule="constant", warmup_steps=0, weight_decay=0.0
    )
    step, state, mesh, _ = build(config, model=StandIn("bfloat16"))
    before = copy(state.params["embedding_table"])
    for seed in range(3):
        state, _ = step(state, batch(mesh, seed))
    after = np.array(state.params["embedding_table"])
    assert after.dtype == np.float32
    moved = after != before
    assert moved.mean() > 0.9
    large = np.abs(before) > 0.5
    assert np.all(after[large].astype(jnp.bfloat16) == before[large].astype(jnp.bfloat16))


def test_compiles_once_in_fifty_steps_with_evaluation(caplog):
    step, state, mesh, graphdef = build()
    evaluate = make_evaluation_step(graphdef, mesh)
    weights = np.ones((16, 6), np.float32)
    batches = [batch(mesh, seed) for seed in range(50)]
    held_out = to_devices(
        {"tokens": np.array(batches[0]["tokens"]), "weights": weights}, batch_sharding(mesh)
    )
    rates = set()
    with caplog.at_level(logging.DEBUG, logger="jax"), jax.log_compiles():
        for number in range(50):
            state, metrics = step(state, batches[number])
            rates.add(float(metrics["learning_rate"]))
            if number % 10 == 0:
                evaluate(state.params, held_out)
    compiled = [r.getMessage() for r in caplog.records if "Compiling jit(" in r.getMessage()]
    assert len([line for line in compiled if "train_step" in line]) == 1
    assert len([line for line in compiled if "evaluation_step" in line]) == 1
    assert len(rates) > 40


def test_evaluation_sums_over_real_tokens_only():
    _, state, mesh, graphdef = build()
    tokens = np.array(batch(mesh)["tokens"])
    weights = np.zeros((16, 6), np.float32)
    weights[:4] = 1
    sums = make_evaluation_step(graphdef, mesh)(
        state.params, to_devices({"tokens": tokens, "weights": weights}, batch_sharding(mesh))
    )
    assert sums["tokens"] == 24
    np.testing.assert_allclose(sums["weight/00"], [24])
    np.testing.assert_allclose(sums["weight/01"], [8, 8, 8], rtol=1e-5)
    np.testing.assert_allclose(sums["entropy/01"], 24 * np.log(3), rtol=1e-5)
    assert sums["entropy/00"] == 0


def test_used_state_says_that_it_is_gone():
    step, state, mesh, _ = build()
    step(state, batch(mesh))
    with pytest.raises(RuntimeError, match="deleted"):
        np.array(state.params["embedding_table"])
