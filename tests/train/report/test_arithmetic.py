"""The page's JavaScript against the library, in the browser that will run it."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import BlockState, Diagnostics, depth_attention, inter_block, merge
from tests.train.report.chromium import launched
from train.report.page import modules

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def call():
    """Calls a function of maths.js, or another one that the page is made of."""
    with launched() as browser:
        page = browser.new_page()
        imports = json.dumps({"imports": modules()})
        page.set_content(f'<!doctype html><script type="importmap">{imports}</script>')
        yield lambda name, *arguments: page.evaluate(
            "async ([name, args]) => (await import('report/maths.js'))[name](...args)",
            [name, list(arguments)],
        )


def close(actual, desired, tolerance=2e-6):
    """Both sides are compared where the library rounds to float32."""
    np.testing.assert_allclose(actual, np.asarray(desired), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_two_phases_are_those_of_the_library(call, seed):
    keys = jax.random.split(jax.random.key(seed), 8)
    sources = tuple(jax.random.normal(key, (16,)) * (1 + seed) for key in keys[:4])
    partial_sum, query_d = jax.random.normal(keys[4], (16,)), jax.random.normal(keys[5], (16,))
    gain_d = 1 + 0.1 * jax.random.normal(keys[6], (16,))
    (output,), (lse,), (weights,) = inter_block(
        sources, query_d[None], gain_d[None], return_weights=True
    )
    _, hidden, gate = merge(output, lse, partial_sum, None, query_d, gain_d, return_gate=True)
    expected, joint = depth_attention((*sources, partial_sum), query_d, gain_d, return_weights=True)
    # A logit is the log-sum-exp of a phase 1 with that source alone.
    logits = [
        float(inter_block((source,), query_d[None], gain_d[None])[1][0])
        for source in (*sources, partial_sum)
    ]
    phase1 = call("phase1", logits[:-1])
    close(phase1["weights"], weights)
    close(phase1["lse"], lse)
    assert call("softmax", logits[:-1]) == phase1["weights"]
    g = call("gate", logits[-1], phase1["lse"])
    close(g, gate)
    close(call("mergeWeights", phase1["weights"], g), joint)
    mixed = call("mergeOutputs", output.tolist(), partial_sum.tolist(), g)
    close(mixed, hidden, 1e-5)
    close(mixed, expected, 1e-5)


@pytest.mark.parametrize("shift", [1e3, -1e3])
def test_large_logits_overflow_nowhere(call, shift):
    weights = call("softmax", [shift, shift + 1.0])
    close(weights, jax.nn.softmax(jnp.array([0.0, 1.0])))
    assert call("gate", shift, -shift) == (1.0 if shift > 0 else 0.0)
    assert call("logSumExp", [shift]) == shift


@pytest.mark.parametrize("num_sublayers, block_size", [(8, 4), (7, 3), (6, 1), (5, 8), (2, 2)])
def test_sources_and_their_bytes_are_those_of_the_library(call, num_sublayers, block_size):
    state = BlockState.create(jnp.zeros((3, 5)), block_size=block_size)
    for read in range(num_sublayers + 1):
        sources = state.sources
        if read == num_sublayers and block_size == 8:
            assert state.partial_sum is not None  # A short last block is a source all the same.
        count = call("sourceCount", read, num_sublayers, block_size)
        assert count == len(sources)
        assert call("cacheBytes", count, 3, 5, 4) == sum(source.nbytes for source in sources)
        state = state.write(jnp.zeros((3, 5)))


def test_names_of_sources_agree_in_number(call):
    for residual, block_size in (("block", 4), ("block", 3), ("full", None)):
        described = Diagnostics({}, residual, block_size, 10).reads
        counts = [call("sourceCount", i, 10, block_size or 1) for i in range(11)]
        assert counts == [len(read.sources) for read in described]


@pytest.mark.parametrize("finished, reads", [(1, 4), (3, 16), (5, 24), (8, 8), (2, 1)])
def test_rows_are_those_that_the_kernels_read_and_write(call, finished, reads):
    # Array by array: what is read, then what is written.
    seal = len(["partial", "f"]) + len(["block"]) if reads > 1 else 0
    phase2 = len(["o", "partial", "f"]) + len(["partial", "h"])
    two_phases = finished + reads + (reads - 1) * phase2 + seal
    later = finished + len(["partial", "f"]) + len(["partial", "h"])
    one_each = finished + len(["h"]) + (reads - 1) * later + seal
    standard = reads * (len(["stream", "f"]) + len(["stream", "h"]))
    expected = {"two phases": two_phases, "one read each": one_each, "standard": standard}
    assert {name: call("rowsOfBlock", name, reads, finished) for name in expected} == expected
    assert two_phases - seal == finished + 6 * reads - 5


SHAPES = list(itertools.product([1, 2, 4, 5], [1, 2, 3], [1, 2]))


def test_hops_carry_what_the_receiver_lacks(call):
    for stages, virtual, per_chunk in SHAPES:
        holds = [set() for _ in range(stages)]
        holds[0], sources = {0}, 1  # Stage 0 has the embedding.
        for hop in ["start", *call("hops", stages, virtual, per_chunk)]:
            if hop != "start":
                needed = set(range(sources))
                receiver = holds[hop["chunk"] % stages]
                assert hop["naive"] == len(needed)
                assert hop["cached"] == len(needed - receiver)
                receiver |= needed
                runs = receiver
            else:
                runs = holds[0]
            runs |= set(range(sources, sources + per_chunk))
            sources += per_chunk
        assert sources == 1 + stages * virtual * per_chunk


def test_hops_are_those_of_the_library(call):
    cross_stage = pytest.importorskip("attnres_jax.parallel.cross_stage")
    partition = pytest.importorskip("attnres_jax.parallel.partition")
    for stages, virtual, per_chunk in SHAPES:
        cut = partition.Partition(2 * stages * virtual * per_chunk, 2, stages, virtual)
        library = [(hop.to_chunk, hop.needs, hop.has) for hop in cross_stage.hops(cut)]
        page = call("hops", stages, virtual, per_chunk)
        assert [(hop["chunk"], hop["needs"], hop["has"]) for hop in page] == library


def test_the_paper_s_totals_are_its_sums(call):
    for stages, virtual, per_chunk in SHAPES:
        chunks = stages * virtual
        naive = sum(j * per_chunk for j in range(1, chunks))
        assert call("paperNaive", stages, virtual, per_chunk) == naive
        first = sum(j * per_chunk for j in range(1, stages))
        later = (virtual - 1) * stages * (stages * per_chunk)
        assert call("paperCached", stages, virtual, per_chunk) == first + later
    assert (call("paperNaive", 4, 2, 1), call("paperCached", 4, 2, 1)) == (28, 22)
