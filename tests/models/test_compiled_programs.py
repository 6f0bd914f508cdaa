"""What the programs that XLA gets and makes hold: no stack of sources, no program per layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import depth_attention
from tests.models import reference
from tests.models.programs import apply, tiny

# A prime context, and sizes that occur once: the shape of an array says what it holds.
B, T, D, V = 2, 23, 40, 17
ACTIVATION = B * T * D


def wide(**changes):
    return tiny(
        vocab_size=V,
        width=D,
        num_heads=2,
        num_kv_heads=1,
        head_width=6,
        feed_forward_width=52,
        **changes,
    )


def step_of(config):
    """A loss and its gradients, as a training step has them."""

    def loss(params, tokens):
        logits = apply(config, params, tokens)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
        return -picked.mean()

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def lowered(config):
    params = jax.eval_shape(functools.partial(reference.random_params, config))
    with jax.numpy_dtype_promotion("standard"):
        return step_of(config).lower(params, jax.ShapeDtypeStruct((B, T), jnp.int32))


def shapes_of(text):
    """(dtype, shape) of all arrays that a line or a program mentions, in StableHLO or in HLO."""
    stablehlo = re.findall(r"tensor<((?:\d+x)+)(f32|bf16|f16)>", text)
    hlo = re.findall(r"\b(f32|bf16|f16)\[([\d,]+)\]", text)
    return {(dtype, tuple(map(int, dims.split("x")[:-1]))) for dims, dtype in stablehlo} | {
        (dtype, tuple(map(int, dims.split(",")))) for dtype, dims in hlo
    }


def activations(shape):
    """How many `[b, t, d]` an array holds, in any order of axes; 0 if it holds anything else."""
    size = int(np.prod(shape))
    return size // ACTIVATION if D in shape and size % ACTIVATION == 0 else 0


def stacks_in(text):
    return {shape for _, shape in shapes_of(text) if activations(shape) > 1}


def concatenated_activations(text):
    """The largest array of each line that concatenates whole activations."""
    return [
        max(map(activations, shapes))
        for line in text.splitlines()
        if re.search(r" concatenate\(|stablehlo\.concatenate", line)
        and any(map(activations, shapes := [shape for _, shape in shapes_of(line)]))
    ]


def assert_no_stack(text):
    assert stacks_in(text) == set()
    assert concatenated_activations(text) == []


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_training_step_holds_no_stack_of_sources(compute_dtype):
    # Blocks of two: nothing is scanned, so that nothing at all needs to be stacked.
    program = lowered(wide(block_size=2, num_layers=2, compute_dtype=compute_dtype))
    assert_no_stack(program.as_text())
    assert_no_stack(program.compile().as_text())


@pytest.mark.parametrize("compute_dtype, remat", [("float32", "none"), ("bfloat16", "full")])
def test_a_scan_stacks_its_own_reads_and_no_sources(compute_dtype, remat):
    # Twelve sub-layers after the first are six pairs; there are one and two finished sources.
    config = wide(block_size=13, num_layers=13, compute_dtype=compute_dtype, remat=remat)
    text = lowered(config).as_text()
    assert set(map(activations, stacks_in(text))) == {6}
    assert set(concatenated_activations(text)) == {6}


def stacking_read(sources, query, gain):
    """The read as the paper's pseudo-code has it."""
    values = jnp.stack(sources)
    keys = (
        values
        * jax.lax.rsqrt(jnp.square(values).mean(-1, keepdims=True) + 1e-6)
        * gain[(None,) * 3]
    )
    weights = jax.nn.softmax(jnp.einsum("d,nbtd->nbt", query, keys), axis=0)
    return jnp.einsum("nbt,nbtd->btd", weights, values)


@pytest.mark.parametrize("read", [depth_attention, stacking_read])
def test_the_check_finds_a_stack_of_sources(read):
    def loss(sources, query, gain):
        return jnp.square(read(sources, query, gain)).sum()

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    sources = tuple(jnp.ones((B, T, D)) for _ in range(3))
    text = program.lower(sources, jnp.ones(D), jnp.ones(D)).as_text()
    if read is depth_attention:
        assert_no_stack(text)
    else:
        assert (3, B, T, D) in stacks_in(text) and concatenated_activations(text)


def kept_of_step(config):
    """Shapes and dtypes of what the forward pass keeps, besides parameters."""
    params = jax.eval_shape(functools.partial(reference.random_params, config))

    def pullback_of(params, tokens):
        return jax.vjp(lambda params: apply(config, params, tokens), params)[1]

    with jax.numpy_dtype_promotion("standard"):
        kept = jax.eval_shape(pullback_of, params, jax.ShapeDtypeStruct((B, T), jnp.int32))
    return [leaf for leaf in jax.tree.leaves(kept) if leaf.ndim > 2 and leaf.size >= ACTIVATION]


def test_reads_keep_no_float32_activation_in_a_bfloat16_model():
    n_blocks, num_sublayers = 4, 12
    changes = {"num_layers": 6, "block_size": 3, "compute_dtype": "bfloat16"}
    kept, kept_by_standard = (
        [x for x in kept_of_step(wide(residual=residual, **changes)) if activations(x.shape)]
        for residual in ("block", "standard")
    )
    assert {x.shape for x in kept} == {(B, T, D)}
    assert all(x.dtype == jnp.bfloat16 for x in kept + kept_by_standard)
    # Each sub-layer's phase-1 output, normed input and, but for the first of a block, partial sum;
    # the head's input before and after its norm; the embedding and the block sums.
    of_sublayers = 3 * num_sublayers - n_blocks
    assert len(kept) <= of_sublayers + 2 + (1 + n_blocks)


def lines_of_program(num_layers, block_size):
    return len(lowered(tiny(num_layers=num_layers, block_size=block_size)).as_text().splitlines())


def test_the_program_grows_with_blocks_and_not_with_layers():
    of_eight_layers = lines_of_program(num_layers=8, block_size=8)
    assert lines_of_program(num_layers=12, block_size=12) <= 1.2 * of_eight_layers


@pytest.mark.parametrize("residual", ["standard", "full", "block"])
def test_one_program_serves_all_parameters_and_tokens_of_a_shape(residual):
    config = tiny(residual=residual, num_layers=1)
    traces = []

    @jax.jit
    def run(params, tokens):
        traces.append(1)
        return apply(config, params, tokens)

    for seed in range(3):
        params = reference.random_params(config, seed)
        run(params, np.full((1, 3), seed, np.int32))
    assert len(traces) == 1
