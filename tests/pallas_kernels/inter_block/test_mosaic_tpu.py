"""Phase-1 TPU kernels, run by both of Pallas's interpreters, held to the float64 oracle."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.inter_block import mosaic_tpu
from pallas_kernels.inter_block.tiling import Tiling
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The second simulates the memories of a TPU: unwritten memory is NaN, reading what is not there is
# an error, and what may run in parallel does so in another order.
HLO = True
TPU = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", random_seed=3
)
BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def no_race(capsys):
    """The interpreter prints races and goes on."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and how they are run. `known`: inverse RMS given, of so many leading sources."""

    n: int
    s: int
    t: int
    d: int
    dtype: Any = jnp.float32
    tokens: int = 16
    columns: int = 128
    unroll: int = 1
    matrix_width: int = 128
    known: int = 0
    accumulate: bool = False
    cores: int = 1
    eps: float = 1e-3

    @property
    def tiling(self):
        return Tiling(
            self.tokens, self.columns, self.columns, self.unroll, 2**26, self.matrix_width
        )

    def __str__(self):
        changed = [
            f"{f.name}{getattr(self, f.name)}"
            for f in dataclasses.fields(self)[5:]
            if getattr(self, f.name) != f.default
        ]
        shape = f"n{self.n}-s{self.s}-t{self.t}-d{self.d}-{jnp.dtype(self.dtype).name}"
        return "-".join([shape, *changed])


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def rows(seed, case):
    return jnp.asarray(oracles.normal(seed, case.t, case.d), case.dtype)


def values_of(case):
    """Sources of unlike scales."""
    return tuple((1 + i % 3) * rows(i, case) for i in range(case.n))


def folded_of(case):
    return float32(1.5 * oracles.normal(50, case.s, case.d) / np.sqrt(case.d))


def cotangents_of(case):
    """Of the outputs, their log-sum-exp, the logits, and those of the sources to add to."""
    return (
        tuple(rows(100 + s, case) for s in range(case.s)),
        float32(oracles.normal(60, case.s, case.t)),
        float32(oracles.normal(61, case.s, case.n, case.t)),
        tuple(rows(200 + i, case) for i in range(case.n)) if case.accumulate else None,
    )


def run(case, interpret, values, folded, cotangents, count=None):
    """Everything that `forward` and `backward` return."""
    doutputs, dlse, dlogits, dvalues = cotangents
    known = None
    if case.known:
        mean_squares = [jnp.mean(jnp.square(v.astype(jnp.float32)), -1) for v in values]
        known = jax.lax.rsqrt(jnp.stack(mean_squares[: case.known]) + case.eps)
    outputs, *statistics = mosaic_tpu.forward(
        values,
        folded,
        tiling=case.tiling,
        eps=case.eps,
        count=count,
        inverse_rms_nt=known,
        interpret=interpret,
    )
    dvalues, dfolded = mosaic_tpu.backward(
        values,
        folded,
        *statistics,
        doutputs,
        dlse,
        tiling=case.tiling,
        cores=case.cores,
        count=count,
        dlogits_snt=dlogits,
        dvalues=dvalues,
        interpret=interpret,
    )
    return outputs, *statistics, dvalues, dfolded


def gradients(values, folded, cotangents, eps):
    """Float64 gradients to the sources and to the folded queries."""
    values, folded, (doutputs, dlse, dlogits, dvalues) = oracles.float64(
        (values, folded, cotangents)
    )
    ones = np.ones_like(folded)
    of_read = oracles.group_read_gradients(values, folded, ones, doutputs, dlse, eps=eps)
    dvalues = [np.zeros_like(v) for v in values] if dvalues is None else list(dvalues)
    dfolded = of_read.query
    for i, v in enumerate(values):
        dvalues[i] = dvalues[i] + of_read.sources[i]
        for s in range(len(folded)):
            dlogit = np.zeros(len(v)) if dlogits is None else dlogits[s, i]
            dfolded[s] += dlogit @ oracles.rms_norm(v, ones[s], eps)
            dkey = dlogit[:, None] * folded[s]
            dvalues[i] = dvalues[i] + oracles.rms_norm_gradients(v, ones[s], eps, dkey)[0]
    return dvalues, dfolded


