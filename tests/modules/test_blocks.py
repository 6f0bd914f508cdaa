"""Which outputs each source sums, and which sources each read attends to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.modules import AttentionResidualStack
from attnres_jax.ops.block import BlockState, block_boundaries, run_blocks

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Sub-layers L, sub-layers in a block S, and the sizes of the blocks that they make.
BLOCKS = [
    (1, 1, [1]),
    (1, 4, [1]),
    (4, 1, [1, 1, 1, 1]),
    (4, 8, [4]),
    (6, 6, [6]),
    (7, 3, [3, 3, 1]),
    (10, 4, [4, 4, 2]),
    (12, 8, [8, 4]),
    (12, 5, [5, 5, 2]),
]
GRID = [(num_sublayers, block_size) for num_sublayers, block_size, _ in BLOCKS]


@pytest.mark.parametrize("num_sublayers, block_size, sizes", BLOCKS)
def test_blocks_are_as_long_as_the_block_size_and_only_the_last_may_be_short(
    num_sublayers, block_size, sizes
):
    boundaries = block_boundaries(num_sublayers, block_size)
    assert [stop - start for start, stop in boundaries] == sizes
    assert [i for start, stop in boundaries for i in range(start, stop)] == list(
        range(num_sublayers)
    )


# A deep model: 93 layers in blocks of 12, and the same model counted in sub-layers.
@pytest.mark.parametrize("num_sublayers, block_size", [*GRID, (93, 12), (186, 24)])
def test_the_final_read_has_one_source_for_each_block_and_the_embedding(num_sublayers, block_size):
    n_blocks = len(block_boundaries(num_sublayers, block_size))
    assert n_blocks + 1 == (num_sublayers - 1) // block_size + 2


def embedding_and_constants(num_sublayers):
    """Sub-layer l returns 2**l: a sum of outputs is the set of sub-layers that it holds."""
    return 0.5 * jnp.ones((1, 2, 3)), [
        lambda x, value=2.0**i: jnp.full_like(x, value) for i in range(num_sublayers)
    ]


def set_of_sublayers(source):
    """Which sub-layers a source sums; fails if it is not a whole sum of constants."""
    value = float(source.flat[0])
    assert (source == value).all() and value == int(value), "the embedding is inside this source"
    return [i for i in range(int(value).bit_length()) if int(value) >> i & 1]


@pytest.mark.parametrize("reads_per_group", [None, 1, 3])
@pytest.mark.parametrize("num_sublayers, block_size", GRID)
def test_each_source_is_the_sum_of_its_block_and_the_embedding_is_by_itself(
    num_sublayers, block_size, reads_per_group
):
    embedding, sublayers = embedding_and_constants(num_sublayers)
    called = []

    @jax.jit
    def sources_of(embedding):
        counting = [lambda x, i=i, f=f: called.append(i) or f(x) for i, f in enumerate(sublayers)]
        vectors = jnp.zeros((num_sublayers, 3)), jnp.ones((num_sublayers, 3))
        return run_blocks(
            embedding,
            counting,
            *vectors,
            block_size=block_size,
            reads_per_group=reads_per_group,
        )[0]

    first, *rest = map(np.asarray, sources_of(embedding).values)
    assert called == list(range(num_sublayers))
    assert (first == 0.5).all()
    assert [set_of_sublayers(source) for source in rest] == [
        list(range(start, stop)) for start, stop in block_boundaries(num_sublayers, block_size)
    ]


def test_full_keeps_the_raw_outputs_apart_and_in_order():
    # Four sub-layers: five sources, neither seven nor running sums.
    embedding, sublayers = embedding_and_constants(4)
    vectors = jnp.zeros((4, 3)), jnp.ones((4, 3))
    sources, _ = run_blocks(embedding, sublayers, *vectors, block_size=1)
    assert [float(source[0, 0, 0]) for source in sources.values] == [0.5, 1, 2, 4, 8]


def expected_source_counts(num_sublayers, block_size):
    """n sources for the first sub-layer of block n, n + 1 for its others, all at the end."""
    counts = [i // block_size + (1 if i % block_size == 0 else 2) for i in range(num_sublayers)]
    return [*counts, (num_sublayers - 1) // block_size + 2]


@pytest.mark.parametrize("reads_per_group", [None, 2])
@pytest.mark.parametrize("num_sublayers, block_size", GRID)
def test_every_read_has_its_number_of_sources(num_sublayers, block_size, reads_per_group):
    stack = AttentionResidualStack(
        [jnp.tanh] * num_sublayers, 3, block_size=block_size, reads_per_group=reads_per_group
    )
    _, weights = jax.eval_shape(lambda x: stack(x, return_weights=True), jnp.ones((1, 2, 3)))
    assert [w.shape for w in weights] == [
        (n, 1, 2) for n in expected_source_counts(num_sublayers, block_size)
    ]
    assert all(w.dtype == jnp.float32 for w in weights)


@pytest.mark.parametrize("num_sublayers, block_size", [(7, 3), (4, 1), (4, 8), (5, 2)])
def test_zero_queries_read_the_mean_of_the_sources_of_each_read(num_sublayers, block_size):
    # An open partial sum that is still empty would make the mean of a block's first read smaller.
    embedding, sublayers = embedding_and_constants(num_sublayers)

    @jax.jit
    def inputs_of_sublayers(embedding):
        inputs = []
        recording = [lambda x, f=f: inputs.append(x) or f(x) for f in sublayers]
        stack = AttentionResidualStack(recording, 3, block_size=block_size)
        final, weights = stack(embedding, return_weights=True)
        return [*inputs, final], weights

    hidden, weights = inputs_of_sublayers(embedding)
    counts = expected_source_counts(num_sublayers, block_size)
    for i, n in enumerate(counts):
        np.testing.assert_allclose(hidden[i], (0.5 + 2.0**i - 1) / n, rtol=1e-6)
        np.testing.assert_allclose(weights[i], 1 / n, rtol=1e-6)


@pytest.mark.parametrize("num_sublayers, block_size", GRID)
def test_block_state_offers_the_sources_of_each_read(num_sublayers, block_size):
    state = BlockState.create(np.full(3, 0.5), block_size=block_size)
    counts = []
    for i in range(num_sublayers):
        counts.append(len(state.sources))
        first = i % block_size == 0
        assert (state.partial_sum is None) == first
        if not first:
            assert set_of_sublayers(state.sources[-1]) == list(range(i - i % block_size, i))
        state = state.write(np.full(3, 2.0**i))
    assert [*counts, len(state.sources)] == expected_source_counts(num_sublayers, block_size)
    first, *rest = state.sources
    assert (first == 0.5).all()
    assert [set_of_sublayers(source) for source in rest] == [
        list(range(start, stop)) for start, stop in block_boundaries(num_sublayers, block_size)
    ]


def test_block_state_is_a_pytree_whose_counts_are_static():
    state = BlockState.create(jnp.ones((1, 2, 3)), block_size=2)
    state = state.write(jnp.full((1, 2, 3), 2.0))
    written = jax.jit(lambda state: state.write(2 * state.sources[-1]))(state)
    assert (written.outputs_in_block, written.block_size) == (0, 2)
    assert [float(source[0, 0, 0]) for source in written.sources] == [1, 6]


def test_writing_leaves_the_earlier_state_as_it_was():
    before = BlockState.create(np.ones(3), block_size=4).write(np.ones(3))
    before.write(np.ones(3))
    assert len(before.sources) == 2 and (before.sources[1] == 1).all()


@pytest.mark.parametrize("block_size", [0, -1])
@pytest.mark.parametrize("form", ["boundaries", "stack", "state"])
def test_a_block_size_below_one_is_refused(form, block_size):
    embedding = jnp.ones((1, 2, 3))
    with pytest.raises(ValueError, match=f"block_size={block_size}"):
        if form == "boundaries":
            block_boundaries(4, block_size)
        elif form == "stack":
            AttentionResidualStack([jnp.tanh], 3, block_size=block_size)(embedding)
        else:
            BlockState.create(embedding, block_size=block_size)


def test_a_stack_without_sublayers_is_refused():
    with pytest.raises(ValueError, match="at least one sub-layer"):
        AttentionResidualStack([], 3, block_size=2)(jnp.ones((1, 2, 3)))


@pytest.mark.parametrize("reads_per_group", [0, -2])
def test_a_group_without_reads_is_refused(reads_per_group):
    stack = AttentionResidualStack([jnp.tanh], 3, block_size=2, reads_per_group=reads_per_group)
    with pytest.raises(ValueError, match=f"reads_per_group.*{reads_per_group}"):
        stack(jnp.ones((1, 2, 3)))
