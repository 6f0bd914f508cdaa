"""Depth attention whose width is split over devices: the compiler adds sums of scalars alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attnres_jax import inter_block, merge
from attnres_jax.parallel import MeshConfig, collectives_of_hlo, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D, N, S = 1, 4, 32, 3, 4


def both_phases(sources, partial_sum, update, query_sd, gain_sd):
    outputs, lse = inter_block(sources, query_sd, gain_sd, implementation="xla")
    merged = merge(
        outputs[1],
        lse[1],
        partial_sum,
        update,
        query_sd[1],
        gain_sd[1],
        norm_gain_d=gain_sd[0],
        implementation="xla",
    )
    return outputs, merged


def test_reads_of_a_group_share_two_sums_for_each_source():
    rng = np.random.default_rng(0)
    *rows, query_sd, gain_sd = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(B, T, D)] * (N + 2) + [(S, D)] * 2
    )
    inputs = tuple(rows[:N]), *rows[N:], query_sd, gain_sd
    mesh = make_mesh(MeshConfig(data=1, tensor=8))

    def split(array):
        axes = [None] * (array.ndim - 1)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes, "tensor")))

    sharded = jax.tree.map(split, inputs)
    found = collectives_of_hlo(jax.jit(both_phases).lower(*sharded).compile().as_text())
    # Of each source the squares and all S products; of the partial sum one of each, and the squares
    # of what the norm that follows reads.
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.bytes for one in found) == 4 * B * T * (N * (S + 1) + 3)

    @jax.jit
    def results_and_gradients(inputs):
        results, pullback = jax.vjp(both_phases, *inputs)
        return results, pullback(jax.tree.map(jnp.cos, results))

    expected, actual = results_and_gradients(inputs), results_and_gradients(sharded)
    for want, got in zip(*map(jax.tree.leaves, (expected, actual)), strict=True):
        assert np.max(np.abs(got - want)) < 1e-5 * np.max(np.abs(want))