def assert_near(actual, expected, name, tolerance):
    if actual.dtype == jnp.bfloat16:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(actual.dtype))
    error = oracles.relative_error(actual, expected)
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


def assert_matches_the_oracle(case, results, values, folded, cotangents):
    outputs, lse, logits, inverse_rms, dvalues, dfolded = results
    exact = oracles.float64((values, folded))
    ones = np.ones_like(exact[1])
    reads = oracles.group_read(*exact, ones, eps=case.eps)
    keys = np.stack([oracles.rms_norm(v, ones[0], case.eps) for v in exact[0]])
    assert [x.dtype for x in outputs] == [case.dtype] * case.s
    for s, read in enumerate(reads):
        assert_near(outputs[s], read.output, f"output {s}", 1e-5)
        assert_near(lse[s], read.lse, f"lse {s}", 1e-5)
        assert_near(logits[s], keys @ exact[1][s], f"logits {s}", 1e-5)
    mean_squares = np.stack([(v**2).mean(-1) for v in exact[0]])
    assert_near(inverse_rms, 1 / np.sqrt(mean_squares + case.eps), "inverse RMS", 1e-5)
    right_values, right_folded = gradients(values, folded, cotangents, case.eps)
    assert [x.dtype for x in dvalues] == [case.dtype] * case.n
    for i in range(case.n):
        assert_near(dvalues[i], right_values[i], f"source {i}", 2e-5)
    assert_near(dfolded, right_folded, "query", 2e-5)


def run_and_assert(case, interpret):
    arguments = values_of(case), folded_of(case), cotangents_of(case)
    results = jax.jit(lambda *arrays: run(case, interpret, *arrays))(*arguments)
    assert_matches_the_oracle(case, results, *arguments)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 1),
        Case(1, 3, 7, 100, BF16, tokens=128),
        Case(2, 1, 7, 130, tokens=64),
        Case(1, 17, 7, 100, BF16),  # two tiles of reads
        Case(3, 2, 40, 100, known=3),
        Case(4, 2, 32, 130, BF16, accumulate=True, known=3),
        Case(9, 1, 16, 100, BF16, known=4, unroll=2),
        Case(3, 7, 32, 100, BF16, accumulate=True),  # halves of the weights as rows in the backward
    ],
    ids=str,
)
def test_kernels_match_the_oracle_in_a_simulated_tpu(case):
    run_and_assert(case, TPU)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 2, 129, 130),
        Case(2, 1, 300, 1168, tokens=256, columns=384),
        Case(2, 2, 300, 1168, BF16, tokens=256, columns=512),
        Case(2, 1, 256, 256, BF16, tokens=128, accumulate=True),
        Case(2, 12, 130, 130, BF16, tokens=128),
    ],
    ids=str,
)
def test_kernels_match_the_oracle(case):
    run_and_assert(case, HLO)


# A matrix unit takes a tile of weights: those of as many sources as there are eights in its width,
# of half as many in bfloat16 unless there are few reads. One or two left over are added apart.
# Units narrower than 128, which no TPU has, make as many tiles of fewer sources.
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 24, 7, 100, BF16),
        Case(9, 3, 7, 100, BF16),
        Case(9, 5, 7, 100, BF16, matrix_width=256),
        Case(11, 3, 7, 100, BF16),
        Case(16, 2, 7, 100, BF16),
        Case(6, 3, 129, 130, matrix_width=32),
        Case(7, 1, 129, 1, tokens=64, matrix_width=32),
        Case(5, 2, 40, 257, BF16, tokens=32, matrix_width=32),
        Case(11, 1, 7, 100, BF16, matrix_width=64),
    ],
    ids=str,
)
def test_outputs_for_every_layout_of_the_weights(case):
    values, folded = values_of(case), folded_of(case)

    @jax.jit
    def forward(values, folded):
        return mosaic_tpu.forward(values, folded, tiling=case.tiling, eps=case.eps, interpret=TPU)

    outputs, lse, *_ = forward(values, folded)
    exact = oracles.float64((values, folded))
    for s, read in enumerate(oracles.group_read(*exact, np.ones_like(exact[1]), eps=case.eps)):
        assert_near(outputs[s], read.output, f"output {s}", 1e-5)
        assert_near(lse[s], read.lse, f"lse {s}", 1e-5)


