import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """The models must run in programs that forbid implicit dtype promotion."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """For files that compile many small programs, each to run it once."""
    previous = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", previous)
