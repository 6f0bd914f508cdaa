"""What crosses from stage to stage: a window of block representations. Plain data.

A chunk reads every source before it: the embedding b_0 and all finished blocks. Sending them all
with every hop (the naive exchange) sends most of them again and again. With cross-stage caching a
stage keeps each source that it received or produced, so a hop carries only those that arose since
the receiver's previous chunk. One program for all stages needs one shape for all hops: the window
is the K most recent sources, K the most that any hop needs. For C = P V chunks of N_p blocks each

    K = (P - 1) N_p + 1  cached,        K = C N_p + 1  naive.

Where a chunk starts inside a block, the open block's partial sum goes along as one entry more. A
standard residual stream is a window of one source, whatever the exchange.

References:
    Attention Residuals, arXiv:2603.15031, section 4.1, equations 7 and 8, figure 3.
"""

import dataclasses

from attnres_jax.parallel.errors import check_choice
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule

EXCHANGES = ("cached", "naive")


@dataclasses.dataclass(frozen=True)
class Payload:
    """What every hop carries, and where it lies among the sources.

    The cache of a microbatch has a row for each source and some on both sides: `padding` in front,
    so that the window before any chunk lies within, and after the last, so that a chunk may write
    `finished` rows though it finished fewer blocks.

    Attributes:
        window: Sources in a hop (K); the last is the newest.
        finished: Rows for the blocks that a chunk finishes: the most of any chunk. These go after
            the chunk has run; the older ones of the window go before.
        carries_partial_sum: Whether an open block's partial sum goes along.
        num_sources: Sources of the final read (R).
    """

    window: int
    finished: int
    carries_partial_sum: bool
    num_sources: int

    @property
    def late(self) -> int:
        """Sources of the window that are sent after the chunk's compute."""
        return min(self.window, self.finished)

    @property
    def early(self) -> int:
        """Sources of the window that are sent before it, and overlap with it."""
        return self.window - self.late

    @property
    def padding(self) -> int:
        """Rows of the cache before that of the embedding."""
        return self.window - 1

    @property
    def cache_rows(self) -> int:
        """Rows of one microbatch's cache."""
        return self.padding + self.num_sources + self.finished

    @property
    def blocks(self) -> int:
        """Block representations in a hop, the partial sum counted as one."""
        return self.window + self.carries_partial_sum

    def exchanged_blocks(self, schedule: Schedule) -> int:
        """Block representations that a stage sends in a step, forward and backward, bubbles too.

        Every stage sends one payload in each tick, of whatever it has: 2 (M V + P - 1) K. On a
        single stage nothing is sent.
        """
        return 0 if schedule.stages == 1 else 2 * schedule.ticks_each_way * self.blocks

    def exchanged_bytes(
        self, schedule: Schedule, block_bytes: int, partial_sum_bytes: int | None = None
    ) -> int:
        """The same in bytes.

        Args:
            schedule: Says how many ticks there are.
            block_bytes: Bytes of one block representation of one microbatch on one device.
            partial_sum_bytes: Those of a partial sum, which may be kept in a wider dtype.
        """
        if schedule.stages == 1:
            return 0
        partial = self.carries_partial_sum * (partial_sum_bytes or block_bytes)
        return 2 * schedule.ticks_each_way * (self.window * block_bytes + partial)


@dataclasses.dataclass(frozen=True)
class Hop:
    """The transfer to one chunk from the one before it; sources counted from the embedding, 0.

    Attributes:
        to_chunk: The receiving chunk.
        to_stage: Its stage.
        has: Sources that the receiver holds already: the first `has`.
        needs: Sources that its chunk reads: the first `needs`.
        carried: First and past-the-last source of the window; below 0 is padding.
        carries_open_block: Whether the chunk starts inside a block.
    """

    to_chunk: int
    to_stage: int
    has: int
    needs: int
    carried: tuple[int, int]
    carries_open_block: bool

    @property
    def new(self) -> int:
        """Sources that must cross: no exchange can carry fewer."""
        return self.needs - self.has


def payload(partition: Partition, exchange: str = "cached") -> Payload:
    """Works out the smallest window that serves every hop.

    Args:
        partition: Which chunk ends which blocks.
        exchange: "cached", or "naive" to send all sources with every hop.

    Raises:
        ValueError: No such exchange.
    """
    check_choice("exchange", exchange, EXCHANGES)
    needed = [hop.new for hop in _hops(partition, window=0)]
    window = max([1, *needed])
    if exchange == "naive" and partition.block_size is not None:
        window = partition.num_sources
    return Payload(
        window=window,
        finished=max(partition.blocks_finished),
        carries_partial_sum=any(partition.is_open),
        num_sources=partition.num_sources,
    )


def hops(partition: Partition, exchange: str = "cached") -> list[Hop]:
    """The C - 1 transfers of one microbatch's forward pass, in order."""
    return _hops(partition, payload(partition, exchange).window)


def _hops(partition: Partition, window: int) -> list[Hop]:
    before, after, stages = partition.sources_before, partition.sources_after, partition.stages

    def has(c: int) -> int:
        if partition.block_size is None:  # The stream itself has changed since.
            return before[c] - 1
        # All that its previous chunk read and all that it finished; nothing before its first.
        return after[c - stages] if c >= stages else 0

    return [
        Hop(
            to_chunk=c,
            to_stage=c % stages,
            has=has(c),
            needs=before[c],
            carried=(before[c] - window, before[c]),
            carries_open_block=partition.is_open[c],
        )
        for c in range(1, partition.num_chunks)
    ]


def rows(partition: Partition, exchange: str = "cached") -> list[dict[str, object]]:
    """One row for each hop, to print as a table."""
    return [
        {
            "to_chunk": hop.to_chunk,
            "to_stage": hop.to_stage,
            "has": hop.has,
            "needs": hop.needs,
            "new": hop.new,
            "carried": f"{hop.carried[0]} to {hop.carried[1] - 1}",
            "open_block": hop.carries_open_block,
        }
        for hop in hops(partition, exchange)
    ]


def picture(partition: Partition, exchange: str = "cached") -> str:
    """Draws hops down and sources across.

    `#` is a source that the hop carries and the receiver lacks, `+` one that it carries although
    the receiver has it, `o` one that the receiver has, `.` one that is not there yet, and `p` an
    open block's partial sum.
    """
    every = hops(partition, exchange)
    lines = [
        f"{exchange}: {partition.num_chunks} chunks on {partition.stages} stages,"
        f" {payload(partition, exchange).blocks} blocks a hop"
    ]
    for hop in every:
        marks = []
        for source in range(partition.num_sources):
            carried = hop.carried[0] <= source < hop.carried[1]
            marks.append(
                "." if source >= hop.needs else ("o+" if source < hop.has else "?#")[carried]
            )
        lines.append(
            f"chunk {hop.to_chunk - 1:3} to {hop.to_chunk:3} (stage {hop.to_stage})  "
            f"{''.join(marks)}{' p' if hop.carries_open_block else ''}"
        )
    return "\n".join(lines)