@pytest.mark.parametrize(
    "n, matrix_width", [*[(n, 128) for n in range(1, 17)], *[(n, 256) for n in (9, 15, 16)]]
)
def test_every_number_of_sources_can_be_traced(n, matrix_width):
    case = Case(n, 1 + n % 6, 7, 100, BF16, matrix_width=matrix_width)
    row = jax.ShapeDtypeStruct((case.t, case.d), case.dtype)
    folded = jax.ShapeDtypeStruct((case.s, case.d), jnp.float32)
    forward = partial(mosaic_tpu.forward, tiling=case.tiling, eps=case.eps)
    outputs, lse, logits, inverse_rms = jax.eval_shape(forward, (row,) * n, folded)
    assert [(x.shape, x.dtype) for x in outputs] == [(row.shape, row.dtype)] * case.s
    assert lse.shape == (case.s, 7) and logits.shape == (case.s, n, 7)
    assert inverse_rms.shape == (n, 7)


@pytest.mark.parametrize(
    "case, interpret",
    [(Case(3, 2, 32, 100), TPU), (Case(2, 2, 16, 100, BF16), HLO)],
    ids=["float32-tpu", "bfloat16-hlo"],
)
def test_a_bank_of_any_count(case, interpret):
    doutputs, dlse, dlogits, _ = cotangents_of(case)
    old = jnp.stack([rows(200 + i, case) for i in range(case.n)])
    folded, values = folded_of(case), values_of(case)

    @jax.jit
    def of_bank(bank, count):
        # Nothing flows back to the logits of rows that do not count.
        counts = jnp.arange(case.n)[None, :, None] < count
        cotangents = doutputs, dlse, jnp.where(counts, dlogits, 0.0), old
        return run(case, interpret, bank, folded, cotangents, count)

    for count in range(1, case.n + 1):
        bank = jnp.stack(values).at[count:].set(jnp.nan)
        outputs, lse, logits, inverse_rms, dvalues, dfolded = of_bank(bank, jnp.int32(count))
        filled = dataclasses.replace(case, n=count)
        cotangents = doutputs, dlse, dlogits[:, :count], tuple(old[:count])
        results = outputs, lse, logits[:, :count], inverse_rms[:count], dvalues[:count], dfolded
        assert_matches_the_oracle(filled, results, values[:count], folded, cotangents)
        np.testing.assert_array_equal(
            logits[:, count:], np.float32(-1e30) + np.zeros_like(logits[:, count:])
        )
        np.testing.assert_array_equal(dvalues[count:], old[count:])


def test_a_bank_without_cotangents_of_its_own_gets_zeros_past_the_count():
    case = Case(3, 1, 7, 100, BF16, tokens=32)
    doutputs, dlse, *_ = cotangents_of(case)
    folded, values = folded_of(case), values_of(case)

    @jax.jit
    def of_bank(bank, count, dlse):
        return run(case, TPU, bank, folded, (doutputs, dlse, None, None), count)

    bank = jnp.stack(values).at[2:].set(jnp.nan)
    *_, dvalues, dfolded = of_bank(bank, jnp.int32(2), dlse)
    cotangents = doutputs, dlse, None, None
    right_values, right_folded = gradients(values[:2], folded, cotangents, case.eps)
    for i in range(2):
        assert_near(dvalues[i], right_values[i], f"source {i}", 2e-5)
    assert_near(dfolded, right_folded, "query", 2e-5)
    np.testing.assert_array_equal(dvalues[2], jnp.zeros_like(dvalues[2]))

    # One that counts is the identity, and no query gets a gradient through its weight of one.
    (output,), *_, dvalues, dfolded = of_bank(bank, jnp.int32(1), jnp.zeros_like(dlse))
    np.testing.assert_array_equal(output, values[0])
    np.testing.assert_array_equal(dvalues[0], doutputs[0])
    np.testing.assert_array_equal(dvalues[1:], jnp.zeros_like(dvalues[1:]))
    np.testing.assert_array_equal(dfolded, jnp.zeros_like(folded))


