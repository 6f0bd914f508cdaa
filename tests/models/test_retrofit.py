"""Standard-residual weights in a model with Attention Residuals: what the mean of sources does."""

import jax
import numpy as np
import pytest
from flax import nnx

from attnres_jax.models.retrofit import retrofit
from tests import oracles
from tests.models import reference
from tests.models.programs import (
    STANDARD,
    cotangent,
    logits_of,
    new_params,
    tiny,
    tokens,
    with_zero_queries,
    without_reads,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def state_of(params):
    """Nested dicts as `nnx.split(model, nnx.Param)[1]` has them."""
    return nnx.from_flat_state(
        [(tuple(name.split(".")), nnx.Param(leaf)) for name, leaf in reference.leaves(params)]
    )


def standard_logits(config, params):
    """float64 logits of the standard-residual model with the weights of another."""
    setting = reference.setting(2 * config.num_layers, None, config.norm_eps)
    return reference.run(config, params, tokens(), cotangent(), setting).logits


def weights_with_small_outputs(config):
    """A new model whose sub-layers write about as little as the embedding holds."""
    params = new_params(config)
    for kind, name in (("attention", "output_kernel"), ("feed_forward", "down_kernel")):
        params[kind] = params[kind] | {name: params[kind][name] * np.float32(0.03)}
    return params


def test_eps_beside_a_small_embedding_parts_zero_queries_from_the_standard_model():
    # A read of n sources returns 1 / n of the residual stream, so eps weighs n**2 times as much. It
    # is no rounding error, and does not go away by itself: models that need the equality retrofit.
    config = tiny(residual="full", norm_eps=1e-5, embedding_std=0.02)
    for make_weights, least, most in [
        (new_params, 1e-5, 1e-2),
        (weights_with_small_outputs, 0.02, 0.6),
    ]:
        params = make_weights(config)
        logits = logits_of(config)(params, tokens())
        deviation = oracles.relative_error(logits, standard_logits(config, params))
        assert least < deviation < most
        retrofitted = tiny(residual="full", norm_eps=1e-5, embedding_std=0.02, retrofit=True)
        logits = logits_of(retrofitted)(params, tokens())
        assert oracles.relative_error(logits, standard_logits(config, params)) <= 1e-5


# Block sizes that end inside a layer, leave a short block, and exceed the six sub-layers. An eps as
# large as the mean squares shows a single norm that takes another one.
@pytest.mark.parametrize(
    "changes",
    [
        {"residual": "full"},
        {"block_size": 3, "reads_per_group": 2},
        {"block_size": 4},
        {"block_size": 8},
    ],
    ids=str,
)
def test_a_retrofitted_model_starts_as_the_standard_model_to_rounding(changes):
    old = tiny(residual="standard", norm_eps=0.3)
    params = reference.random_params(old)
    config, new, added = retrofit(old, state_of(params), **changes)
    assert config == tiny(norm_eps=0.3, retrofit=True, **{"residual": "block"} | changes)
    assert sorted(added) == ["final_read.gain", "final_read.query", "reads.gain", "reads.query"]
    new = nnx.to_pure_dict(new)
    for part in ("reads", "final_read"):
        assert (np.asarray(new[part]["query"]) == 0).all()
        assert (np.asarray(new[part]["gain"]) == 1).all()
    jax.tree.map(np.testing.assert_array_equal, without_reads(new), params)
    logits = logits_of(config)(new, tokens())
    assert oracles.relative_error(logits, standard_logits(old, params)) <= 1e-5


def test_a_retrofitted_model_keeps_its_eps_also_when_its_queries_move():
    config = tiny(block_size=4, norm_eps=0.3, retrofit=True)
    params = reference.random_params(config, query_scale=2.0)
    expected = reference.run(config, params, tokens(), cotangent()).logits
    logits = logits_of(config)(params, tokens())
    assert oracles.relative_error(logits, expected) <= 1e-5


def test_without_retrofit_eps_is_the_same_in_every_norm():
    config = tiny(block_size=4, norm_eps=0.3)
    params = reference.random_params(config, query_scale=2.0)
    expected = reference.run(config, params, tokens(), cotangent()).logits
    logits = logits_of(config)(params, tokens())
    assert oracles.relative_error(logits, expected) <= 1e-5


def test_untied_heads_are_carried_over():
    params = reference.random_params(STANDARD)
    config, new, added = retrofit(STANDARD, state_of(params), block_size=2)
    assert not config.tie_embeddings and len(added) == 4
    np.testing.assert_array_equal(nnx.to_pure_dict(new)["head_kernel"], params["head_kernel"])


def test_the_parameters_given_are_not_changed():
    params = state_of(reference.random_params(STANDARD))
    names = [path for path, _ in nnx.to_flat_state(params)]
    retrofit(STANDARD, params)
    assert [path for path, _ in nnx.to_flat_state(params)] == names


def test_a_checkpoint_of_plain_arrays_is_taken_too():
    params = reference.random_params(STANDARD)
    _, new, _ = retrofit(STANDARD, nnx.State(params))
    jax.tree.map(np.testing.assert_array_equal, without_reads(nnx.to_pure_dict(new)), params)


def test_reads_that_are_given_are_kept_and_not_listed():
    params = reference.random_params(tiny(residual="block", tie_embeddings=False))
    params["final_read"] = params.pop("final_read")
    old = tiny(residual="standard", tie_embeddings=False)
    _, new, added = retrofit(old, state_of(params))
    assert added == []
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(new), params)


def test_a_missing_leaf_is_named():
    params = reference.random_params(STANDARD)
    del params["feed_forward"]["up_kernel"]
    with pytest.raises(ValueError, match=r"feed_forward\.up_kernel: missing"):
        retrofit(STANDARD, state_of(params))


def test_unknown_leaves_are_named():
    params = reference.random_params(STANDARD)
    params["router"] = {"kernel": np.ones((2, 2), np.float32)}
    params["attention"]["bias"] = np.ones(3, np.float32)
    with pytest.raises(ValueError) as error:
        retrofit(STANDARD, state_of(params))
    assert "router.kernel" in str(error.value) and "attention.bias" in str(error.value)


def test_a_leaf_of_another_shape_is_named_with_both_shapes():
    params = reference.random_params(STANDARD)
    params["embedding_table"] = np.ones((5, 16), np.float32)
    with pytest.raises(ValueError, match=r"embedding_table: .*\[13, 16\].*\[5, 16\]"):
        retrofit(STANDARD, state_of(params))


@pytest.mark.parametrize("residual", ["full", "block"])
def test_only_a_standard_model_can_be_retrofitted(residual):
    config = tiny(residual=residual)
    with pytest.raises(ValueError, match=f"standard.*{residual}"):
        retrofit(config, state_of(reference.random_params(config)))


def test_a_standard_model_is_no_retrofit():
    with pytest.raises(ValueError, match="retrofit"):
        retrofit(STANDARD, state_of(reference.random_params(STANDARD)), residual="standard")


def test_zero_queries_of_any_weights_are_what_retrofit_makes():
    config, new, _ = retrofit(STANDARD, state_of(reference.random_params(STANDARD)))
    expected = with_zero_queries(reference.random_params(config))
    assert [(name, leaf.shape) for name, leaf in reference.leaves(nnx.to_pure_dict(new))] == [
        (name, leaf.shape) for name, leaf in reference.leaves(expected)
    ]
