"""Phase 1's Triton kernels against the float64 oracle, in Triton's interpreter on the CPU.

This shows that the kernels compute the right values. That they compile is in
`tests/test_aot_gpu.py` and `tests/pallas_kernels/test_triton_aot.py`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.inter_block.triton_tiling import Step, Tiling, choose_tiling
from tests import oracles
from tests.pallas_kernels import interpreter

with interpreter.interpreted():
    from pallas_kernels import triton_launch
    from pallas_kernels.inter_block import triton_gpu

EPS = 1e-6
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setattr(triton_gpu, "launch", interpreter.launch)
    monkeypatch.setattr(triton_launch, "launch", interpreter.launch)


def tiling_for(n, dtype, **changes):
    tiling = choose_tiling(n, 3, 64, dtype, compute_capability=90)
    few = {  # Few programs to interpret.
        name: dataclasses.replace(getattr(tiling, name), columns=512)
        for name in ("forward", "backward", "query_gradients")
    }
    return dataclasses.replace(tiling, **{"row_tokens": 32, **few} | changes)


class Case:
    """Inputs and what the oracle makes of them."""

    def __init__(self, n, s, t, d, dtype, *, query_scale=2.0, dweights=False):
        self.dtype = np.dtype(dtype)
        self.values = tuple(jnp.asarray(oracles.normal(i, t, d), dtype) for i in range(n))
        folded = query_scale * oracles.normal(200, s, d) / np.sqrt(d)
        self.folded = jnp.asarray(folded, jnp.float32)
        self.doutputs = tuple(jnp.asarray(oracles.normal(300 + i, t, d), dtype) for i in range(s))
        self.dlse = jnp.asarray(oracles.normal(400, s, t), jnp.float32)
        exact, ones = oracles.float64((self.values, self.folded)), np.ones((s, d))
        self.reads = oracles.group_read(*exact, ones, EPS)
        cotangents = oracles.float64((self.doutputs, self.dlse))
        self.dweights = oracles.normal(500, s, n, t) if dweights else None
        self.grads = oracles.group_read_gradients(*exact, ones, *cotangents, self.dweights, EPS)

    def forward(self, tiling, **options):
        return triton_gpu.forward(self.values, self.folded, eps=EPS, tiling=tiling, **options)

    def backward(self, statistics, tiling, **options):
        return triton_gpu.backward(
            *(self.values, self.folded, *statistics, self.doutputs, self.dlse),
            **({"eps": EPS, "tiling": tiling} | options),
        )

    def check_forward(self, found):
        outputs, lse, logits, _ = found
        weights = np.exp(np.float64(logits) - np.float64(lse)[:, None])
        for i, read in enumerate(self.reads):
            assert_close(outputs[i], read.output, f"output {i}")
        assert_close(lse, np.stack([read.lse for read in self.reads]), "lse")
        expected = np.stack([read.weights for read in self.reads])
        # A weight is the exponential of a difference of float32 logits.
        precision = max(1.0, float(np.abs(logits).max())) * np.finfo(np.float32).eps
        np.testing.assert_allclose(weights, expected, rtol=20 * precision, atol=20 * precision)

    def check_backward(self, found):
        dvalues, dfolded = found
        for i, right in enumerate(self.grads.sources):
            assert dvalues[i].dtype == self.dtype
            assert_close(dvalues[i], right, f"source {i}", tolerance=2e-5)
        assert_close(dfolded, self.grads.query, "query", tolerance=2e-5)


def assert_close(actual, expected, name, tolerance=1e-5):
    """float32 to the tolerance; half precision to 1.05 times the error of rounding once."""
    error = oracles.relative_error(actual, expected)
    if actual.dtype == jnp.float32:
        assert error <= tolerance, f"{name}: relative error {error}"
    else:
        floor = oracles.rounding_floor(expected, np.dtype(actual.dtype))
        assert error <= 1.05 * floor, f"{name}: {error / floor:.3f} times the rounding floor"


SHAPES = [
    # n, s, t, d
    (1, 1, 1, 1),
    (1, 3, 7, 100),
    (2, 1, 7, 96),
    (2, 1, 129, 40),
    (5, 4, 3, 7),
    (9, 12, 2, 256),
    (2, 24, 2, 64),
    (3, 2, 3, 1168),
    (2, 2, 1, 7168),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n, s, t, d", SHAPES)
def test_values_and_gradients(n, s, t, d, dtype):
    case, tiling = Case(n, s, t, d, dtype), tiling_for(n, dtype)
    found = case.forward(tiling)
    case.check_forward(found)
    case.check_backward(case.backward(found[1:], tiling))


@pytest.mark.parametrize("d", [100, 33])
def test_float16(d):
    case, tiling = Case(4, 3, 5, d, F16), tiling_for(4, F16)
    found = case.forward(tiling)
    case.check_forward(found)
    case.check_backward(case.backward(found[1:], tiling))


# FLA's test_attnres (L, B, T, D, scale, dtype) with the tokens cut down: its weights multiply
# normal queries, so that scale 1 saturates the softmax.
FLA = [
    (1, 1, 2, 4096, 1, F16),
    (3, 1, 2, 4096, None, F16),
    (15, 1, 1, 4096, 1, F16),
    (7, 1, 2, 1000, None, F16),
    (7, 1, 2, 2000, None, F16),
    (29, 1, 1, 4096, None, F16),
    (15, 1, 1, 7186, None, F16),
    (15, 1, 1, 7186, 1, F16),
    (29, 1, 1, 7186, None, F16),
    (10, 2, 1, 4096, None, F32),
]


@pytest.mark.parametrize("n, b, t, d, scale, dtype", FLA)
def test_shapes_of_flash_linear_attention(n, b, t, d, scale, dtype):
    query_scale = d**0.5 if scale == 1 else 1.0
    case = Case(n, 1, b * t, d, dtype, query_scale=query_scale)
    tiling = tiling_for(n, dtype)
    found = case.forward(tiling)
    case.check_forward(found)
    case.check_backward(case.backward(found[1:], tiling))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sources_shared_between_launches(dtype):
    case = Case(7, 3, 5, 64, dtype)
    tiling = tiling_for(7, dtype, sources_per_launch=3)
    found = case.forward(tiling)
    case.check_forward(found)
    case.check_backward(case.backward(found[1:], tiling))


def test_many_sources():
    case = Case(129, 1, 2, 32, BF16)
    tiling = tiling_for(129, BF16)
    found = case.forward(tiling)
    case.check_forward(found)
    case.check_backward(case.backward(found[1:], tiling))


@pytest.mark.parametrize("sources_per_launch", [16, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_bank_reads_no_row_past_its_count(count, sources_per_launch):
    n_max, s, t, d = 7, 3, 5, 64
    case = Case(count, s, t, d, BF16)
    tiling = tiling_for(n_max, BF16, sources_per_launch=sources_per_launch)
    rows = jnp.full((n_max, t, d), jnp.nan, BF16).at[:count].set(jnp.stack(case.values))
    number = jnp.asarray([count], jnp.int32)
    found = triton_gpu.forward(rows, case.folded, count=number, eps=EPS, tiling=tiling)
    outputs, lse, logits, r = found
    case.check_forward((outputs, lse, logits[:, :count], r))
    assert np.all(np.isneginf(logits[:, count:]))
    options = {"count": number, "eps": EPS, "tiling": tiling}
    arguments = (rows, case.folded, *found[1:], case.doutputs, case.dlse)
    dvalues, dfolded = triton_gpu.backward(*arguments, **options)
    case.check_backward((dvalues[:count], dfolded))
    assert not np.any(dvalues[count:])
    # Added in place, rows past the count keep what they had, NaN included.
    before = jnp.full((n_max, t, d), jnp.nan, BF16).at[:count].set(1)
    dvalues, dfolded = triton_gpu.backward(*arguments, dvalues=before, **options)
    for i, right in enumerate(case.grads.sources):
        assert_close(dvalues[i], 1 + right, f"source {i}")
    assert np.all(np.isnan(np.float32(dvalues[count:])))


def test_gradients_are_added_in_place_and_rounded_once():
    case = Case(4, 3, 5, 100, BF16)
    tiling = tiling_for(4, BF16)
    found = case.forward(tiling)
    before = tuple(jnp.asarray(oracles.normal(600 + i, 5, 100), BF16) for i in range(4))
    dvalues, _ = case.backward(found[1:], tiling, dvalues=before)
    for i, right in enumerate(case.grads.sources):
        assert_close(dvalues[i], oracles.float64(before[i]) + right, f"source {i}")


@pytest.mark.parametrize("sources_per_launch", [16, 2])
def test_cotangent_of_the_logits(sources_per_launch):
    """The gradient of the depth weights arrives as one of the logits and one of their lse."""
    case = Case(5, 2, 4, 64, F32, dweights=True)
    tiling = tiling_for(5, F32, sources_per_launch=sources_per_launch)
    found = case.forward(tiling)
    weights = np.stack([read.weights for read in case.reads])
    mean = (weights * case.dweights).sum(1, keepdims=True)
    dlogits = jnp.asarray(weights * (case.dweights - mean), jnp.float32)
    case.check_backward(case.backward(found[1:], tiling, dlogits_snt=dlogits))


def test_carry_joins_reads_of_other_sources():
    case = Case(6, 3, 5, 64, F32)
    tiling = tiling_for(3, F32)
    options = {"eps": EPS, "tiling": tiling}
    first = triton_gpu.forward(case.values[:2], case.folded, **options)
    second = triton_gpu.forward(case.values[2:], case.folded, carry=first[:2], **options)
    logits = jnp.concatenate([first[2], second[2]], axis=1)
    case.check_forward((*second[:2], logits, None))
    # Backward, each part gets the sum over all sources of weight and pull.
    delta = jnp.asarray(
        [
            (np.float64(do) * read.output).sum(-1)
            for do, read in zip(case.doutputs, case.reads, strict=True)
        ],
        jnp.float32,
    )
    parts = [
        triton_gpu.backward(
            *(values, case.folded, second[1], *statistics, case.doutputs, case.dlse),
            delta_st=delta,
            **options,
        )
        for values, statistics in ((case.values[:2], first[2:]), (case.values[2:], second[2:]))
    ]
    case.check_backward((parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]))


def test_one_source_is_the_identity_without_gradient_to_the_query():
    case, tiling = Case(1, 3, 9, 100, BF16), tiling_for(1, BF16)
    outputs, *statistics = case.forward(tiling)
    assert all(output is case.values[0] for output in outputs)  # and no copy of it
    _, dfolded = triton_gpu.backward(
        *(case.values, case.folded, *statistics, case.doutputs, None), eps=EPS, tiling=tiling
    )
    assert not np.any(dfolded)


def test_huge_logits():
    case = Case(5, 2, 6, 64, F32, query_scale=1e4)
    tiling = tiling_for(5, F32)
    found = case.forward(tiling)
    assert float(jnp.abs(found[2]).max()) > 1e4
    case.check_forward(found)
    dvalues, dfolded = case.backward(found[1:], tiling)
    for i, right in enumerate(case.grads.sources):
        assert_close(dvalues[i], right, f"source {i}", tolerance=2e-5)
    assert np.all(np.isfinite(dfolded))


def test_query_gradient_of_many_rows_is_the_same_every_time():
    case = Case(3, 2, 150, 48, BF16)
    tiling = tiling_for(3, BF16, row_tokens=32)
    found = case.forward(tiling)
    first, second = (case.backward(found[1:], tiling) for _ in range(2))
    case.check_backward(first)
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("tokens, columns", [(16, 16), (32, 64)])
def test_any_tile(tokens, columns):
    for dtype in (F32, BF16):
        step = Step(num_warps=4, tokens=tokens, columns=columns, num_stages=2)
        names = ("forward", "backward", "query_gradients")
        tiling = tiling_for(3, dtype, **dict.fromkeys(names, step))
        case = Case(3, 2, 37, 56, dtype)
        found = case.forward(tiling)
        case.check_forward(found)
        case.check_backward(case.backward(found[1:], tiling))


# --- The choice of a launch ----------------------------------------------------------------------


@pytest.mark.parametrize("n, launches", [(1, 1), (16, 1), (17, 2), (129, 9)])
def test_launches_share_the_sources_evenly(n, launches):
    tiling = choose_tiling(n, 8, 2048, BF16, compute_capability=90)
    assert tiling.sources_per_launch == -(-n // launches)


@pytest.mark.parametrize("n, s", [(1, 1), (9, 12), (8, 24), (129, 8)])
@pytest.mark.parametrize("width", [512, 1168, 2048, 4096, 7168])
def test_a_cache_holds_what_programs_will_read_again(width, n, s):
    tiling = choose_tiling(n, s, width, BF16, compute_capability=90)
    n = tiling.sources_per_launch
    for step, rows in ((tiling.forward, n), (tiling.backward, n + s)):
        # Sixteen warps on each of 132 multiprocessors, which are half way on average.
        tokens = 132 * 16 // step.num_warps * step.tokens
        assert tokens * rows * width * 2 / 2 <= 50 * 2**20


def test_newer_gpus_are_launched_like_the_last_known_one():
    newest, later = (choose_tiling(9, 8, 2048, BF16, compute_capability=c) for c in (100, 120))
    assert dataclasses.replace(later, compute_capability=100) == newest


@pytest.mark.parametrize(
    "dtype, capability, message",
    [(jnp.float64, 90, "float32, bfloat16 or float16"), (BF16, 75, "8.0 or newer")],
)
def test_what_cannot_be_launched_is_refused(dtype, capability, message):
    with pytest.raises(ValueError, match=message):
        choose_tiling(9, 8, 2048, dtype, compute_capability=capability)


def test_tilings_are_checked():
    tiling = tiling_for(3, F32)
    for change in ({"row_tokens": 16}, {"row_tokens": 33}, {"sources_per_launch": 17}):
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(tiling, **change)
    for change in ({"tokens": 3}, {"columns": 8}, {"num_warps": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(tiling.forward, **change)
    assert isinstance(tiling, Tiling)


def test_more_reads_than_a_launch_has_are_refused():
    case = Case(1, 25, 1, 8, F32)
    with pytest.raises(ValueError, match="at most 24 reads"):
        case.forward(tiling_for(1, F32))