def test_one_source_is_the_identity_and_its_query_gets_no_gradient():
    case = Case(1, 2, 7, 100, tokens=64)
    values, folded = values_of(case), 30 * folded_of(case)
    doutputs, dlse, *_ = cotangents_of(case)
    cotangents = doutputs, jnp.zeros_like(dlse), None, None
    results = jax.jit(lambda *arrays: run(case, TPU, *arrays))(values, folded, cotangents)
    for output in results[0]:
        np.testing.assert_array_equal(output, values[0])
    np.testing.assert_array_equal(results[-2][0], doutputs[0] + doutputs[1])
    np.testing.assert_array_equal(results[-1], jnp.zeros_like(folded))


def test_known_inverse_rms_is_used_as_it_is():
    case = Case(3, 2, 40, 100, tokens=32)
    values, folded = values_of(case), folded_of(case)

    @jax.jit
    def forward(known):
        return mosaic_tpu.forward(
            values,
            folded,
            tiling=case.tiling,
            eps=case.eps,
            inverse_rms_nt=known,
            interpret=TPU,
        )

    known = float32(oracles.normal(3, 2, case.t))
    outputs, lse, logits, inverse_rms = forward(known)
    exact = oracles.float64((values, folded))
    r = 1 / np.sqrt((exact[0][2] ** 2).mean(-1) + case.eps)
    r = np.stack([*oracles.float64(known), r])
    right = np.einsum("ntd,sd->snt", np.stack(exact[0]), exact[1]) * r
    np.testing.assert_array_equal(inverse_rms[:2], known)
    assert_near(inverse_rms, r, "inverse RMS", 1e-5)
    assert_near(logits, right, "logits", 1e-5)
    weights = np.exp(right) / np.exp(right).sum(1, keepdims=True)
    assert_near(lse, np.log(np.exp(right).sum(1)), "lse", 1e-5)
    assert_near(jnp.stack(outputs), np.einsum("snt,ntd->std", weights, exact[0]), "outputs", 1e-5)


def test_sources_in_two_launches():
    case = Case(3, 2, 33, 100, tokens=32)
    values, folded = values_of(case), folded_of(case)
    doutputs, dlse, dlogits, _ = cotangents_of(case)
    parts = slice(0, 2), slice(2, 3)

    @jax.jit
    def run_in_two(values, folded):
        carry, logits, inverse_rms = None, [], []
        for part in parts:
            outputs, lse, *statistics = mosaic_tpu.forward(
                values[part],
                folded,
                eps=case.eps,
                carry=carry,
                out_dtype=jnp.float32,
                tiling=case.tiling,
                interpret=TPU,
            )
            carry = outputs, lse
            logits.append(statistics[0])
            inverse_rms.append(statistics[1])
        delta = jnp.stack([jnp.sum(o * do, -1) for o, do in zip(outputs, doutputs, strict=True)])
        dvalues, dfolded = (), 0.0
        for i, part in enumerate(parts):
            of_part, more = mosaic_tpu.backward(
                values[part],
                folded,
                lse,
                logits[i],
                inverse_rms[i],
                doutputs,
                dlse,
                dlogits_snt=dlogits[:, part],
                delta_st=delta,
                tiling=case.tiling,
                interpret=TPU,
            )
            dvalues, dfolded = dvalues + of_part, dfolded + more
        joined = jnp.concatenate(logits, axis=1), jnp.concatenate(inverse_rms)
        return outputs, lse, *joined, dvalues, dfolded

    results = run_in_two(values, folded)
    assert_matches_the_oracle(case, results, values, folded, (doutputs, dlse, dlogits, None))


