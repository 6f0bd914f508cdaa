"""Pipeline schedules as plain data: what each stage does at each tick.

All stages run one program in lockstep. In a tick a stage runs one chunk forward, one backward, or
both. Microbatches go round the ring in groups of P (depth first): the group passes all V chunks of
a stage before the next group enters, so that what the last stage sends arrives at the first just
when it is needed and nothing waits in a buffer. With k = t - p a stage p works at tick t on

    group = k // (P V),   virtual stage = k % (P V) // P,   microbatch = P group + k % P

if 0 <= k < M V. The backward pass is the same in reverse order of chunks. All three schedules idle
for P - 1 of M V + P - 1 ticks in each direction; they differ in what must be kept.

References:
    Narayanan et al., arXiv:2104.04473, section 2.2, for the interleaved schedules.
"""

import dataclasses
from typing import Any, NamedTuple

from attnres_jax.parallel.errors import check_choice

ORDERS = ("forward_then_backward", "one_forward_one_backward")


class Work(NamedTuple):
    """One chunk of one microbatch; integers, or traced ones.

    Attributes:
        microbatch: Below M.
        virtual_stage: Which of the stage's chunks, below V.
        is_active: Whether there is work; if not, the other two are some valid pair.
    """

    microbatch: Any
    virtual_stage: Any
    is_active: Any


class Phase(NamedTuple):
    """Ticks `start` to `stop - 1`, in which every stage has the same kinds of work to do."""

    start: int
    stop: int
    runs_forward: bool
    runs_backward: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who does what at each tick; build one with `gpipe`, `interleaved` or `interleaved_1f1b`.

    Attributes:
        stages: P.
        virtual_stages: Chunks of each stage (V).
        microbatches: M, a multiple of P.
        order: "forward_then_backward" keeps all microbatches; "one_forward_one_backward" starts a
            microbatch's backward pass in the tick that finished its forward pass.

    Raises:
        ValueError: A number below one, or microbatches that are no multiple of the stages.
    """

    stages: int
    virtual_stages: int
    microbatches: int
    order: str = "forward_then_backward"

    def __post_init__(self):
        """Checks the numbers."""
        for name in ("stages", "virtual_stages", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.microbatches % self.stages:
            raise ValueError(
                f"microbatches go round in groups of one for each stage: {self.microbatches} is not"
                f" a multiple of stages={self.stages}; pad to"
                f" {padded_microbatches(self.microbatches, self.stages)} with zero weight"
            )
        check_choice("order", self.order, ORDERS)

    @property
    def name(self) -> str:
        """What the field calls it."""
        if self.order == "one_forward_one_backward":
            return "1F1B" if self.virtual_stages == 1 else "interleaved 1F1B"
        return "GPipe" if self.virtual_stages == 1 else "interleaved"

    @property
    def ticks_each_way(self) -> int:
        """Ticks in which some stage runs forward; as many run backward: M V + P - 1."""
        return self.microbatches * self.virtual_stages + self.stages - 1

    @property
    def first_backward_tick(self) -> int:
        """The tick at which the last stage starts its first backward pass."""
        if self.order == "forward_then_backward":
            return self.ticks_each_way
        return self.stages * self.virtual_stages - 1

    @property
    def num_ticks(self) -> int:
        """Ticks of a training step. A tick lasts as long as the work that its phase has."""
        return self.first_backward_tick + self.ticks_each_way

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Forward alone, both, backward alone; those of no tick left out."""
        forward_end, backward_start = self.ticks_each_way, self.first_backward_tick
        phases = (
            Phase(0, min(forward_end, backward_start), True, False),
            Phase(backward_start, forward_end, True, True),
            Phase(max(forward_end, backward_start), self.num_ticks, False, True),
        )
        return tuple(phase for phase in phases if phase.start < phase.stop)

    @property
    def bubble_fraction(self) -> float:
        """Share of the time in which a stage idles: (P - 1) / (M V + P - 1)."""
        return (self.stages - 1) / self.ticks_each_way

    @property
    def cache_slots(self) -> int:
        """Microbatches whose sources a stage keeps at once; microbatch m is in slot m % slots."""
        if self.order == "forward_then_backward":
            return self.microbatches
        in_flight = 2 * self.stages - (self.virtual_stages == 1)
        return min(self.microbatches, in_flight)

    def forward(self, tick, stage) -> Work:
        """What `stage` runs forward at `tick`; both may be traced integers."""
        return self._work(tick - stage)

    def backward(self, tick, stage) -> Work:
        """What `stage` runs backward at `tick`, after its forward work of the same tick."""
        work = self._work(tick - self.first_backward_tick - (self.stages - 1 - stage))
        return work._replace(virtual_stage=self.virtual_stages - 1 - work.virtual_stage)

    def _work(self, k) -> Work:
        """The k-th of a stage's M V items; past either end, the nearest virtual stage that is."""
        per_group = self.stages * self.virtual_stages
        is_active = (k >= 0) & (k < self.microbatches * self.virtual_stages)
        k = k % (self.microbatches * self.virtual_stages)
        microbatch = k // per_group * self.stages + k % self.stages
        return Work(microbatch, k % per_group // self.stages, is_active)

    def rows(self) -> list[dict[str, object]]:
        """One row for each tick: "F microbatch.virtual_stage" and the same for B, by stage."""

        def cell(letter, work):
            return f"{letter} {work.microbatch}.{work.virtual_stage}" if work.is_active else ""

        return [
            {"tick": tick}
            | {
                f"stage_{stage}": "  ".join(
                    filter(
                        None,
                        [
                            cell("F", self.forward(tick, stage)),
                            cell("B", self.backward(tick, stage)),
                        ],
                    )
                )
                for stage in range(self.stages)
            }
            for tick in range(self.num_ticks)
        ]

    def picture(self) -> str:
        """Draws stages down and ticks across: microbatch and virtual stage (a, b, ...) of each.

        Two lines a stage, forward above backward; a dot is a tick without such work.
        """
        width = len(str(self.microbatches - 1)) + 1 + self.virtual_stages // 26
        lines = [
            f"{self.name}: {self.stages} stages, {self.virtual_stages} virtual stages,"
            f" {self.microbatches} microbatches, bubble {self.bubble_fraction:.1%}"
        ]
        for stage in range(self.stages):
            for letter, work_at in (("F", self.forward), ("B", self.backward)):
                cells = []
                for tick in range(self.num_ticks):
                    work = work_at(tick, stage)
                    label = f"{work.microbatch}{_letters(work.virtual_stage)}"
                    cells.append((label if work.is_active else ".").rjust(width))
                label = f"stage {stage}" if letter == "F" else ""
                lines.append(f"{label:9} {letter} {' '.join(cells)}")
        return "\n".join(lines)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All microbatches forward, then all backward; one chunk a stage (arXiv:1811.06965)."""
    return Schedule(stages, 1, microbatches)


def interleaved(stages: int, virtual_stages: int, microbatches: int) -> Schedule:
    """GPipe with V chunks a stage, which divides the bubble by about V."""
    return Schedule(stages, virtual_stages, microbatches)


def interleaved_1f1b(stages: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The same bubble, with at most 2 P microbatches alive, however many there are."""
    return Schedule(stages, virtual_stages, microbatches, "one_forward_one_backward")


def padded_microbatches(microbatches: int, stages: int) -> int:
    """The next multiple of the number of stages."""
    return -(-microbatches // stages) * stages


def _letters(index: int) -> str:
    return chr(ord("a") + index % 26) * (1 + index // 26)
