"""Tiles are planned for the TPU of the mesh in context."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import chips
from pallas_kernels.chips import Chip

MIB = 2**20


def described(kind, cores, platform="tpu"):
    return AbstractMesh((1,), ("data",), abstract_device=AbstractDevice(kind, cores, platform))


@pytest.mark.parametrize(
    "kind, cores, chip",
    [
        ("TPU v5 lite", 1, Chip(128 * MIB, 128, 1)),
        ("TPU v5", 2, Chip(64 * MIB, 128, 2)),
        ("TPU v5", 1, Chip(64 * MIB, 128, 1)),
        ("TPU v6 lite", 1, Chip(128 * MIB, 256, 1)),
        ("TPU7x", 1, Chip(64 * MIB, 256, 1)),
    ],
)
def test_the_tpu_of_the_mesh_in_context(kind, cores, chip):
    with jax.sharding.use_abstract_mesh(described(kind, cores)):
        assert chips.current() == chip
        # Without a TPU in context, a tile must fit into any of these.
        assert chips.UNKNOWN.vmem_bytes <= chip.vmem_bytes
        assert chips.UNKNOWN.matrix_width <= chip.matrix_width
    assert chips.current() is None


def test_other_devices_are_no_tpu():
    assert chips.current() is None
    with jax.sharding.use_abstract_mesh(described("NVIDIA H100 80GB HBM3", 1, "cuda")):
        assert chips.current() is None
