"""Strict settings for every test: eight CPU devices, no silent promotion."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def strict_dtype_promotion(request):
    """The library must run in programs that forbid implicit promotion; optax.adamw does not."""
    if "train" in request.path.parent.parts:
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """For files that compile many small programs, each to run it once."""
    previous = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", previous)
