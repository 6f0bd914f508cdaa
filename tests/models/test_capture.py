"""What the reads did, as the model's own forward pass reports it."""

import numpy as np
import pytest

from tests import oracles
from tests.models import reference
from tests.models.programs import (
    MODELS,
    B,
    T,
    cotangent,
    logits_and_capture,
    logits_and_gradients,
    tiny,
    tokens,
    with_zero_queries,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

CAPTURED = {
    name: MODELS[name]
    for name in [
        "standard, untied head, one key-value head for each head",
        "full, untied head",
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
    without, _ = logits_and_gradients(config)(params, tokens(), cotangent())
    assert oracles.relative_error(logits, without) <= 2e-6

    assert captured.keys() == {"depth_weights", "hidden_norm"}
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
    "block_size, counts",
    [
        (1, [1, 2, 3, 4, 5, 6, 7]),
        (2, [1, 2, 2, 3, 3, 4, 4]),
        (4, [1, 2, 2, 2, 2, 3, 3]),
        (8, [1, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_zero_queries_weigh_every_source_alike(block_size, counts):
    config = tiny(block_size=block_size)
    params = with_zero_queries(reference.random_params(config))
    _, captured = logits_and_capture(config)(params, tokens())
    assert [len(weights) for weights in captured["depth_weights"]] == counts
    for weights in captured["depth_weights"]:
        np.testing.assert_allclose(
            weights, np.full((len(weights), B, T), 1 / len(weights)), rtol=1e-6
        )
