"""Input that does not fit is refused with the argument's name, before anything is compiled."""

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.ops import Bank, depth_attention, inter_block, merge

T, D = 3, 4


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


BAD_SOURCES = {
    "none": ([], "sources"),
    "empty tuple": ((), "sources"),
    "one stacked array": (zeros(2, T, D), "sources.*Bank"),
    "unlike shapes": ([zeros(T, D), zeros(T + 1, D)], r"sources\[1\]"),
    "unlike widths": ([zeros(T, D), zeros(T, D), zeros(T, D + 1)], r"sources\[2\]"),
    "unlike ranks": ([zeros(T, D), zeros(1, T, D)], r"sources\[1\]"),
    "unlike dtypes": ([zeros(T, D), zeros(T, D, dtype=jnp.bfloat16)], r"sources\[1\].*bfloat16"),
    "integers": ([zeros(T, D, dtype=jnp.int32)], "sources.*int32"),
    "no width axis": ([zeros(), zeros()], "sources"),
    "bank without rows": (Bank(zeros(0, T, D), jnp.int32(1)), "sources.*bank"),
    "bank of integers": (Bank(zeros(2, T, D, dtype=jnp.int32), jnp.int32(1)), "sources.*int32"),
    "bank without a width axis": (Bank(zeros(2), jnp.int32(1)), "sources"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_depth_attention_refuses_sources(case):
    sources, message = BAD_SOURCES[case]
    with pytest.raises(ValueError, match=f"(?i){message}"):
        depth_attention(sources, zeros(D), zeros(D))


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_inter_block_refuses_sources(case):
    sources, message = BAD_SOURCES[case]
    with pytest.raises(ValueError, match=f"(?i){message}"):
        inter_block(sources, zeros(2, D), zeros(2, D))


@pytest.mark.parametrize("shape", [(), (D + 1,), (1, D), (D, 1)])
@pytest.mark.parametrize("name", ["query_d", "gain_d"])
def test_depth_attention_refuses_vectors(name, shape):
    vectors = {"query_d": zeros(D), "gain_d": zeros(D), name: zeros(*shape)}
    with pytest.raises(ValueError, match=name):
        depth_attention([zeros(T, D)], **vectors)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("query_sd", (D,)),
        ("query_sd", (0, D)),
        ("query_sd", (2, D + 1)),
        ("query_sd", (1, 2, D)),
        ("gain_sd", (D,)),
        ("gain_sd", (1, D)),
        ("gain_sd", (3, D)),
        ("gain_sd", (2, D + 1)),
    ],
)
def test_inter_block_refuses_vectors(name, shape):
    vectors = {"query_sd": zeros(2, D), "gain_sd": zeros(2, D), name: zeros(*shape)}
    with pytest.raises(ValueError, match=name):
        inter_block([zeros(T, D)], **vectors)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("partial_sum", (T, D + 1)),
        ("partial_sum", (1, T, D)),
        ("update", (T + 1, D)),
        ("update", (D,)),
        ("lse", (T + 1,)),
        ("lse", (1, T)),
        ("lse", (T, 1)),
        ("query_d", (D + 1,)),
        ("query_d", (1, D)),
        ("gain_d", ()),
        ("norm_gain_d", (D - 1,)),
        ("norm_gain_d", (1, D)),
    ],
)
def test_merge_refuses_shapes(name, shape):
    arguments = {
        "output": zeros(T, D),
        "lse": zeros(T),
        "partial_sum": zeros(T, D),
        "update": zeros(T, D),
        "query_d": zeros(D),
        "gain_d": zeros(D),
        "norm_gain_d": zeros(D),
        name: zeros(*shape),
    }
    with pytest.raises(ValueError, match=name):
        merge(**arguments)


def test_merge_refuses_a_block_without_outputs():
    with pytest.raises(ValueError, match=r"partial_sum.*update"):
        merge(zeros(T, D), zeros(T), None, None, zeros(D), zeros(D))


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="query_d"):
        jax.eval_shape(depth_attention, [zeros(T, D)], zeros(D + 1), zeros(D))
    with pytest.raises(ValueError, match="gain_sd"):
        jax.jit(inter_block).lower([zeros(T, D)], zeros(2, D), zeros(D))
