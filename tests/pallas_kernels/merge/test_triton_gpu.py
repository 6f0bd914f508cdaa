"""Phase 2's Triton kernels against the float64 oracle, in Triton's interpreter on the CPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge.triton_tiling import choose_tiling
from tests import oracles
from tests.pallas_kernels import interpreter

with interpreter.interpreted():
    from pallas_kernels import triton_launch
    from pallas_kernels.merge import triton_gpu

EPS, NORM_EPS = 1e-6, 1e-5
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setattr(triton_gpu, "launch", interpreter.launch)
    monkeypatch.setattr(triton_launch, "launch", interpreter.launch)


def tiling_for(t, d, dtype, *, backward, **changes):
    tiling = choose_tiling(t, d, dtype, compute_capability=90, backward=backward)
    return dataclasses.replace(tiling, **changes)


def assert_close(actual, expected, dtype, name, tolerance):
    """float32 to the tolerance; half precision to 1.05 times the error of rounding once."""
    assert actual.dtype == dtype, name
    error = oracles.relative_error(actual, expected)
    if dtype == jnp.float32:
        assert error <= tolerance, f"{name}: relative error {error}"
    else:
        floor = oracles.rounding_floor(expected, np.dtype(dtype))
        assert error <= 1.05 * floor, f"{name}: {error / floor:.3f} times the rounding floor"


def run(
    t,
    d,
    dtype,
    sum_dtype=None,
    *,
    terms="both",
    with_norm=True,
    with_dgate=True,
    with_dsummed=True,
    query_scale=2.0,
    lse_shift=0.0,
    **changes,
):
    """Runs both kernels and compares all that they return; returns the gradients."""
    sum_dtype = sum_dtype or dtype
    output, update = (jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(2))
    partial_sum = jnp.asarray(oracles.normal(2, t, d), sum_dtype)
    lse = jnp.asarray(lse_shift + oracles.normal(3, t), F32)
    folded = jnp.asarray(query_scale * oracles.normal(4, d) / np.sqrt(d), F32)
    norm_gain = jnp.asarray(1 + 0.3 * oracles.normal(5, d), F32) if with_norm else None
    if terms == "update":
        partial_sum = None
    if terms == "partial_sum":
        update = None
    total = sum(oracles.float64(x) for x in (partial_sum, update) if x is not None)
    rounded = total.astype(np.float32).astype(np.dtype(sum_dtype))

    tiling = tiling_for(t, d, dtype, backward=False, **changes)
    summed, hidden, gate, statistics = triton_gpu.forward(
        *(output, lse, partial_sum, update, folded, norm_gain),
        eps=EPS,
        norm_eps=NORM_EPS,
        tiling=tiling,
    )
    exact = *oracles.float64((output, lse, rounded, folded)), np.ones(d)
    gain = oracles.float64(norm_gain)
    expected = oracles.merge(*exact, gain, EPS, NORM_EPS)
    np.testing.assert_array_equal(summed, rounded)
    assert summed.dtype == sum_dtype
    assert_close(hidden, expected.hidden, dtype, "hidden", 1e-5)
    assert_close(gate, expected.gate, F32, "gate", 1e-5)

    dsummed = jnp.asarray(oracles.normal(6, t, d), sum_dtype) if with_dsummed else None
    dhidden = jnp.asarray(oracles.normal(7, t, d), dtype)
    dgate = jnp.asarray(oracles.normal(8, t), F32) if with_dgate else None
    found = triton_gpu.backward(
        *(output, summed, folded, norm_gain, statistics, dsummed, dhidden, dgate),
        tiling=tiling_for(t, d, dtype, backward=True, **{"row_tokens": 32} | changes),
    )
    right = oracles.merge_gradients(
        *exact,
        oracles.float64(dsummed) if with_dsummed else np.zeros((t, d)),
        *oracles.float64((dhidden, dgate)),
        gain,
        EPS,
        NORM_EPS,
    )
    rights = (right.output, right.lse, right.summed, right.query, right.norm_gain)
    dtypes = (dtype, F32, sum_dtype, F32, F32)
    names = ("output", "lse", "sum", "query", "norm gain")
    for actual, one, of, name in zip(found, rights, dtypes, names, strict=True):
        if one is None:
            assert actual is None
        else:
            assert_close(actual, one, of, name, 2e-5)
    return found


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "t, d", [(1, 2), (7, 100), (129, 40), (5, 7), (3, 33), (3, 1168), (2, 2304), (2, 7168)]
)
def test_values_and_gradients(t, d, dtype):
    run(t, d, dtype)


def test_width_one():
    # RMSNorm of one element is its sign up to eps, and so is the gradient through it.
    run(7, 1, F32, with_norm=False)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("d", [96, 33])
def test_a_float32_partial_sum_beside_half_precision(d, dtype):
    run(5, d, dtype, F32)
    run(5, d, dtype, F32, with_norm=False)


@pytest.mark.parametrize("terms", ["update", "partial_sum"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_term_is_the_sum(dtype, terms):
    run(5, 64, dtype, terms=terms)


@pytest.mark.parametrize("absent", ["with_norm", "with_dgate", "with_dsummed"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_may_be_absent(dtype, absent):
    run(5, 64, dtype, **{absent: False})


def test_gates_near_one():
    # Then 1 - gate, which scales the gradient to output, has no digits left; its own sigmoid has.
    run(5, 64, F32, lse_shift=-18.0)


@pytest.mark.parametrize("lse_shift", [-200.0, 200.0])
@pytest.mark.parametrize("query_scale", [2.0, 1e4])
def test_saturated_gates(query_scale, lse_shift):
    # Values are right and nothing is infinite; a gate of exactly one or zero has no gradient.
    t, d = 5, 64
    output, update = (jnp.asarray(oracles.normal(i, t, d), F32) for i in range(2))
    lse = jnp.full((t,), lse_shift, F32)
    folded = jnp.asarray(query_scale * oracles.normal(4, d) / np.sqrt(d), F32)
    _, hidden, gate, statistics = triton_gpu.forward(
        *(output, lse, None, update, folded, None),
        eps=EPS,
        norm_eps=NORM_EPS,
        tiling=tiling_for(t, d, F32, backward=False),
    )
    expected = oracles.merge(*oracles.float64((output, lse, update, folded)), np.ones(d), eps=EPS)
    assert_close(hidden, expected.hidden, F32, "hidden", 1e-5)
    assert np.all((gate >= 0) & (gate <= 1))
    found = triton_gpu.backward(
        *(output, update, folded, None, statistics, None, output, None),
        tiling=tiling_for(t, d, F32, backward=True),
    )
    for gradient in found[:4]:
        assert np.all(np.isfinite(gradient))


def test_parameter_gradients_of_many_rows_are_the_same_every_time():
    first, second = (run(150, 48, BF16, row_tokens=32) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tokens, half, chunks", [(1, 32, 1), (4, 8, 4), (16, 4, 7)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_tile(dtype, tokens, half, chunks):
    run(19, 56, dtype, tokens=tokens, half=half, chunks=chunks)


# --- The choice of a launch ----------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("d", [1, 100, 1168, 2304, 7168, 16384])
@pytest.mark.parametrize("t", [1, 8192, 10**6])
def test_tiles_cover_the_width(t, d, capability, backward):
    tiling = choose_tiling(t, d, BF16, compute_capability=capability, backward=backward)
    assert tiling.tokens * tiling.half == 128 * tiling.num_warps  # 16 bytes a thread
    assert tiling.chunks * 2 * tiling.half >= d
    assert tiling.row_tokens >= 80
    assert tiling.row_tokens % tiling.tokens == 0


@pytest.mark.parametrize("t", [8192, 2**17])
@pytest.mark.parametrize("d", [512, 1168, 2048, 2304, 7168])
def test_the_programs_of_few_tokens_and_of_many_keep_a_gpu_busy(d, t):
    tiling = choose_tiling(t, d, BF16, compute_capability=90, backward=True)
    programs = -(-t // tiling.row_tokens)
    # Twelve or more warps for each multiprocessor.
    assert programs * tiling.num_warps >= 12 * 132


@pytest.mark.parametrize(
    "d, dtype, capability, message",
    [
        (64, jnp.float64, 90, "float32, bfloat16 or float16"),
        (64, BF16, 75, "8.0 or newer"),
        (100_000, BF16, 90, "at most 65536 elements"),
    ],
)
def test_what_cannot_be_launched_is_refused(d, dtype, capability, message):
    with pytest.raises(ValueError, match=message):
        choose_tiling(64, d, dtype, compute_capability=capability, backward=True)


def test_tilings_are_checked():
    tiling = choose_tiling(64, 64, F32, compute_capability=90, backward=True)
    for change in ({"tokens": 3}, {"half": 2}, {"row_tokens": 24}):
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(tiling, **change)
