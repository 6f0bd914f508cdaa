"""Executors against a loop over all sub-layers in float64, and broken ones against it too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.parallel import pipeline, ring
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("quick_compilation")


def check(partition, microbatches, executor, exchange="cached"):
    params = toy.random_params(partition.num_sublayers)
    x, cotangent = toy.inputs(microbatches)
    expected = toy.oracle(partition.block_size, params, x, cotangent)
    actual = toy.value_and_gradients(microbatches, partition, executor, exchange)(
        params, x, cotangent
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    return toy.worst_error(actual[1], expected[1])


# Sub-layers, block size, stages, virtual stages; microbatches; executor.
CASES = {
    "one stage, one chunk": (4, 2, 1, 1, 1, "two_scan"),
    "one stage, three chunks": (12, 4, 1, 3, 2, "one_f_one_b"),
    "aligned, V=1, M=P": (8, 4, 2, 1, 2, "autodiff"),
    "aligned, V=1, M=2P": (8, 2, 4, 1, 8, "two_scan"),
    "aligned, V=1, M=4P": (8, 4, 2, 1, 8, "one_f_one_b"),
    "aligned, V=2, M=P": (16, 2, 4, 2, 4, "one_f_one_b"),
    "aligned, V=2, M=2P": (8, 2, 2, 2, 4, "two_scan"),
    "aligned, V=2, M=4P": (16, 2, 4, 2, 16, "one_f_one_b"),
    "aligned, V=3, M=2P": (24, 2, 4, 3, 8, "two_scan"),
    "aligned, V=3, M=4P": (12, 2, 2, 3, 8, "one_f_one_b"),
    "two blocks in a chunk": (16, 2, 2, 2, 4, "two_scan"),
    "Full": (12, 1, 2, 2, 4, "one_f_one_b"),
    "block of two chunks": (16, 4, 4, 2, 8, "two_scan"),
    "block of all chunks": (8, 8, 2, 2, 4, "one_f_one_b"),
    "block ends within chunks": (12, 3, 2, 3, 4, "two_scan"),
    "differentiated by JAX, block ends within chunks": (12, 5, 2, 2, 2, "autodiff"),
    "uneven chunks and a short last block": (10, 4, 2, 2, 4, "one_f_one_b"),
    "a sub-layer a chunk": (6, 4, 2, 3, 2, "two_scan"),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_equal_those_of_a_plain_loop(name):
    *sizes, microbatches, executor = CASES[name]
    assert check(Partition(*sizes), microbatches, executor) < 1e-5


def test_the_naive_exchange_computes_the_same():
    assert check(Partition(8, 2, 2, 2), 4, "two_scan", "naive") < 1e-5


@pytest.mark.parametrize("executor", pipeline.EXECUTORS)
def test_idle_ticks_leak_nothing(executor, monkeypatch):
    """What arrives before there is anything to send may be NaN: no result depends on it."""

    def empty_hop(*arguments):
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), original(*arguments))

    original = ring.empty_hop
    monkeypatch.setattr(ring, "empty_hop", empty_hop)
    monkeypatch.setattr(pipeline, "empty_hop", empty_hop)
    assert check(Partition(8, 4, 2, 2), 4, executor) < 1e-5


MUTANTS = {
    "gradients of a window that pass through are dropped": (
        "    rows = gradients.rows\n",
        "    rows = gradients.rows\n    window = window.at[: payload.early].set(0.0)\n",
    ),
    "what later chunks of a stage say about its own blocks is dropped": (
        "    window += read_rows(rows, here.slot, here.after - 1, payload.window)\n",
        "    held = read_rows(rows, here.slot, here.after - 1, payload.window)\n"
        "    window += held.at[payload.early :].set(0.0)\n",
    ),
    "rows that were sent are kept": (
        "    rows = write_rows(rows, here.slot, here.before - 1, jnp.zeros_like(window),"
        " here.is_active)\n",
        "",
    ),
    "embeddings enter at every chunk of the first stage": (
        "is_first=chunk == 0,",
        "is_first=jax.lax.axis_index(STAGE) == 0,",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_ring_is_seen(mutant, monkeypatch):
    broken = toy.mutated(ring, *MUTANTS[mutant])
    for name in set(vars(pipeline)) & set(vars(ring)):
        if getattr(vars(ring)[name], "__module__", None) == ring.__name__:
            monkeypatch.setattr(pipeline, name, getattr(broken, name))
    partition, microbatches = Partition(8, 2, 2, 2), 4
    params = toy.random_params(8)
    x, cotangent = toy.inputs(microbatches)
    expected = toy.oracle(2, params, x, cotangent)
    actual = toy.value_and_gradients(microbatches, partition, "one_f_one_b")(params, x, cotangent)
    error = toy.worst_error(actual[1], expected[1])
    print(f"{mutant}: gradient error {error:.2g}, loss error {abs(actual[0] - expected[0]):.2g}")
    assert error > 1e-2


def test_a_cache_with_one_slot_less_is_seen(monkeypatch):
    slots = Schedule.cache_slots.fget
    monkeypatch.setattr(Schedule, "cache_slots", property(lambda self: slots(self) - 1))
    params = toy.random_params(8)
    x, cotangent = toy.inputs(8)
    expected = toy.oracle(2, params, x, cotangent)
    actual = toy.value_and_gradients(8, Partition(8, 2, 2, 2), "one_f_one_b")(params, x, cotangent)
    error = toy.worst_error(actual[1], expected[1])
    print(f"one slot less: gradient error {error:.2g}")
    assert error > 1e-2


def test_a_loss_without_a_derivative_is_the_same():
    partition = Partition(8, 2, 2, 2)
    params = toy.random_params(8)
    x, cotangent = toy.inputs(6)
    expected, _ = toy.oracle(2, params, x, cotangent)
    loss = jax.jit(toy.make_loss(6, partition, "one_f_one_b"))
    np.testing.assert_allclose(loss(params, x, cotangent), expected, rtol=1e-5)
