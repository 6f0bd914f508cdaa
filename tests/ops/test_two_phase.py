"""Phase 1, phase 2 and whole stacks of both forms, held to the float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.ops import depth_attention, inter_block, merge, rms_norm
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
T, D = 3, 16


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def assert_close(actual, expected, tolerance, name):
    assert oracles.relative_error(actual, expected) <= tolerance, name


# --- Phase 1 -------------------------------------------------------------------------------------


def group_case(n, n_reads, shape=(2, T, D)):
    width = shape[-1]
    sources = [oracles.normal(i, *shape) for i in range(n)]
    queries = 2 * oracles.normal(50, n_reads, width) / np.sqrt(width)
    gains = 1 + 0.3 * oracles.normal(51, n_reads, width)
    return float32((sources, queries, gains))


@pytest.mark.parametrize("n, n_reads", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 5)])
def test_inter_block_matches_the_oracle(n, n_reads):
    inputs = group_case(n, n_reads)
    doutputs = float32([oracles.normal(60 + s, 2, T, D) for s in range(n_reads)])
    dlse = float32(oracles.normal(70, n_reads, 2, T))
    dweights = float32(oracles.normal(71, n_reads, n, 2, T))

    @jax.jit
    def values_and_gradients(*inputs):
        outputs, pullback = jax.vjp(partial(inter_block, return_weights=True), *inputs)
        return outputs, pullback((tuple(doutputs), dlse, dweights))

    (outputs, lse, weights), grads = values_and_gradients(*inputs)
    exact = oracles.float64(inputs)
    expected = oracles.group_read(*exact)
    dexpected = oracles.group_read_gradients(*exact, *oracles.float64((doutputs, dlse, dweights)))
    assert len(outputs) == n_reads and lse.shape == (n_reads, 2, T)
    for s in range(n_reads):
        assert_close(outputs[s], expected[s].output, 1e-5, f"output {s}")
        assert_close(lse[s], expected[s].lse, 1e-5, f"lse {s}")
        assert_close(weights[s], expected[s].weights, 1e-5, f"weights {s}")
    for i in range(n):
        assert_close(grads[0][i], dexpected.sources[i], 2e-5, f"source {i}")
    assert_close(grads[1], dexpected.query, 2e-5, "query")
    assert_close(grads[2], dexpected.gain, 2e-5, "gain")


def test_reads_of_a_group_are_independent():
    sources, queries, gains = group_case(3, 4)
    outputs, lse = inter_block(sources, queries, gains)
    for s in range(4):
        (alone,), lse_alone = inter_block(sources, queries[s : s + 1], gains[s : s + 1])
        assert_close(outputs[s], alone, 1e-6, f"output {s}")
        assert_close(lse[s], lse_alone[0], 1e-6, f"lse {s}")
        assert_close(outputs[s], depth_attention(sources, queries[s], gains[s]), 1e-6, s)


def test_inter_block_of_one_source_is_the_identity_with_its_logit():
    sources, queries, gains = group_case(1, 3)
    outputs, pullback = jax.vjp(inter_block, sources, queries, gains)
    for output in outputs[0]:
        np.testing.assert_array_equal(output, sources[0])
    # Nothing reaches the queries through the outputs; through the log-sum-exp, it does.
    ones = jax.tree.map(jnp.ones_like, outputs)
    dsources, dqueries, dgains = pullback((ones[0], jnp.zeros_like(ones[1])))
    np.testing.assert_array_equal(dsources[0], 3 * jnp.ones_like(sources[0]))
    np.testing.assert_array_equal(dqueries, jnp.zeros_like(queries))
    np.testing.assert_array_equal(dgains, jnp.zeros_like(gains))
    assert np.linalg.norm(pullback(ones)[1]) > 0.1


# --- Phase 2 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("given", ["partial_sum", "update", "both"])
def test_merge_matches_the_oracle(given, with_norm):
    output, partial_sum, update = float32([oracles.normal(i, 2, T, D) for i in range(3)])
    lse = float32(oracles.normal(3, 2, T))
    query, gain, norm_gain = float32([2 * oracles.normal(4, D) / 4, *oracles.normal(5, 2, D)])
    cotangents = float32((*oracles.normal(7, 2, 2, T, D), oracles.normal(8, 2, T)))
    arguments = {
        "output": output,
        "lse": lse,
        "partial_sum": None if given == "update" else partial_sum,
        "update": None if given == "partial_sum" else update,
        "query_d": query,
        "gain_d": gain,
        "norm_gain_d": norm_gain if with_norm else None,
    }

    @jax.jit
    def values_and_gradients(arguments):
        def function(arguments):
            return merge(**arguments, eps=1e-3, norm_eps=1e-1, return_gate=True)

        outputs, pullback = jax.vjp(function, arguments)
        return outputs, pullback(cotangents)[0]

    (summed, hidden, gate), grads = values_and_gradients(arguments)
    exact = oracles.float64(
        [
            output,
            lse,
            sum(x for x in (arguments["partial_sum"], arguments["update"]) if x is not None),
        ]
    ) + oracles.float64([query, gain])
    following = oracles.float64(norm_gain) if with_norm else None
    expected = oracles.merge(*exact, following, eps=1e-3, norm_eps=1e-1)
    dexpected = oracles.merge_gradients(
        *exact, *oracles.float64(cotangents), following, eps=1e-3, norm_eps=1e-1
    )
    assert_close(summed, expected.summed, 1e-6, "summed")
    assert_close(hidden, expected.hidden, 1e-5, "hidden")
    assert_close(gate, expected.gate, 1e-5, "gate")
    rights = {
        "output": dexpected.output,
        "lse": dexpected.lse,
        "partial_sum": dexpected.summed,
        "update": dexpected.summed,
        "query_d": dexpected.query,
        "gain_d": dexpected.gain,
        "norm_gain_d": dexpected.norm_gain,
    }
    for name, argument in arguments.items():
        if argument is not None:
            assert_close(grads[name], rights[name], 2e-5, name)


def test_norm_eps_is_eps_unless_given():
    output, summed = float32([0.05 * oracles.normal(i, T, D) for i in range(2)])
    lse, query, ones = jnp.zeros(T), float32(oracles.normal(2, D)), jnp.ones(D)

    def hidden(**settings):
        return merge(output, lse, summed, None, query, ones, norm_gain_d=ones, **settings)[1]

    np.testing.assert_array_equal(hidden(eps=1e-3), hidden(eps=1e-3, norm_eps=1e-3))
    exact = oracles.float64((output, lse, summed, query, ones, ones))
    for eps, norm_eps in [(1e-3, 1e-6), (1e-6, 1e-3), (1e-3, 0.0)]:
        expected = oracles.merge(*exact, eps=eps, norm_eps=norm_eps).hidden
        assert_close(hidden(eps=eps, norm_eps=norm_eps), expected, 1e-5, (eps, norm_eps))


def test_partial_sum_keeps_its_own_dtype():
    # A float32 sum beside bfloat16 activations: nothing of the update is rounded away.
    output = jnp.asarray(oracles.normal(0, T, D), jnp.bfloat16)
    partial_sum = float32(oracles.normal(1, T, D))
    update = jnp.asarray(oracles.normal(2, T, D) * 1e-3, jnp.bfloat16)
    parameters = float32(oracles.normal(3, 2, D))

    def function(output, partial_sum, update):
        return merge(output, jnp.zeros(T), partial_sum, update, *parameters)

    (summed, hidden), pullback = jax.vjp(function, output, partial_sum, update)
    assert (summed.dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(summed, partial_sum + update.astype(jnp.float32))
    grads = pullback((summed, hidden))
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]


def test_partial_sum_is_rounded_before_it_is_read():
    # What the block later stores is what this read sees: two-phase equals direct also in bfloat16.
    output, partial_sum, update = (
        jnp.asarray(oracles.normal(i, T, D), jnp.bfloat16) for i in range(3)
    )
    query, gain = float32(oracles.normal(3, 2, D))
    summed, hidden = merge(output, jnp.zeros(T), partial_sum, update, query, gain)
    assert summed.dtype == jnp.bfloat16
    _, again = merge(output, jnp.zeros(T), summed, None, query, gain)
    np.testing.assert_array_equal(hidden, again)


# --- Parts that vanish ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", [(1e4, -1e4), (-1e4, 1e4), (1e4, 0.0), (0.0, 1e4)])
def test_merge_of_a_vanishing_part(logits, dtype):
    width = 256
    unit = np.where(oracles.normal(0, width) > 0, 1.0, -1.0)
    finished, unfinished = logits
    size = max(abs(unfinished), 1.0)
    query = jnp.asarray(unit * size / width, dtype)
    sign = unit if unfinished > 0 else -unit
    # Orthogonal to the query where the logit is to be zero.
    direction = sign if unfinished else unit * np.repeat([1.0, -1.0], width // 2)
    summed = jnp.asarray(2 * direction * np.ones((T, 1)), dtype)
    output = jnp.asarray(oracles.normal(1, T, width), dtype)
    lse = jnp.full(T, finished, jnp.float32)
    cotangent = jnp.asarray(oracles.normal(2, T, width), dtype)

    def function(output, lse, summed, query):
        return merge(output, lse, summed, None, query, jnp.ones(width, dtype))[1]

    hidden, pullback = jax.vjp(jax.jit(function), output, lse, summed, query)
    doutput, dlse, dsummed, dquery = pullback(cotangent)
    kept, lost = (output, summed) if finished > unfinished else (summed, output)
    dkept, dlost = (doutput, dsummed) if finished > unfinished else (dsummed, doutput)
    np.testing.assert_array_equal(hidden, kept)
    assert bool(jnp.isfinite(lost).all())
    np.testing.assert_array_equal(dkept, cotangent)
    for vanishing in (dlost, dlse, dquery):
        np.testing.assert_array_equal(vanishing, jnp.zeros_like(vanishing))


@pytest.mark.parametrize("gap", [-16, -8, 8, 16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_gradients_of_a_nearly_closed_or_open_gate(gap, with_norm):
    output, summed = float32([oracles.normal(i, T, D) for i in range(2)])
    query, gain, norm_gain = float32([oracles.normal(2, D) / 4, *oracles.normal(3, 2, D)])
    exact = oracles.float64((output, summed, query, gain))
    gate_open = oracles.merge(exact[0], 0 * exact[0][:, 0], *exact[1:]).gate
    lse = float32(np.log(gate_open / (1 - gate_open)) - gap)  # the logit less the gap
    cotangents = float32(tuple(oracles.normal(5, 2, T, D)))
    following = norm_gain if with_norm else None

    def function(*inputs):
        output, lse, summed, query, gain = inputs
        return merge(output, lse, summed, None, query, gain, norm_gain_d=following)

    inputs = (output, lse, summed, query, gain)
    grads = jax.vjp(function, *inputs)[1](cotangents)
    right = oracles.merge_gradients(
        *oracles.float64(inputs), *oracles.float64(cotangents), norm_gain=oracles.float64(following)
    )
    for name, actual in zip(right._fields, grads, strict=False):
        assert_close(actual, getattr(right, name), 2e-5, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_of_128_in_both_forms(dtype):
    width = 4096
    direction = np.where(oracles.normal(0, width) > 0, 1.0, -1.0)
    query = jnp.asarray(2 * direction / 64, dtype)  # of norm two
    gain = jnp.ones(width, dtype)
    others = [jnp.asarray(oracles.normal(i, T, width), dtype) for i in range(1, 3)]
    aligned = jnp.asarray(3 * direction * np.ones((T, 1)), dtype)

    def two_phase(sources, unfinished):
        (output,), lse = inter_block(sources, query[None], gain[None])
        return merge(output, lse[0], unfinished, None, query, gain)[1]

    def direct(sources, unfinished):
        return depth_attention([*sources, unfinished], query, gain)

    for read in (two_phase, direct):
        for sources, unfinished in (([others[0], aligned], others[1]), (others, aligned)):
            hidden, pullback = jax.vjp(read, sources, unfinished)
            np.testing.assert_array_equal(hidden, aligned)
            grads = pullback(jnp.ones_like(hidden))
            assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


# --- Whole stacks --------------------------------------------------------------------------------

EPS, NORM_EPS = 1e-5, 1e-4


def sublayer(parameters, i, hidden):
    return jnp.tanh(parameters.slopes[i][None] * hidden + parameters.shifts[i][None])


def direct_stack(embedding, parameters, block_size):
    n_sublayers = len(parameters.slopes)
    finished, unfinished = [embedding], None
    for i in range(n_sublayers + 1):
        sources = finished if unfinished is None else [*finished, unfinished]
        read = depth_attention(sources, parameters.queries[i], parameters.gains[i], eps=EPS)
        hidden = rms_norm(read, parameters.norm_gains[i], eps=NORM_EPS)
        if i == n_sublayers:
            return hidden
        update = sublayer(parameters, i, hidden)
        unfinished = update if unfinished is None else unfinished + update
        if (i + 1) % block_size == 0:
            finished, unfinished = [*finished, unfinished], None


def two_phase_stack(embedding, parameters, block_size):
    n_sublayers = len(parameters.slopes)
    finished = [embedding]
    for start in range(0, n_sublayers + 1, block_size):
        reads = range(start, min(start + block_size, n_sublayers + 1))
        outputs, lse = inter_block(
            finished,
            parameters.queries[reads.start : reads.stop],
            parameters.gains[reads.start : reads.stop],
            eps=EPS,
        )
        partial_sum = update = None
        for s, i in enumerate(reads):
            if s == 0:
                hidden = rms_norm(outputs[0], parameters.norm_gains[i], eps=NORM_EPS)
            else:
                partial_sum, hidden = merge(
                    outputs[s],
                    lse[s],
                    partial_sum,
                    update,
                    parameters.queries[i],
                    parameters.gains[i],
                    norm_gain_d=parameters.norm_gains[i],
                    eps=EPS,
                    norm_eps=NORM_EPS,
                )
            if i == n_sublayers:
                return hidden
            update = sublayer(parameters, i, hidden)
        finished.append(update if partial_sum is None else partial_sum + update)


@pytest.mark.parametrize("form", [direct_stack, two_phase_stack])
@pytest.mark.parametrize(
    "n_sublayers, block_size, jit",
    [
        *[(1, 1, False), (1, 4, False), (2, 1, False), (4, 1, False)],
        *[(2, 2, False), (3, 2, False), (5, 2, False), (5, 3, False), (7, 3, False)],
        *[(4, 4, False), (4, 8, False), (9, 4, False), (5, 2, True)],
    ],
)
def test_stack_matches_the_oracle(n_sublayers, block_size, jit, form):
    parameters = float32(oracles.stack_parameters(0, n_sublayers, D, query_scale=2.0))
    embedding, cotangent = float32((oracles.normal(10, T, D), oracles.normal(11, T, D)))

    def values_and_gradients(embedding, parameters):
        function = partial(form, block_size=block_size)
        hidden, pullback = jax.vjp(function, embedding, parameters)
        return hidden, *pullback(cotangent)

    if jit:
        values_and_gradients = jax.jit(values_and_gradients)
    hidden, dembedding, dparameters = values_and_gradients(embedding, parameters)
    exact = oracles.float64((embedding, parameters))
    # A block of one sub-layer is Full Attention Residuals.
    for size in [block_size, None] if block_size == 1 else [block_size]:
        expected = oracles.stack(*exact, size, EPS, NORM_EPS)
        right = oracles.stack_gradients(*exact, size, oracles.float64(cotangent), EPS, NORM_EPS)
        assert_close(hidden, expected.hidden, 1e-5, "hidden")
        assert_close(dembedding, right[0], 2e-5, "embedding")
        for name, leaves in dparameters._asdict().items():
            for i, actual in enumerate(leaves):
                assert_close(actual, getattr(right[1], name)[i], 2e-5, f"{name}[{i}]")
    # The first read has one source: structurally no gradient, exactly.
    np.testing.assert_array_equal(dparameters.queries[0], np.zeros(D))
    np.testing.assert_array_equal(dparameters.gains[0], np.zeros(D))


@pytest.mark.parametrize("form", [direct_stack, two_phase_stack])
def test_gradient_flows_through_block_sums(form):
    # A final read that selects the first finished block alone: the embedding and the first block
    # get their whole gradient through that sum.
    n_sublayers, block_size = 4, 2
    parameters = float32(oracles.stack_parameters(0, n_sublayers, D))
    embedding = float32(oracles.normal(10, 1, D))
    exact = oracles.float64((embedding, parameters))
    outputs = oracles.stack(*exact, block_size, EPS, NORM_EPS).outputs
    sums = [outputs[0], outputs[1] + outputs[2], outputs[3] + outputs[4]]
    keys = np.stack([oracles.rms_norm(v[0], 1.0, EPS) for v in sums])
    query = 60 * np.linalg.pinv(keys)[:, 1]  # logits 0, 60, 0
    parameters = parameters._replace(
        queries=parameters.queries.at[-1].set(query), gains=parameters.gains.at[-1].set(1.0)
    )
    exact = oracles.float64((embedding, parameters))
    cotangent = float32(oracles.normal(11, 1, D))
    _, pullback = jax.vjp(partial(form, block_size=block_size), embedding, parameters)
    dembedding, dparameters = pullback(cotangent)
    right = oracles.stack_gradients(*exact, block_size, oracles.float64(cotangent), EPS, NORM_EPS)
    assert np.linalg.norm(dembedding) > 1e-2
    assert_close(dembedding, right[0], 2e-5, "embedding")
    for i in range(2):
        assert np.linalg.norm(dparameters.slopes[i]) > 1e-2
        assert_close(dparameters.slopes[i], right[1].slopes[i], 2e-5, f"slopes[{i}]")


@pytest.mark.parametrize("form", [direct_stack, two_phase_stack])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_zero_queries_are_the_standard_residual_stream(block_size, form):
    # The mean of the sources is the stream over n, and the norm that follows removes the scale.
    n_sublayers = 5
    parameters = float32(oracles.stack_parameters(0, n_sublayers, D))
    parameters = parameters._replace(queries=jnp.zeros_like(parameters.queries))
    embedding = float32(oracles.normal(10, T, D))
    exact = oracles.float64(parameters)
    stream = oracles.float64(embedding)
    for i in range(n_sublayers):
        hidden = oracles.rms_norm(stream, exact.norm_gains[i], 0.0)
        stream = stream + np.tanh(exact.slopes[i] * hidden + exact.shifts[i])
    standard = oracles.rms_norm(stream, exact.norm_gains[-1], 0.0)
    hidden = form(embedding, parameters, block_size)
    # norm_eps against a mean square of order 1 / n**2 is what is left.
    assert_close(hidden, standard, NORM_EPS * (n_sublayers + 1) ** 2, "hidden")
