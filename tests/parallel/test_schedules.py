"""Schedules as data: dependencies, idle ticks, live microbatches, and what is printed."""

import pytest

from attnres_jax.parallel.schedules import (
    Schedule,
    gpipe,
    interleaved,
    interleaved_1f1b,
    padded_microbatches,
)
from attnres_jax.parallel.tables import format_table

SIZES = [(p, v, m * p) for p in (1, 2, 4) for v in (1, 2, 3) for m in (1, 4)]
SCHEDULES = [make(*size) for size in SIZES for make in (interleaved, interleaved_1f1b)]


def ticks_of(schedule: Schedule, direction: str) -> dict[tuple[int, int], int]:
    """(microbatch, chunk) -> tick, from the schedule's own answers; no pair may come twice."""
    ticks = {}
    for tick in range(schedule.num_ticks):
        for stage in range(schedule.stages):
            work = getattr(schedule, direction)(tick, stage)
            if work.is_active:
                item = (work.microbatch, work.virtual_stage * schedule.stages + stage)
                assert item not in ticks
                ticks[item] = tick
    return ticks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_chunk_of_every_microbatch_runs_once_each_way(schedule):
    chunks = schedule.stages * schedule.virtual_stages
    everything = {(m, c) for m in range(schedule.microbatches) for c in range(chunks)}
    assert set(ticks_of(schedule, "forward")) == everything
    assert set(ticks_of(schedule, "backward")) == everything


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_hop_takes_one_tick(schedule):
    forward, backward = ticks_of(schedule, "forward"), ticks_of(schedule, "backward")
    last = schedule.stages * schedule.virtual_stages - 1
    for microbatch, chunk in forward:
        if chunk < last:
            assert forward[microbatch, chunk + 1] == forward[microbatch, chunk] + 1
            assert backward[microbatch, chunk] == backward[microbatch, chunk + 1] + 1
        assert backward[microbatch, chunk] >= forward[microbatch, chunk]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_phases_say_which_work_there_is(schedule):
    assert schedule.phases[0].start == 0 and schedule.phases[-1].stop == schedule.num_ticks
    assert [p.stop for p in schedule.phases[:-1]] == [p.start for p in schedule.phases[1:]]
    for phase in schedule.phases:
        for tick in range(phase.start, phase.stop):
            stages = range(schedule.stages)
            assert phase.runs_forward == any(schedule.forward(tick, p).is_active for p in stages)
            assert phase.runs_backward == any(schedule.backward(tick, p).is_active for p in stages)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bubble_is_the_share_of_idle_ticks(schedule):
    busy = len(ticks_of(schedule, "forward")) + len(ticks_of(schedule, "backward"))
    each_way = sum(p.stop - p.start for p in schedule.phases if p.runs_forward)
    backward = sum(p.stop - p.start for p in schedule.phases if p.runs_backward)
    assert each_way == backward == schedule.ticks_each_way
    idle = 1 - busy / (2 * each_way * schedule.stages)
    assert schedule.bubble_fraction == pytest.approx(idle)


def smallest_cache(schedule: Schedule) -> int:
    """Fewest slots with which no microbatch enters a stage before the slot's last one has left."""
    forward, backward = ticks_of(schedule, "forward"), ticks_of(schedule, "backward")

    def works(slots):
        return all(
            forward[new, stage] > backward[new - slots, stage]
            for stage in range(schedule.stages)
            for new in range(slots, schedule.microbatches)
        )

    return next(slots for slots in range(1, schedule.microbatches + 1) if works(slots))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cache_slots_are_enough_and_not_one_too_many(schedule):
    assert schedule.cache_slots == smallest_cache(schedule)


def test_1f1b_keeps_two_microbatches_a_stage_however_many_there_are():
    assert interleaved_1f1b(4, 2, 64).cache_slots == 8
    assert interleaved(4, 2, 64).cache_slots == 64


def test_names():
    assert gpipe(4, 8).name == "GPipe"
    assert interleaved(4, 2, 8).name == "interleaved"
    assert interleaved_1f1b(4, 2, 8).name == "interleaved 1F1B"


def test_picture_of_1f1b():
    assert interleaved_1f1b(2, 2, 2).picture().splitlines() == [
        "interleaved 1F1B: 2 stages, 2 virtual stages, 2 microbatches, bubble 20.0%",
        "stage 0   F 0a 1a 0b 1b  .  .  .  .",
        "          B  .  .  .  . 0b 1b 0a 1a",
        "stage 1   F  . 0a 1a 0b 1b  .  .  .",
        "          B  .  .  . 0b 1b 0a 1a  .",
    ]


def test_table_of_gpipe():
    assert format_table(gpipe(2, 2).rows()).splitlines() == [
        "tick  stage 0  stage 1",
        "   0    F 0.0",
        "   1    F 1.0    F 0.0",
        "   2             F 1.0",
        "   3             B 0.0",
        "   4    B 0.0    B 1.0",
        "   5    B 1.0",
    ]


def test_microbatches_that_are_no_multiple_of_the_stages_are_refused_or_padded():
    with pytest.raises(ValueError, match=r"6 is not a multiple of stages=4; pad to 8"):
        gpipe(4, 6)
    assert [padded_microbatches(m, 4) for m in (1, 4, 6, 8)] == [4, 4, 8, 8]


def test_an_unknown_order_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'forward_then_backward'"):
        Schedule(2, 1, 2, "forward_than_backward")


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="virtual_stages: expected at least 1, got 0"):
        interleaved(2, 0, 2)