@pytest.mark.parametrize("t", [7, 300])
def test_two_cores_sum_over_the_tokens_of_each(t):
    # The simulated cores have memories of their own, and run in threads. Of three tiles of lanes
    # one core gets two; of one tile, all.
    case = Case(2, 1, t, 100, tokens=64, cores=2)
    interpret = dataclasses.replace(TPU, num_cores_or_threads=2)
    arguments = values_of(case), folded_of(case), cotangents_of(case)
    function = jax.jit(lambda *arrays: run(case, interpret, *arrays))
    results = function(*arguments)
    assert_matches_the_oracle(case, results, *arguments)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, function(*arguments), results)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_a_saturated_softmax_routes_the_gradient_to_one_source(dtype):
    # Three reads, whose logits are 20, 128 and 1e4, times -1, 1 and -1. exp overflows above 88.7.
    case = Case(3, 3, 3, 256, dtype, eps=1e-6)
    unit = np.where(oracles.normal(0, case.d) > 0, 1.0, -1.0)
    values = tuple(jnp.asarray(scale * unit * np.ones((3, 1)), dtype) for scale in (-3, 2, -1))
    folded = float32(np.outer([20.0, 128.0, 1e4], unit) / case.d)
    doutputs, dlse, *_ = cotangents_of(case)
    cotangents = doutputs, jnp.zeros_like(dlse), None, None
    results = jax.jit(lambda *arrays: run(case, TPU, *arrays))(values, folded, cotangents)
    outputs, lse, _, _, dvalues, dfolded = results
    for output in outputs:
        np.testing.assert_array_equal(output, values[1])
    np.testing.assert_allclose(lse, np.array([[20.0], [128.0], [1e4]]) * np.ones(3), rtol=1e-6)
    # The other weights are at most exp(-40): no trace is left beside the cotangents.
    right = sum(oracles.float64(doutputs))
    assert_near(dvalues[1], right, "source 1", 1e-6)
    for x in (dvalues[0], dvalues[2], dfolded):
        np.testing.assert_allclose(oracles.float64(x), np.zeros(x.shape), atol=1e-12)


def test_gradients_where_one_weight_is_nearly_one():
    # Source 1 leads by about `gap`, and the query's gradient is of the order of exp(-gap):
    # differences from that source must not be taken between rounded sums.
    case = Case(3, 1, 7, 64, eps=1e-6)
    unit = oracles.normal(50, case.d)
    unit /= np.linalg.norm(unit)
    sources = [oracles.normal(i, case.t, case.d) for i in range(3)]
    sources = [v - (v @ unit)[:, None] * unit for v in sources]
    sources[1] += 10 * unit
    leading = np.mean(np.sum(unit * oracles.rms_norm(sources[1], 1.0, case.eps), -1))
    function = jax.jit(lambda *arrays: run(case, HLO, *arrays))
    for gap in (4, 8, 12, 16):
        values, folded = float32((tuple(sources), (unit * gap / leading)[None]))
        cotangents = (rows(51, case),), jnp.zeros((1, case.t)), None, None
        results = function(values, folded, cotangents)
        assert_matches_the_oracle(case, results, values, folded, cotangents)


def launches(function, *arguments):
    """The parameters of the `pallas_call`s of a program, by name."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    calls = [e.params for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    return {params["name"]: params for params in calls}


@pytest.mark.parametrize("accumulate", [False, True])
def test_launches_are_named_priced_and_reuse_memory(accumulate):
    case = Case(5, 3, 256, 2048, BF16, tokens=128, accumulate=accumulate)
    arguments = values_of(case), folded_of(case), cotangents_of(case)
    found = launches(lambda *arrays: run(case, False, *arrays), *arguments)
    assert set(found) == {"attnres_inter_block_forward", "attnres_inter_block_backward"}
    row = case.t * case.d * 2
    for name, n_rows in (("forward", 5 + 3), ("backward", 5 + 3 + (10 if accumulate else 5))):
        moved = found[f"attnres_inter_block_{name}"]["cost_estimate"].bytes_accessed
        assert n_rows * row <= moved <= 1.06 * n_rows * row  # statistics, and queries in parts
    aliases = found["attnres_inter_block_backward"]["input_output_aliases"]
    assert [output for _, output in aliases] == (list(range(5)) if accumulate else [])


def test_a_bank_is_priced_once():
    case = Case(5, 3, 256, 2048, BF16, tokens=128)
    bank = jnp.stack(values_of(case))
    arguments = folded_of(case), (*cotangents_of(case)[:3], jnp.zeros_like(bank)), jnp.int32(3)
    found = launches(lambda *arrays: run(case, False, *arrays), bank, *arguments)
    row = case.t * case.d * 2
    for name, n_rows in (("forward", 8), ("backward", 18)):
        moved = found[f"attnres_inter_block_{name}"]["cost_estimate"].bytes_accessed
        assert n_rows * row <= moved <= 1.06 * n_rows * row
    aliases = found["attnres_inter_block_backward"]["input_output_aliases"]
    assert [output for _, output in aliases] == [0]
