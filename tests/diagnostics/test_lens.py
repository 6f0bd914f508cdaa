"""The lens ends in the model's own logits, in programs compiled as users compile them."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import oracles
from tests.diagnostics.programs import measure, padded, text
from tests.models import reference
from tests.models.programs import STANDARD, apply, graphdef_of, tiny

CONFIGS = {
    "standard": STANDARD,
    "block, scanned, bfloat16": tiny(block_size=6, compute_dtype="bfloat16"),
    "block, rematerialised": tiny(block_size=4, remat="full", tie_embeddings=False),
}


@pytest.fixture(autouse=True)
def standard_dtype_promotion(strict_dtype_promotion):
    # jax.nn.dot_product_attention itself does not run where promotion to float32 is forbidden.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_norm_and_head_of_the_last_hidden_state_are_the_logits_to_the_bit(config):
    params = reference.random_params(config)
    tokens = text()[:, :-1]

    @jax.jit
    def head(params, hidden, num_sources):
        return nnx.merge(graphdef_of(config), params).head(hidden, num_sources)

    capture = jax.jit(functools.partial(apply, config, capture=True))
    logits, captured = capture(params, tokens)
    alone = jax.jit(functools.partial(apply, config))(params, tokens)
    num_sources = len(captured["finished"]) if config.residual != "standard" else 1
    last = jax.jit(head, static_argnums=2)(params, captured["states"][-1].hidden, num_sources)
    np.testing.assert_array_equal(last, logits)
    np.testing.assert_array_equal(alone, logits)

    lens = measure(config, gradients=False)(params, text(), padded()).arrays["logit_lens_loss"]
    exact = oracles.float64(logits)
    targets = np.take_along_axis(exact, text()[:, 1:, None], -1)[..., 0]
    nats = np.log(np.exp(exact).sum(-1)) - targets
    np.testing.assert_allclose(lens[-1], np.average(nats, weights=padded()), rtol=1e-6)
