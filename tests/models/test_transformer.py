"""The language model held to a float64 transformer: values, every gradient, and invariants."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import oracles
from tests.models import reference
from tests.models.programs import (
    FULL,
    MODELS,
    B,
    T,
    V,
    apply,
    cotangent,
    logits_and_gradients,
    new_params,
    tokens,
    with_zero_queries,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

ATTENTION_RESIDUALS = {name: c for name, c in MODELS.items() if c.residual != "standard"}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
each_attention_residual = pytest.mark.parametrize(
    "config", ATTENTION_RESIDUALS.values(), ids=ATTENTION_RESIDUALS
)


def assert_matches_the_reference(config, params):
    logits, grads = logits_and_gradients(config)(params, tokens(), cotangent())
    expected = reference.run(config, params, tokens(), cotangent())
    assert logits.dtype == np.float32
    assert oracles.relative_error(logits, expected.logits) <= 1e-5
    actual = dict(reference.leaves(grads))
    assert list(actual) == [name for name, _ in reference.leaves(expected.grads)]
    for name, want in reference.leaves(expected.grads):
        assert actual[name].dtype == np.float32
        assert oracles.relative_error(actual[name], want) <= 2e-5, name
    return logits, grads


@each_model
def test_logits_and_every_gradient_match_the_reference(config):
    assert_matches_the_reference(config, reference.random_params(config, query_scale=2.0))


def test_full_is_block_size_one():
    params = reference.random_params(FULL)
    full, block = (
        str(jax.make_jaxpr(lambda params, config=config: apply(config, params, tokens()))(params))
        for config in (FULL, dataclasses.replace(FULL, residual="block", block_size=1))
    )
    assert full == block


@each_attention_residual
def test_zero_queries_equal_the_standard_model_with_the_same_weights(config):
    params = with_zero_queries(reference.random_params(config))
    logits, _ = logits_and_gradients(config)(params, tokens(), cotangent())
    standard = reference.setting(2 * config.num_layers, None, config.norm_eps)
    expected = reference.run(config, params, tokens(), cotangent(), standard)
    # Not to rounding: with n sources eps acts as n**2 eps, beside mean squares of about one.
    assert oracles.relative_error(logits, expected.logits) <= 1e-4


@each_attention_residual
def test_at_first_only_the_very_first_query_has_no_gradient(config):
    # That read has one source, the embedding, and is the identity whatever its query.
    params = new_params(config)
    logits, grads = logits_and_gradients(config)(params, tokens(), cotangent())
    assert np.isfinite(logits).all()
    queries = np.concatenate([grads["reads"]["query"], grads["final_read"]["query"][None]])
    has_gradient = [bool((np.abs(row) > 0).any()) for row in queries]
    assert has_gradient == [False] + [True] * (2 * config.num_layers)
    assert (queries[0] == 0).all()
    # Gains are multiplied by queries: their gradients are zero, not missing or NaN.
    assert (np.asarray(grads["reads"]["gain"]) == 0).all()
    assert (np.asarray(grads["final_read"]["gain"]) == 0).all()


@pytest.mark.parametrize(
    "config", [c for c in MODELS.values() if not c.tie_embeddings], ids=lambda c: c.residual
)
def test_no_logit_depends_on_a_later_token(config):
    # Every token is another row of the table, whose gradient is zero if the token is not seen.
    params = reference.random_params(config)
    distinct = np.arange(B * T, dtype=np.int32).reshape(B, T)
    for t in range(T):
        at_t = np.zeros((B, T, V), np.float32)
        at_t[:1, t] = cotangent()[:1, t]
        _, grads = logits_and_gradients(config)(params, distinct, at_t)
        touched = (np.asarray(grads["embedding_table"]) != 0).any(1)
        assert [bool(x) for x in touched] == [i <= t for i in range(V)]


@pytest.mark.parametrize("source", [0, 1, 2])
def test_logits_follow_the_source_that_the_final_query_selects(source):
    # The final read comes before the final norm and the head, and has a query of its own.
    config = ATTENTION_RESIDUALS["block size 4 leaves a short last block"]
    params = reference.random_params(config)
    sources = reference.run(config, params, tokens(), cotangent()).sources[-1]
    assert sources.shape == (3, B, T, config.width)
    at_one_token = sources[:, 0, 0]
    keys = oracles.rms_norm(at_one_token, np.ones(config.width), config.norm_eps)
    query = np.linalg.lstsq(keys, 20.0 * (np.arange(3) == source))[0]
    params["final_read"] = {
        "query": query.astype(np.float32),
        "gain": np.ones(config.width, np.float32),
    }
    logits, _ = assert_matches_the_reference(config, params)
    gain = oracles.float64(params["final_norm"]["gain"])
    normed = oracles.rms_norm(at_one_token[source], gain, config.norm_eps)
    expected = normed @ oracles.float64(params["head_kernel"])
    assert oracles.relative_error(logits[0, 0], expected) <= 1e-5
