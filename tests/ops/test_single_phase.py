"""One read in a single phase: the same as phase 1 with one query and phase 2, whatever computes it.

Kernels run in the interpreter for TPUs.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_jax.ops import Bank, FinishedSources, inter_block, merge, single_phase
from attnres_jax.ops.block import join_weights
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, D = 3, 16


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def two_phases(sources, partial_sum, update, query_d, gain_d, **settings):
    eps = settings.pop("eps", 1e-6)
    outputs, lse, weights = inter_block(
        sources, query_d[None], gain_d[None], eps=eps, implementation="xla", return_weights=True
    )
    summed, hidden, gate = merge(
        outputs[0],
        lse[0],
        partial_sum,
        update,
        query_d,
        gain_d,
        eps=eps,
        implementation="xla",
        return_gate=True,
        **settings,
    )
    return summed, hidden, join_weights(weights[0], gate)


def case(n):
    sources = [oracles.normal(i, 2, T, D) for i in range(n)]
    parts = oracles.normal(20, 2, 2, T, D)
    vectors = {
        "query_d": 2 * oracles.normal(21, D) / np.sqrt(D),
        "gain_d": 1 + 0.3 * oracles.normal(22, D),
        "norm_gain_d": 1 + 0.3 * oracles.normal(23, D),
    }
    arguments = {"sources": sources, "partial_sum": parts[0], "update": parts[1], **vectors}
    return float32(arguments), float32(oracles.normal(24, 2, 2, T, D))


def interpreted(implementation):
    on_tpu = implementation == "mosaic_tpu"
    return pltpu.force_tpu_interpret_mode() if on_tpu else contextlib.nullcontext()


@pytest.mark.parametrize(
    "n, implementation, without, settings",
    [
        (1, "mosaic_tpu", ["partial_sum", "norm_gain_d"], {}),
        (2, "mosaic_tpu", [], {"eps": 1e-3, "norm_eps": 1e-1}),
        (3, None, ["update"], {"eps": 1e-3}),
        (1, "xla", ["norm_gain_d"], {}),
        (2, None, ["partial_sum"], {"eps": 1e-3}),
        (4, "xla", [], {"eps": 1e-3, "norm_eps": 1e-1}),
    ],
)
def test_single_phase_is_both_phases(n, implementation, without, settings):
    arguments, cotangents = case(n)
    arguments |= dict.fromkeys(without)
    cotangents = *cotangents, float32(oracles.normal(25, n + 1, 2, T))

    def values_and_gradients(function, **more):
        outputs, pullback = jax.vjp(lambda a: function(**a, **settings, **more), arguments)
        return outputs, pullback(cotangents)[0]

    with interpreted(implementation):
        actual = values_and_gradients(
            single_phase, implementation=implementation, return_weights=True
        )
    expected = values_and_gradients(two_phases)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert oracles.relative_error(a, b) <= 2e-5


def kernels_of(function, *arguments):
    with jax.numpy_dtype_promotion("strict"):
        text = str(jax.make_jaxpr(function)(*arguments))
    names = ["single_phase_forward", "inter_block_forward", "merge_forward"]
    return [name for name in names if f"attnres_{name}" in text]


def test_which_kernels_compute_it():
    arguments, _ = case(3)
    sources = arguments.pop("sources")

    def read(sources):
        return single_phase(sources, **arguments, implementation="mosaic_tpu")

    assert kernels_of(read, sources[:1]) == ["single_phase_forward"]
    assert kernels_of(read, FinishedSources(tuple(sources[:2]))) == ["single_phase_forward"]
    in_two_phases = ["inter_block_forward", "merge_forward"]
    assert kernels_of(read, sources) == in_two_phases
    assert kernels_of(read, Bank(jnp.stack(sources[:2]), jnp.int32(2))) == in_two_phases


@pytest.mark.parametrize("n", [2, 3])
def test_results_are_those_asked_for(n):
    arguments, _ = case(n)
    known = FinishedSources(tuple(arguments.pop("sources")), jnp.ones((1, 2, T)))
    assert len(single_phase(known, **arguments)) == 2
    *_, weights, following = single_phase(
        known, **arguments, return_weights=True, return_sources=True
    )
    np.testing.assert_allclose(weights.sum(0), np.ones((2, T)), rtol=1e-6)
    assert isinstance(following, FinishedSources) and len(following.values) == n


def test_the_rows_of_a_bank_past_its_count_get_no_weight():
    arguments, _ = case(2)
    sources = arguments.pop("sources")
    bank = Bank(jnp.stack([*sources, jnp.full_like(sources[0], jnp.nan)]), jnp.int32(2))
    of_bank = single_phase(bank, **arguments, return_weights=True)
    expected = single_phase(sources, **arguments, return_weights=True)
    for a, b in zip(of_bank[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_bank[2][2], np.zeros((2, T)))


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"sources": []}, "sources: .*at least one"),
        ({"sources": zeros(2, T, D)}, "sources: .*Bank"),
        ({"sources": [zeros(T, D), zeros(T, D, dtype=jnp.bfloat16)]}, r"sources\[1\]"),
        ({"partial_sum": None, "update": None}, "pass partial_sum, update or both"),
        ({"partial_sum": zeros(T, D + 1)}, "partial_sum: expected the shape of each source"),
        ({"update": zeros(T + 1, D)}, "update: expected the shape of each source"),
        ({"query_d": zeros(1, D)}, "query_d: expected shape"),
        ({"gain_d": zeros(D + 1)}, "gain_d: expected shape"),
        ({"norm_gain_d": zeros()}, "norm_gain_d: expected shape"),
        ({"implementation": "pallas"}, "implementation: expected one of xla"),
        ({"implementation": "triton_gpu"}, 'implementation="triton_gpu": '),
        (
            {
                "implementation": "mosaic_tpu",
                "sources": [zeros(T, D, dtype=jnp.float16)],
                "partial_sum": None,
                "update": zeros(T, D, dtype=jnp.float16),
            },
            "mosaic_tpu.*float16",
        ),
    ],
)
def test_bad_input_is_refused(bad, message):
    arguments = {
        "sources": [zeros(T, D)],
        "partial_sum": zeros(T, D),
        "update": zeros(T, D),
        "query_d": zeros(D),
        "gain_d": zeros(D),
    }
    with pytest.raises(ValueError, match=f"(?s){message}"):
        single_phase(**(arguments | bad))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_zero_tokens(implementation):
    rows, vector = zeros(2, 0, D), zeros(D)
    summed, hidden, weights = single_phase(
        [rows], rows, rows, vector, vector, implementation=implementation, return_weights=True
    )
    assert summed.shape == hidden.shape == (2, 0, D) and weights.shape == (2, 2, 0)
