import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """The ops must run in programs that forbid implicit dtype promotion."""
    with jax.numpy_dtype_promotion("strict"):
        yield
