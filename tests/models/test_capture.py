"""What the reads did, as the model's own forward pass reports it."""

import jax
import numpy as np
import pytest

from tests import oracles
from tests.models import reference
from tests.models.programs import (
    MODELS,
    B,
    T,
    V,
    apply,
    cotangent,
    logits_and_capture,
    tiny,
    tokens,
    with_zero_queries,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

CAPTURED = {
    name: MODELS[name]
    for name in [
        "standard, untied head, one key-value head for each head",
        "block size 3 ends inside a layer, groups of two reads",
        "block size 6 scans within its one block",
    ]
}
each_model = pytest.mark.parametrize("config", CAPTURED.values(), ids=CAPTURED)


@each_model
def test_capturing_reports_weights_and_norms_and_leaves_the_logits_as_they_are(config):
    params = reference.random_params(config, query_scale=2.0)
    logits, captured = logits_and_capture(config)(params, tokens())
    expected = reference.run(config, params, tokens(), cotangent())
    assert oracles.relative_error(logits, expected.logits) <= 1e-5
    assert captured.keys() == {"depth_weights", "hidden_norm", "states", "finished"}
    assert captured["hidden_norm"].shape == (2 * config.num_layers + 1,)
    assert captured["hidden_norm"].dtype == np.float32
    np.testing.assert_allclose(captured["hidden_norm"], expected.hidden_norm, rtol=1e-5)
    if config.residual == "standard":
        assert captured["depth_weights"] == []
        return
    assert len(captured["depth_weights"]) == 2 * config.num_layers + 1
    for got, want in zip(captured["depth_weights"], expected.depth_weights, strict=True):
        assert got.shape == want.shape and got.dtype == np.float32
        np.testing.assert_allclose(got.sum(0), 1, rtol=1e-6)
        np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize(
    "config, counts",
    [
        (CAPTURED["block size 3 ends inside a layer, groups of two reads"], [1, 2, 2, 2, 3, 3, 3]),
        (CAPTURED["block size 6 scans within its one block"], [1, 2, 2, 2, 2, 2, 2]),
    ],
    ids=["block size 3", "block size 6"],
)
def test_zero_queries_weigh_every_source_alike(config, counts):
    params = with_zero_queries(reference.random_params(config))
    _, captured = logits_and_capture(config)(params, tokens())
    assert [len(weights) for weights in captured["depth_weights"]] == counts
    for weights in captured["depth_weights"]:
        even = np.full((len(weights), B, T), 1 / len(weights))
        np.testing.assert_allclose(weights, even, rtol=1e-6)


@pytest.mark.parametrize("residual", ["full", "block"])
def test_capturing_returns_a_read_for_each_norm(residual):
    config = tiny(residual=residual, num_layers=5, block_size=4)
    params = jax.eval_shape(lambda: reference.random_params(config))
    logits, captured = jax.eval_shape(
        lambda params: apply(config, params, tokens(), capture=True), params
    )
    # Ten sub-layers in blocks of 4, 4 and 2; in Full every output is a source.
    counts = {"full": range(1, 12), "block": [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]}[residual]
    assert [w.shape for w in captured["depth_weights"]] == [(n, B, T) for n in counts]
    assert logits.shape == (B, T, V) and captured["hidden_norm"].shape == (11,)
