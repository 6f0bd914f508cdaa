"""The language model on kernels is the language model on XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_jax.models import transformer
from attnres_jax.modules import AttentionResidualStack
from tests import oracles
from tests.models import reference
from tests.models.programs import apply, cotangent, logits_and_gradients, tiny, tokens
from tests.pallas_kernels.programs import count_launches, equations

pytestmark = pytest.mark.usefixtures("quick_compilation")

KERNELS = {
    f"attnres_{phase}_{direction}"
    for phase in ("inter_block", "merge")
    for direction in ("forward", "backward")
}
MODELS = {
    "block": tiny(num_layers=2, block_size=3),
    "full": tiny(num_layers=1, residual="full", tie_embeddings=False),
    "block, recomputed, float32 partial sum": tiny(
        num_layers=1, block_size=2, remat="block", float32_partial_sum=True
    ),
}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def on(config, implementation):
    return dataclasses.replace(config, implementation=implementation)


@each_model
def test_logits_and_every_gradient_equal_those_of_xla(config):
    inputs = reference.random_params(config, query_scale=2.0), tokens(), cotangent()
    with pltpu.force_tpu_interpret_mode(True):
        logits, gradients = logits_and_gradients(on(config, "mosaic_tpu"))(*inputs)
    expected_logits, expected = logits_and_gradients(on(config, "xla"))(*inputs)
    assert oracles.relative_error(logits, expected_logits) <= 1e-5
    names = [name for name, _ in reference.leaves(expected)]
    assert "query" in " ".join(names)
    for (name, got), (_, want) in zip(
        reference.leaves(gradients), reference.leaves(expected), strict=True
    ):
        assert got.dtype == want.dtype
        assert oracles.relative_error(got, want) <= 2e-5, name
    # The very first read has one source.
    np.testing.assert_array_equal(gradients["reads"]["query"][0], np.zeros(config.width))


def launches_of_gradient(config):
    def loss(params):
        return jnp.square(apply(config, params, tokens())).sum()

    return count_launches(jax.value_and_grad(loss), reference.random_params(config))


@pytest.mark.parametrize(
    "config, num_groups", list(zip(MODELS.values(), [2, 2, 1], strict=True)), ids=MODELS
)
def test_the_gradient_is_computed_by_kernels(config, num_groups):
    found = launches_of_gradient(on(config, "mosaic_tpu"))
    assert found["attnres_inter_block_backward"] == num_groups + 1  # and the final read
    # Full has one sub-layer in a block, and no partial sum to merge.
    assert set(found) == {k for k in KERNELS if config.residual == "block" or "merge" not in k}
    # Without a name it is XLA on a CPU.
    for name in ("xla", None):
        assert not launches_of_gradient(on(config, name))


@pytest.mark.parametrize("name, constraints", [("mosaic_tpu", 2 * (4 + 2)), ("xla", 0)])
def test_through_kernels_sublayers_and_blocks_keep_rows_in_both_directions(name, constraints):
    """Four sub-layers, whose inputs, and two blocks, whose sums; and the cotangents of those."""
    config = tiny(num_layers=2, block_size=3, implementation=name)

    def loss(params):
        return jnp.square(apply(config, params, tokens())).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(reference.random_params(config))
    found = [e for e in equations(jaxpr) if e.primitive.name == "layout_constraint"]
    assert len(found) == constraints
    for equation in found:
        assert equation.outvars[0].aval.shape == (*tokens().shape, config.width)
        assert equation.params["layout"].major_to_minor == (0, 1, 2)


@pytest.mark.parametrize("name", ["pallas", "TPU", "", True])
def test_an_unknown_implementation_is_refused(name):
    with pytest.raises(ValueError, match=r"implementation: expected one of .*mosaic_tpu") as error:
        tiny(implementation=name)
    assert repr(name) in str(error.value)


def test_kernels_that_cannot_are_refused_before_compilation():
    config = tiny(implementation="mosaic_tpu", compute_dtype="float16")
    with pytest.raises(ValueError, match=r'implementation="mosaic_tpu": .*float16'):
        launches_of_gradient(config)


def test_a_stack_hands_its_implementation_on():
    stack = AttentionResidualStack([jnp.tanh] * 3, 16, block_size=2, implementation="mosaic_tpu")
    embedding = jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
    assert count_launches(stack, embedding) == {
        "attnres_inter_block_forward": 3,
        "attnres_merge_forward": 1,
    }


@pytest.mark.parametrize(
    "fields, without_zeros",
    [({}, 2), ({"float32_partial_sum": True}, 0), ({"block_size": 6}, 0)],
    ids=["short blocks", "a wider sum", "a scan"],
)
def test_a_first_merge_reads_zeros_only_where_a_scan_or_a_wider_sum_needs_them(
    monkeypatch, fields, without_zeros
):
    """Six sub-layers in two blocks, or in one that is scanned."""
    config = tiny(num_layers=3, block_size=3)
    config = dataclasses.replace(config, **fields)
    partial_sums, merge = [], transformer.merge

    def seen(output, lse, partial_sum, *arguments, **options):
        partial_sums.append(partial_sum)
        return merge(output, lse, partial_sum, *arguments, **options)

    monkeypatch.setattr(transformer, "merge", seen)
    jax.eval_shape(lambda params: apply(config, params, tokens()), reference.random_params(config))
    assert len(partial_sums) > 1
    assert sum(x is None for x in partial_sums) == without_zeros
