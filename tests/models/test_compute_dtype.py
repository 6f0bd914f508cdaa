"""Half precision: float32 parameters and logits, finite results, errors of a few roundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models import reference
from tests.models.programs import (
    cotangent,
    logits_and_gradients,
    logits_of,
    tiny,
    tokens,
)

# jax.nn.dot_product_attention itself does not run where promotion to float32 is forbidden.
pytestmark = [pytest.mark.usefixtures("quick_compilation", "standard_dtype_promotion")]


@pytest.fixture
def standard_dtype_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    "residual, compute_dtype",
    [("standard", "bfloat16"), ("block", "bfloat16"), ("block", "float16")],
)
def test_half_precision_is_finite_and_near_the_reference(residual, compute_dtype):
    config = tiny(residual=residual, block_size=4, compute_dtype=compute_dtype)
    params = reference.random_params(config)
    logits, grads = logits_and_gradients(config)(params, tokens(), cotangent())
    expected = reference.run(config, params, tokens(), cotangent())
    eps = float(jnp.finfo(compute_dtype).eps)
    assert logits.dtype == np.float32
    assert oracles.relative_error(logits, expected.logits) <= 8 * eps
    for (name, got), (_, want) in zip(
        reference.leaves(grads), reference.leaves(expected.grads), strict=True
    ):
        assert got.dtype == np.float32 and np.isfinite(got).all(), name
        assert oracles.relative_error(got, want) <= 16 * eps, name


def test_logits_are_not_rounded_to_the_compute_dtype():
    config = tiny(block_size=4, compute_dtype="bfloat16")
    logits, _ = logits_and_gradients(config)(reference.random_params(config), tokens(), cotangent())
    assert np.mean(np.asarray(logits) == np.asarray(logits).astype(jnp.bfloat16)) < 0.1


def test_a_float32_partial_sum_loses_less_to_rounding():
    # One block of twelve sub-layers: every output is rounded into the sum, or is not.
    def model(**changes):
        return tiny(num_layers=6, block_size=12, **changes)

    params = reference.random_params(model())
    expected = logits_of(model())(params, tokens())
    errors = []
    for float32_partial_sum in (False, True):
        config = model(compute_dtype="bfloat16", float32_partial_sum=float32_partial_sum)
        logits = logits_of(config)(params, tokens())
        assert logits.dtype == np.float32 and np.isfinite(logits).all()
        errors.append(oracles.relative_error(logits, expected))
    assert errors[1] < 0.9 * errors[0]
