"""Every rule of the model's settings, the message where one is broken, and the presets."""

import dataclasses
import math

import jax.numpy as jnp
import pytest
from flax import nnx

from attnres_jax import ModelConfig, TransformerLM
from attnres_jax.models.presets import scaling_law_model
from tests.models.programs import tiny

WHOLE_NUMBERS = [
    "vocab_size",
    "width",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "feed_forward_width",
    "block_size",
    "reads_per_group",
]


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize("field", WHOLE_NUMBERS)
def test_counts_are_whole_numbers_of_at_least_one(field, value):
    with pytest.raises(ValueError) as error:
        tiny(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}: ") and "at least 1" in message and repr(value) in message


@pytest.mark.parametrize(
    "field", ["vocab_size", "width", "num_layers", "num_heads", "feed_forward_width", "block_size"]
)
def test_counts_without_a_default_meaning_cannot_be_none(field):
    with pytest.raises(ValueError, match=f"{field}: .*None"):
        tiny(**{field: None})


@pytest.mark.parametrize("value", [0.0, -1e-6, math.inf, math.nan, None, "1e-6"])
@pytest.mark.parametrize("field", ["norm_eps", "embedding_std", "rope_theta"])
def test_scales_are_positive_and_finite_numbers(field, value):
    with pytest.raises(ValueError, match=f"^{field}: .*{value}"):
        tiny(**{field: value})


@pytest.mark.parametrize(
    "field, value, choices",
    [
        ("residual", "blocks", ["standard", "full", "block"]),
        ("residual", None, ["standard", "full", "block"]),
        ("compute_dtype", "bf16", ["float32", "bfloat16", "float16"]),
        ("compute_dtype", jnp.bfloat16, ["float32", "bfloat16", "float16"]),
        ("remat", "all", ["none", "block", "full"]),
        ("remat", True, ["none", "block", "full"]),
    ],
)
def test_an_unknown_choice_lists_the_choices(field, value, choices):
    with pytest.raises(ValueError) as error:
        tiny(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}: ") and repr(value) in message
    assert all(choice in message for choice in choices)


@pytest.mark.parametrize("value", ["False", 0, None])
@pytest.mark.parametrize("field", ["tie_embeddings", "float32_partial_sum", "retrofit"])
def test_switches_are_booleans(field, value):
    # The string "False" is true: taking it would turn on what was meant to be off.
    with pytest.raises(ValueError, match=f"^{field}: .*{value}"):
        tiny(**{field: value})


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"num_heads": 3, "num_kv_heads": None, "head_width": None},
            ["num_heads=3", "width=16", "head_width"],
        ),
        ({"head_width": 5}, ["head_width=5", "even"]),
        # Not set, but as odd: 12 / 4.
        ({"width": 12, "head_width": None}, ["head_width=3", "even", "set head_width"]),
        ({"num_kv_heads": 3}, ["num_kv_heads=3", "num_heads=4"]),
        ({"num_kv_heads": 8}, ["num_kv_heads=8", "num_heads=4"]),
        ({"residual": "standard", "retrofit": True}, ["retrofit", "standard"]),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_together_are_named(changes, words):
    with pytest.raises(ValueError) as error:
        tiny(**changes)
    assert all(word in str(error.value) for word in words)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="attn_res_block_size"):
        tiny(attn_res_block_size=4)


def test_a_config_is_frozen_and_hashable():
    config = tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 32
    assert hash(config) == hash(tiny())


def test_heads_and_head_widths_may_be_left_to_the_width():
    config = ModelConfig(vocab_size=7, width=12, num_layers=1, num_heads=3, feed_forward_width=8)
    shapes = parameter_shapes(config)
    assert shapes["attention.query_kernel"] == (1, 12, 3, 4)
    assert shapes["attention.key_kernel"] == (1, 12, 3, 4)


def parameter_shapes(config):
    abstract = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    return {".".join(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}


# Attention Residuals, arXiv:2603.15031, scaling table: layers, heads and width.
SCALING_TABLE = {
    "194m": (12, 12, 896),
    "241m": (13, 13, 960),
    "296m": (14, 14, 1024),
    "436m": (16, 16, 1168),
    "528m": (17, 17, 1264),
}


@pytest.mark.parametrize("residual", ["standard", "full", "block"])
@pytest.mark.parametrize("name", SCALING_TABLE)
def test_scaling_law_models_have_the_sizes_of_the_paper(name, residual):
    config = scaling_law_model(name, vocab_size=11, residual=residual)
    assert (config.num_layers, config.num_heads, config.width) == SCALING_TABLE[name]
    shapes = parameter_shapes(config)
    assert shapes.pop("embedding_table") == (11, config.width)
    count = sum(math.prod(shape) for shape in shapes.values())
    assert count == pytest.approx(1e6 * int(name.removesuffix("m")), rel=0.01)


def test_scaling_law_models_take_other_fields():
    config = scaling_law_model("436m", vocab_size=11)
    # Eight blocks.
    assert 2 * config.num_layers / config.block_size == 8
    changed = scaling_law_model("436m", vocab_size=11, block_size=2, compute_dtype="bfloat16")
    assert changed == dataclasses.replace(config, block_size=2, compute_dtype="bfloat16")


def test_an_unknown_scaling_law_model_lists_the_known_ones():
    with pytest.raises(ValueError) as error:
        scaling_law_model("437m", vocab_size=11)
    assert "437m" in str(error.value)
    assert all(name in str(error.value) for name in SCALING_TABLE)


def test_a_scaling_law_model_needs_a_vocabulary():
    with pytest.raises(TypeError, match="vocab_size"):
        scaling_law_model("194m")
