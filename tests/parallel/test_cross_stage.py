"""Chunks and payloads as data, held to a simulation of what every stage knows."""

import pytest

from attnres_jax.parallel import cross_stage
from attnres_jax.parallel.cross_stage import hops, payload
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import gpipe, interleaved, interleaved_1f1b
from attnres_jax.parallel.tables import format_table

PARTITIONS = [
    Partition(sublayers, block_size, stages, virtual)
    for sublayers in (13, 54)
    for block_size in (1, 4, 24)
    for stages in (1, 2, 4)
    for virtual in (1, 3)
    if stages * virtual <= sublayers
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_chunks_cover_the_sublayers_and_count_their_sources(partition):
    finished, open_outputs = 1, 0
    sublayer = 0
    for chunk in range(partition.num_chunks):
        assert partition.boundaries[chunk] == sublayer
        assert partition.sources_before[chunk] == finished
        assert partition.is_open[chunk] == (open_outputs > 0)
        for slot, used in enumerate(partition.is_used[chunk]):
            if not used:
                assert not partition.begins_block[chunk][slot]
                assert not partition.ends_block[chunk][slot]
                continue
            assert partition.begins_block[chunk][slot] == (open_outputs == 0)
            open_outputs += 1
            sublayer += 1
            closes = open_outputs == partition.block_size or sublayer == partition.num_sublayers
            assert partition.ends_block[chunk][slot] == closes
            if closes:
                finished, open_outputs = finished + 1, 0
        assert partition.sources_after[chunk] == finished
    assert sublayer == partition.num_sublayers
    assert partition.num_sources == finished
    assert max(partition.sizes) - min(partition.sizes) <= 2


def test_whole_layers_stay_together_where_there_are_enough():
    assert Partition(54, 6, 4, 2).sizes == (8, 8, 8, 6, 6, 6, 6, 6)
    assert Partition(10, 6, 4, 2).sizes == (2, 2, 1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("exchange", ["cached", "naive"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_stage_knows_each_source_that_it_reads_or_sends(partition, exchange):
    window = payload(partition, exchange).window
    known = [set() for _ in range(partition.stages)]
    known[0].add(0)
    for chunk in range(partition.num_chunks):
        stage, count = chunk % partition.stages, partition.sources_before[chunk]
        if chunk:
            hop = hops(partition, exchange)[chunk - 1]
            carried = {source for source in range(*hop.carried) if source >= 0}
            assert carried <= known[stage - 1] and hop.needs == count
            assert hop.carried == (count - window, count)
            assert set(range(hop.has)) <= known[stage] or exchange == "naive"
            known[stage] |= carried
            if exchange == "naive":  # Stands without a cache.
                assert carried == set(range(count))
        assert set(range(count)) <= known[stage]
        known[stage] |= set(range(count, partition.sources_after[chunk]))


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_no_smaller_window_would_do(partition):
    needed = [hop.new for hop in hops(partition)]
    assert payload(partition).window == max([1, *needed])


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_the_cache_has_room_for_every_window_and_every_chunks_blocks(partition):
    for exchange in ("cached", "naive"):
        p = payload(partition, exchange)
        for before in partition.sources_before:
            assert before - p.window + p.padding >= 0
            assert before + p.finished + p.padding <= p.cache_rows
        assert all(after + p.padding <= p.cache_rows for after in partition.sources_after)
        assert p.early + p.late == p.window and p.late >= 1


@pytest.mark.parametrize(
    "virtual, microbatches, blocks_in_chunk, cached, naive",
    [
        (1, 8, 1, 88, 110),
        (2, 8, 1, 152, 342),
        (3, 12, 1, 312, 1014),
        (4, 8, 1, 280, 1190),
        (2, 8, 2, 266, 646),
        (4, 32, 1, 1048, 4454),
    ],
)
def test_exchanged_blocks_on_four_stages(virtual, microbatches, blocks_in_chunk, cached, naive):
    partition = Partition(4 * virtual * blocks_in_chunk * 2, 2, 4, virtual)
    for make in (interleaved, interleaved_1f1b):
        schedule = make(4, virtual, microbatches)
        assert payload(partition).exchanged_blocks(schedule) == cached
        assert payload(partition, "naive").exchanged_blocks(schedule) == naive
        assert payload(partition).exchanged_bytes(schedule, 10) == 10 * cached


@pytest.mark.parametrize("blocks_in_chunk", [1, 2, 3])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_blocks_that_must_cross_follow_the_paper(stages, virtual, blocks_in_chunk):
    """Equations 7 and 8, exact: with the embedding, and P - 1 hops where a stage has one of P."""
    partition = Partition(2 * stages * virtual * blocks_in_chunk, 2, stages, virtual)
    p, c, b = stages, stages * virtual, blocks_in_chunk
    assert sum(hop.needs for hop in hops(partition)) == c * (c - 1) // 2 * b + (c - 1)
    new = p * (p - 1) // 2 * b + (p - 1) + (virtual - 1) * p * (p - 1) * b
    assert sum(hop.new for hop in hops(partition)) == new


def test_an_open_block_takes_one_entry_in_its_own_dtype():
    partition = Partition(16, 4, 4, 2)
    p = payload(partition)
    assert p.carries_partial_sum and p.blocks == p.window + 1
    schedule = gpipe(4, 8)
    assert p.exchanged_bytes(schedule, 2, 4) == 2 * 11 * (2 * p.window + 4)


@pytest.mark.parametrize("exchange", ["cached", "naive"])
def test_a_standard_residual_is_one_block_a_hop(exchange):
    partition = Partition(16, None, 4, 2)
    assert payload(partition, exchange).blocks == 1
    assert [hop.new for hop in hops(partition, exchange)] == [1] * 7
    # A stage keeps what enters each of its chunks, and what leaves the last.
    assert payload(partition, exchange).num_sources == 3


def test_a_single_stage_sends_nothing():
    assert payload(Partition(8, 2, 1, 2)).exchanged_blocks(interleaved(1, 2, 4)) == 0


def test_figure_3_of_the_paper():
    """Four stages, blocks of two chunks: from the second round on one or two blocks a hop."""
    assert cross_stage.picture(Partition(16, 4, 4, 2)).splitlines() == [
        "cached: 8 chunks on 4 stages, 3 blocks a hop",
        "chunk   0 to   1 (stage 1)  #.... p",
        "chunk   1 to   2 (stage 2)  ##...",
        "chunk   2 to   3 (stage 3)  ##... p",
        "chunk   3 to   4 (stage 0)  o##..",
        "chunk   4 to   5 (stage 1)  o+#.. p",
        "chunk   5 to   6 (stage 2)  oo##.",
        "chunk   6 to   7 (stage 3)  oo+#. p",
    ]


def test_tables():
    partition = Partition(8, 4, 2, 2)
    assert format_table(partition.rows()).splitlines() == [
        "chunk  stage  virtual stage  sublayers  sources before  starts inside block"
        "  blocks finished",
        "    0      0              0     0 to 1               1                False"
        "                0",
        "    1      1              0     2 to 3               1                 True"
        "                1",
        "    2      0              1     4 to 5               2                False"
        "                0",
        "    3      1              1     6 to 7               2                 True"
        "                1",
    ]
    assert format_table(cross_stage.rows(partition)).splitlines()[0].split() == (
        "to chunk to stage has needs new carried open block".split()
    )


def test_more_chunks_than_sublayers_are_refused_with_sizes_that_work():
    with pytest.raises(ValueError) as error:
        Partition(10, 2, 4, 3)
    for part in ("stages=4", "virtual_stages=3", "12 chunks", "10 sub-layers"):
        assert part in str(error.value)
    assert "take stages=3 or virtual_stages=2, or at least 6 layers" in str(error.value)


def test_an_unknown_exchange_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'cached'"):
        payload(Partition(8, 2, 2), "cache")
    with pytest.raises(ValueError, match="block_size: expected a whole number"):
        Partition(8, 0, 2)
