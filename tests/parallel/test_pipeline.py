"""Executors against a loop over all sub-layers in float64, and broken ones against it too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_jax.parallel import pipeline, ring, ticks
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("quick_compilation")


def errors(partition, microbatches, executor, *options):
    """Largest relative errors of the loss and of any gradient."""
    params = toy.random_params(partition.num_sublayers)
    x, weights = toy.inputs(microbatches)
    loss, gradients = toy.oracle(partition.block_size, params, x, weights)
    program = toy.value_and_gradients(microbatches, partition, executor, *options)
    actual_loss, actual = program(params, x, weights)
    return abs(actual_loss - loss) / abs(loss), toy.worst_error(actual, gradients)


# Sub-layers, block size, stages, virtual stages; microbatches; executor. All pairs of P in 1, 2, 4,
# V in 1, 2, 3, M / P in 1, 2, 4, executors, and Full, aligned and spanning blocks are here.
CASES = {
    "one chunk": (4, 2, 1, 1, 1, "two_scan"),
    "one stage, a block of all chunks": (4, 4, 1, 2, 2, "one_f_one_b"),
    "one stage, Full": (6, 1, 1, 3, 4, "autodiff"),
    "Full, 1F1B": (4, 1, 2, 1, 2, "one_f_one_b"),
    "two blocks in a chunk": (8, 2, 2, 1, 4, "autodiff"),
    "uneven chunks and a short last block": (10, 4, 2, 2, 8, "autodiff"),
    "a sub-layer a chunk": (6, 4, 2, 3, 2, "two_scan"),
    "a block of two chunks": (8, 4, 4, 1, 16, "autodiff"),
    "Full, M=P": (8, 1, 4, 2, 4, "autodiff"),
    "aligned, M=4P": (16, 2, 4, 2, 16, "two_scan"),
    "Full, V=3": (12, 1, 4, 3, 8, "two_scan"),
    "aligned, 1F1B, V=3, M=4P": (24, 2, 4, 3, 16, "one_f_one_b"),
    "naive, blocks end within chunks": (12, 3, 2, 3, 4, "two_scan", "naive"),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_equal_those_of_a_plain_loop(name, monkeypatch):
    def empty_hop(*arguments):
        # What arrives before there is anything to send may be NaN: no result depends on it.
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), original(*arguments))

    original = ring.empty_hop
    for module in (pipeline, ticks):
        monkeypatch.setattr(module, "empty_hop", empty_hop)
    sizes, rest = CASES[name][:4], CASES[name][4:]
    loss_error, gradient_error = errors(Partition(*sizes), *rest)
    assert loss_error < 1e-6 and gradient_error < 1e-5


def test_kernels_compute_the_same():
    # Blocks of two chunks: the one kernel merges with a partial sum that has come from elsewhere.
    with pltpu.force_tpu_interpret_mode(True):
        partition = Partition(4, 4, 2, 2)
        loss_error, gradient_error = errors(partition, 2, "two_scan", "cached", "mosaic_tpu")
    assert loss_error < 1e-6 and gradient_error < 1e-5


MUTANTS = {
    "gradients of a window that pass through are dropped": (
        ticks,
        "    rows = gradients.rows\n",
        "    rows = gradients.rows\n    window = window.at[: payload.early].set(0.0)\n",
    ),
    "what later chunks of a stage say about its own blocks is dropped": (
        ticks,
        "    window += read_rows(rows, here.slot, here.after - 1, payload.window)\n",
        "    held = read_rows(rows, here.slot, here.after - 1, payload.window)\n"
        "    window += held.at[payload.early :].set(0.0)\n",
    ),
    "rows that were sent are kept": (
        ticks,
        "    rows = write_rows(rows, here.slot, here.before - 1, jnp.zeros_like(window),"
        " here.is_active)\n",
        "",
    ),
    "embeddings enter at every chunk of the first stage": (
        ring,
        "is_first=chunk == 0,",
        "is_first=jax.lax.axis_index(STAGE) == 0,",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_ring_is_seen(mutant, monkeypatch):
    module, old, new = MUTANTS[mutant]
    broken = toy.mutated(module, old, new)
    for user in (pipeline, ticks):
        for name in set(vars(user)) & set(vars(module)):
            if getattr(vars(user)[name], "__module__", None) == module.__name__:
                monkeypatch.setattr(user, name, getattr(broken, name))
    loss_error, gradient_error = errors(Partition(8, 2, 2, 2), 4, "two_scan")
    print(f"{mutant}: gradient error {gradient_error:.2g}, loss error {loss_error:.2g}")
    assert gradient_error > 1e-2


def test_a_cache_with_one_slot_less_is_seen(monkeypatch):
    slots = Schedule.cache_slots.fget
    monkeypatch.setattr(Schedule, "cache_slots", property(lambda self: slots(self) - 1))
    loss_error, gradient_error = errors(Partition(8, 2, 2, 2), 8, "one_f_one_b")
    print(f"one slot less: gradient error {gradient_error:.2g}, loss error {loss_error:.2g}")
    assert gradient_error > 1e-2


def test_a_loss_without_a_derivative_is_the_same():
    partition = Partition(8, 2, 2, 2)
    params = toy.random_params(8)
    x, weights = toy.inputs(6)
    expected, _ = toy.oracle(2, params, x, weights)
    loss = jax.jit(toy.make_loss(6, partition, "one_f_one_b"))
    np.testing.assert_allclose(loss(params, x, weights), expected, rtol=1e-6)
