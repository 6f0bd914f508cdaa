import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import cross_entropy


def reference(logits, tokens):
    logits = np.asarray(logits, np.float64)
    log_total = np.log(np.exp(logits).sum(-1))
    return log_total - np.take_along_axis(logits, tokens[..., None], -1)[..., 0]


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 3, 5)).astype(np.float32), rng.integers(0, 5, (2, 3))


def test_sums_negative_log_likelihood(batch):
    nats, weight = cross_entropy(*batch)
    np.testing.assert_allclose(nats, reference(*batch).sum(), rtol=1e-6)
    assert weight == 6


def test_padding_counts_for_nothing_even_where_it_is_nan(batch):
    logits, tokens = batch
    logits[1, 2] = np.nan
    weights = np.ones((2, 3), np.float32)
    weights[1, 2] = 0
    nats, weight = cross_entropy(logits, tokens, weights)
    np.testing.assert_allclose(nats, reference(logits, tokens).ravel()[:5].sum(), rtol=1e-6)
    assert weight == 5


def test_bfloat16_logits_are_summed_in_float32():
    logits = jnp.zeros((1, 300, 2), jnp.bfloat16)
    nats, _ = cross_entropy(logits, jnp.zeros((1, 300), jnp.int32))
    assert nats.dtype == jnp.float32
    np.testing.assert_allclose(nats, 300 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("token", [-1, 5])
def test_token_outside_the_vocabulary_is_not_taken_for_another(batch, token):
    logits, tokens = batch
    tokens[0, 1] = token
    assert np.isnan(cross_entropy(logits, tokens)[0])
