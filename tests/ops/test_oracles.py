"""The oracle's hand-written gradients against central differences of its own values."""

import numpy as np
import pytest

from tests import oracles

B, T, D = 2, 3, 5


def check(function, primals, cotangents, gradients):
    """`<u, J t>` by central differences equals `<J^T u, t>`, one argument at a time."""
    for i, gradient in enumerate(gradients):
        tangent = oracles.normal_like(i, primals[i])

        def along(step, i=i, tangent=tangent):
            moved = oracles.add(primals[i], tangent, step)
            return function(*primals[:i], moved, *primals[i + 1 :])

        numerical = oracles.directional_derivative(along, (0.0,), (1.0,))
        assert oracles.inner(gradient, tangent) == pytest.approx(
            oracles.inner(cotangents, numerical), rel=1e-7
        )


@pytest.mark.parametrize("n", [1, 2, 4])
def test_group_read_gradients(n):
    sources = [oracles.normal(i, B, T, D) for i in range(n)]
    queries, gains = oracles.normal(10, 3, D), oracles.normal(11, 3, D)
    cotangents = (
        oracles.normal(12, 3, B, T, D),
        oracles.normal(13, 3, B, T),
        oracles.normal(14, 3, n, B, T),
    )

    def function(sources, queries, gains):
        reads = oracles.group_read(sources, queries, gains, eps=0.1)
        return tuple(np.stack([read[i] for read in reads]) for i in range(3))

    primals = (sources, queries, gains)
    gradients = oracles.group_read_gradients(*primals, *cotangents, eps=0.1)
    check(function, primals, cotangents, gradients)


@pytest.mark.parametrize("with_norm", [False, True])
def test_merge_gradients(with_norm):
    output, summed = oracles.normal(0, B, T, D), oracles.normal(1, B, T, D)
    primals = [output, oracles.normal(2, B, T), summed, *oracles.normal(3, 2, D)]
    if with_norm:
        primals.append(oracles.normal(4, D))
    cotangents = (
        oracles.normal(5, B, T, D),
        oracles.normal(6, B, T, D),
        oracles.normal(7, B, T),
    )

    def function(*primals):
        return tuple(oracles.merge(*primals, eps=0.1, norm_eps=0.2))

    gradients = oracles.merge_gradients(
        *primals[:5], *cotangents, *primals[5:], eps=0.1, norm_eps=0.2
    )
    check(function, primals, cotangents, gradients[: len(primals)])


@pytest.mark.parametrize("block_size", [None, 1, 2, 4, 9])
def test_stack_gradients(block_size):
    parameters = oracles.stack_parameters(0, n_sublayers=5, width=D, query_scale=2.0)
    embedding, cotangent = oracles.normal(10, B, T, D), oracles.normal(11, B, T, D)

    def function(embedding, *parameters):
        values = oracles.Parameters(*parameters)
        return oracles.stack(embedding, values, block_size, eps=0.1, norm_eps=0.2).hidden

    dembedding, dparameters = oracles.stack_gradients(
        embedding, parameters, block_size, cotangent, eps=0.1, norm_eps=0.2
    )
    check(function, (embedding, *parameters), cotangent, (dembedding, *dparameters))


def test_sources_of_block_reads_are_those_of_equations_5_and_6():
    # Seven sub-layers in blocks of three: the first read of a block has no partial sum.
    assert [oracles.attended_block(n, 3) for n in range(1, 9)] == [
        [[0]],
        [[0], [1]],
        [[0], [1, 2]],
        [[0], [1, 2, 3]],
        [[0], [1, 2, 3], [4]],
        [[0], [1, 2, 3], [4, 5]],
        [[0], [1, 2, 3], [4, 5, 6]],
        [[0], [1, 2, 3], [4, 5, 6], [7]],
    ]
    assert all(oracles.attended_block(n, 1) == oracles.attended_full(n) for n in range(1, 9))


@pytest.mark.parametrize("L, S, n", [(10, 4, 4), (93, 12, 9), (7, 3, 4), (1, 2, 2), (4, 8, 2)])
def test_final_read_has_one_source_per_block_and_the_embedding(L, S, n):
    assert len(oracles.attended_block(L + 1, S)) == (L - 1) // S + 2 == n
