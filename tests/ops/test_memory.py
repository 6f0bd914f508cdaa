"""What the derivatives keep, and what the compiled programs hold: scalars per token, no stack."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.ops import Bank, depth_attention, inter_block, merge, rms_norm

N, B, T, D = 5, 2, 16, 128
DTYPES = [jnp.float32, jnp.bfloat16]


def ones(*shape, dtype):
    return jnp.ones(shape, dtype)


def sources_of(dtype, n=N):
    return tuple(jnp.full((B, T, D), i + 1.0, dtype) for i in range(n))


def kept_arrays(function, *inputs, jit):
    """Arrays that `jax.vjp` keeps, those of the inputs included."""
    _, pullback = jax.vjp(jax.jit(function) if jit else function, *inputs)
    return [leaf for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]


def assert_only_scalars_besides(kept, n_wide, dtype, n_scalars):
    """At most n_wide arrays `[b, t, d]` in `dtype`, and n_scalars floats for each token."""
    wide = [x for x in kept if x.size >= B * T * D]
    assert all(x.shape == (B, T, D) and x.dtype == dtype for x in wide), wide
    assert len(wide) <= n_wide
    vectors = [x for x in kept if x.ndim in (1, 2) and x.shape[-1] == D]
    narrow = sum(x.size for x in kept) - sum(x.size for x in [*wide, *vectors])
    assert narrow <= n_scalars * B * T + 16  # and constants


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_read_keeps_its_sources_and_scalars(dtype, jit):
    vectors = ones(D, dtype=dtype), ones(D, dtype=dtype)
    kept = kept_arrays(depth_attention, sources_of(dtype), *vectors, jit=jit)
    # Inverse RMS and logit of each source, and the log-sum-exp.
    assert_only_scalars_besides(kept, N, dtype, 2 * N + 1)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_reads_keeps_its_sources_and_scalars(dtype, jit):
    n_reads = 4
    vectors = ones(n_reads, D, dtype=dtype), ones(n_reads, D, dtype=dtype)
    kept = kept_arrays(inter_block, sources_of(dtype), *vectors, jit=jit)
    assert_only_scalars_besides(kept, N, dtype, N + n_reads * N + n_reads)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_keeps_its_two_sources_and_scalars(dtype, jit):
    output, partial_sum, update = sources_of(dtype, 3)
    vector = ones(D, dtype=dtype)

    def function(output, lse, partial_sum, update, query, gain, norm_gain):
        return merge(output, lse, partial_sum, update, query, gain, norm_gain_d=norm_gain)

    lse = jnp.zeros((B, T))
    inputs = (output, lse, partial_sum, update, vector, vector, vector)
    kept = kept_arrays(function, *inputs, jit=jit)
    assert_only_scalars_besides(kept, 2, dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bank_is_kept_once_and_in_its_dtype(dtype):
    values = jnp.ones((N, B, T, D), dtype)
    vector = ones(D, dtype=dtype)

    def function(values, query, gain):
        return depth_attention(Bank(values, jnp.int32(3)), query, gain)

    kept = kept_arrays(function, values, vector, vector, jit=True)
    assert sum(x.nbytes for x in kept) <= 1.2 * values.nbytes


def block_of_sublayers(sources, queries, gains, norm_gains):
    """A block of sub-layers whose own activations are recomputed."""
    outputs, lse = inter_block(sources, queries, gains)
    sublayer = jax.checkpoint(jnp.tanh)
    first_norm = jax.checkpoint(functools.partial(rms_norm, eps=1e-6))
    update = sublayer(first_norm(outputs[0], norm_gains[0]))
    partial_sum = None
    for s in range(1, len(outputs)):
        partial_sum, hidden = merge(
            outputs[s],
            lse[s],
            partial_sum,
            update,
            queries[s],
            gains[s],
            norm_gain_d=norm_gains[s],
        )
        update = sublayer(hidden)
    return partial_sum + update


@pytest.mark.parametrize("jit", [False, True])
def test_a_block_keeps_three_activations_for_each_sublayer(jit):
    # The phase-1 output, the partial sum and the sub-layer's input.
    n_reads, dtype = 6, jnp.bfloat16
    vectors = [jnp.ones((n_reads, D), dtype)] * 3
    kept = kept_arrays(block_of_sublayers, sources_of(dtype), *vectors, jit=jit)
    wide = [x for x in kept if x.size >= B * T * D]
    assert all(x.shape == (B, T, D) and x.dtype == dtype for x in wide)
    assert len(wide) <= N + 3 * n_reads


def array_sizes(text, dtype):
    """Element counts of all arrays of a dtype that a program's text mentions."""
    if "stablehlo" in text:
        shapes = [m.split("x") for m in re.findall(rf"tensor<((?:\d+x)+){dtype}>", text)]
        shapes = [shape[:-1] for shape in shapes]
    else:
        shapes = [m.split(",") for m in re.findall(rf"\b{dtype}\[([\d,]+)\]", text)]
    return [math.prod(map(int, shape)) for shape in shapes]


def read_program(form):
    def loss(sources, queries, gains):
        if form == "direct":
            return depth_attention(sources, queries[0], gains[0]).astype(jnp.float32).sum()
        outputs, lse = inter_block(sources, queries, gains)
        total = lse.sum()
        for s, output in enumerate(outputs):
            summed, hidden = merge(output, lse[s], sources[0], output, queries[s], gains[s])
            total += (hidden * summed).astype(jnp.float32).sum()
        return total

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("form", ["direct", "two phases"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_a_tuple_hold_no_stack_of_sources(dtype, form):
    vectors = [jnp.ones((3, D), dtype)] * 2
    lowered = read_program(form).lower(sources_of(dtype), *vectors)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        # Two sources side by side would be a beginning of a stack.
        for name in ("f32", "bf16"):
            assert max(array_sizes(text, name), default=0) < 2 * B * T * D
        for line in text.splitlines():
            if re.search(r" concatenate\(|stablehlo\.concatenate", line):
                # Of scalars for each token at most.
                assert all(size < B * T * D for size in array_sizes(line, r"(?:f32|bf16)"))


def test_the_program_of_a_bank_holds_no_float32_copy_of_it():
    values = jnp.ones((N, B, T, D), jnp.bfloat16)

    def loss(values, query, gain):
        output = depth_attention(Bank(values, jnp.int32(3)), query, gain)
        return output.astype(jnp.float32).sum()

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    vector = ones(D, dtype=jnp.bfloat16)
    text = program.lower(values, vector, vector).as_text()
    assert max(array_sizes(text, "f32")) < 2 * B * T * D
    assert max(array_sizes(text, "bf16")) == values.size
