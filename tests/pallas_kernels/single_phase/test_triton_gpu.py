"""The single-phase Triton kernels against the float64 oracle, in Triton's interpreter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge.triton_tiling import choose_tiling
from tests import oracles
from tests.pallas_kernels import interpreter

with interpreter.interpreted():
    from pallas_kernels import triton_launch
    from pallas_kernels.single_phase import triton_gpu

EPS, NORM_EPS = 1e-6, 1e-5
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setattr(triton_gpu, "launch", interpreter.launch)
    monkeypatch.setattr(triton_launch, "launch", interpreter.launch)


def assert_close(actual, expected, dtype, name, tolerance):
    """float32 to the tolerance; half precision to 1.05 times the error of rounding once."""
    assert actual.dtype == dtype, name
    error = oracles.relative_error(actual, expected)
    if dtype == jnp.float32:
        assert error <= tolerance, f"{name}: relative error {error}"
    else:
        floor = oracles.rounding_floor(expected, np.dtype(dtype))
        assert error <= 1.05 * floor, f"{name}: {error / floor:.3f} times the rounding floor"


def run(n, t, d, dtype, sum_dtype=None, *, terms="both", with_norm=True, accumulate=False, **tile):
    sum_dtype = sum_dtype or dtype
    values = tuple(jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(n))
    update = jnp.asarray(oracles.normal(11, t, d), dtype)
    partial_sum = jnp.asarray(oracles.normal(12, t, d), sum_dtype)
    folded = jnp.asarray(2 * oracles.normal(14, d) / np.sqrt(d), F32)
    norm_gain = jnp.asarray(1 + 0.3 * oracles.normal(15, d), F32) if with_norm else None
    if terms == "update":
        partial_sum = None
    if terms == "partial_sum":
        update = None
    total = sum(oracles.float64(x) for x in (partial_sum, update) if x is not None)
    rounded = total.astype(np.float32).astype(np.dtype(sum_dtype))

    def tiling(backward):
        chosen = choose_tiling(
            t, d, dtype, compute_capability=90, backward=backward, single_phase=True
        )
        return dataclasses.replace(chosen, **({"row_tokens": 32} if backward else {}) | tile)

    summed, hidden, statistics = triton_gpu.forward(
        *(values, partial_sum, update, folded, norm_gain),
        eps=EPS,
        norm_eps=NORM_EPS,
        tiling=tiling(False),
    )
    query, gain = oracles.float64((folded, norm_gain))
    sources = [*oracles.float64(values), oracles.float64(rounded)]
    read = oracles.read(sources, query, np.ones(d), EPS)
    right = read.output if gain is None else oracles.rms_norm(read.output, gain, NORM_EPS)
    np.testing.assert_array_equal(summed, rounded)
    assert_close(hidden, right, dtype, "hidden", 1e-5)

    dsummed = jnp.asarray(oracles.normal(16, t, d), sum_dtype) if terms == "both" else None
    dhidden = jnp.asarray(oracles.normal(17, t, d), dtype)
    before = tuple(jnp.asarray(oracles.normal(20 + i, t, d), dtype) for i in range(n))
    dvalues, dsum, dfolded, dnorm_gain = triton_gpu.backward(
        *(values, summed, folded, norm_gain, statistics, dsummed, dhidden),
        dvalues=before if accumulate else None,
        tiling=tiling(True),
    )
    dread = oracles.float64(dhidden)
    if gain is None:
        assert dnorm_gain is None
    else:
        dread, dgain = oracles.rms_norm_gradients(read.output, gain, NORM_EPS, dread)
        assert_close(dnorm_gain, dgain, F32, "norm gain", 2e-5)
    grads = oracles.read_gradients(sources, query, np.ones(d), dread, eps=EPS)
    for i in range(n):
        one = grads.sources[i] + (oracles.float64(before[i]) if accumulate else 0)
        assert_close(dvalues[i], one, dtype, f"source {i}", 2e-5)
    one = grads.sources[n] + (0 if dsummed is None else oracles.float64(dsummed))
    assert_close(dsum, one, sum_dtype, "sum", 2e-5)
    assert_close(dfolded, grads.query, F32, "query", 2e-5)
    return dvalues, dsum, dfolded, dnorm_gain


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("t, d", [(7, 100), (129, 40), (5, 7), (3, 1168), (1, 7168)])
def test_values_and_gradients(n, t, d, dtype):
    run(n, t, d, dtype)


@pytest.mark.parametrize("n", [1, 2])
def test_variants(n):
    run(n, 5, 64, BF16, F32)
    run(n, 5, 64, F32, with_norm=False)
    run(n, 5, 64, BF16, accumulate=True)
    run(n, 5, 64, BF16, terms="update")
    run(n, 5, 64, F32, terms="partial_sum", with_norm=False, accumulate=True)


def test_parameter_gradients_of_many_rows_are_the_same_every_time():
    first, second = (run(2, 150, 48, BF16) for _ in range(2))
    for a, b in zip(first[1:], second[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [0, 3])
def test_other_numbers_of_sources_are_refused(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        run(n, 5, 64, F32) if n else triton_gpu._check(())
