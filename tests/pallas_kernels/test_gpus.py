"""Which GPU a program is for."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import gpus


def capability_on(kind, platform="gpu"):
    device = AbstractDevice(kind, 1, platform)
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return gpus.compute_capability()


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("Tesla T4", 75),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA L4", 89),
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA H200", 90),
        ("NVIDIA B200", 100),
    ],
)
def test_the_mesh_in_context_says_it(kind, capability):
    assert capability_on(kind) == capability


@pytest.mark.parametrize("kind, platform", [("gfx942", "gpu"), ("TPU v5", "tpu"), ("cpu", "cpu")])
def test_other_devices_have_none(kind, platform):
    assert capability_on(kind, platform) is None


def test_without_a_mesh_it_is_that_of_the_default_device():
    assert jax.devices()[0].platform == "cpu"
    assert gpus.compute_capability() is None
