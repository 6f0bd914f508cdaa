"""Which sub-layers each pipeline chunk runs, and where its blocks begin and end. Plain data.

P stages (devices along the mesh axis "stage") hold V chunks each. The C = P V chunks are
consecutive: chunk c runs on stage c % P as that stage's chunk c // P, so that each hands over to
the next stage of a ring. A block may end inside a chunk or span several.
"""

import dataclasses
import itertools

from attnres_jax.parallel.errors import nearest


@dataclasses.dataclass(frozen=True)
class Partition:
    """L sub-layers, in blocks of S, cut into P V consecutive chunks.

    Chunks differ by one unit at most, the longer ones first. A unit is `unit` sub-layers (a whole
    transformer layer) where there are as many units as chunks, else a single sub-layer.

    Attributes:
        num_sublayers: L.
        block_size: Sub-layers in a block (S); the last block may be short. None is the standard
            residual, whose one source is the stream itself.
        stages: P.
        virtual_stages: Chunks of each stage (V).
        unit: Sub-layers that are kept together where possible.

    Raises:
        ValueError: Fewer sub-layers than chunks, or a number below one.
    """

    num_sublayers: int
    block_size: int | None
    stages: int
    virtual_stages: int = 1
    unit: int = 2

    def __post_init__(self):
        """Checks that every chunk gets a sub-layer."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "block_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{field.name}: expected a whole number of at least 1, got {value!r}"
                )
        if self.num_chunks > self.num_sublayers:
            stages = nearest(self.stages, self.num_sublayers // self.virtual_stages)
            virtual = nearest(self.virtual_stages, self.num_sublayers // self.stages)
            ways = [f"stages={stages}"] if stages else []
            ways += [f"virtual_stages={virtual}"] if virtual else []
            raise ValueError(
                f"every chunk needs a sub-layer: stages={self.stages} times"
                f" virtual_stages={self.virtual_stages} is {self.num_chunks} chunks, but the model"
                f" has {self.num_sublayers} sub-layers; take {' or '.join(ways) or 'fewer stages'},"
                f" or at least {-(-self.num_chunks // 2)} layers of two sub-layers"
            )

    @property
    def num_chunks(self) -> int:
        """C = P V."""
        return self.stages * self.virtual_stages

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First sub-layer of each chunk, and L: C + 1 numbers."""
        units, rest = divmod(self.num_sublayers, self.unit)
        unit = self.unit if rest == 0 and units >= self.num_chunks else 1
        base, longer = divmod(self.num_sublayers // unit, self.num_chunks)
        return tuple(unit * (base * c + min(c, longer)) for c in range(self.num_chunks + 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sub-layers of each chunk."""
        return tuple(b - a for a, b in itertools.pairwise(self.boundaries))

    @property
    def num_slots(self) -> int:
        """Sub-layers of the longest chunk: what every chunk's program has room for."""
        return max(self.sizes)

    @property
    def sources_before(self) -> tuple[int, ...]:
        """Sources finished before each chunk, the embedding among them.

        A standard residual stream is counted anew on each stage: what enters the stage's first
        chunk is source 1, and so on.
        """
        if self.block_size is None:
            return tuple(1 + c // self.stages for c in range(self.num_chunks))
        return tuple(1 + start // self.block_size for start in self.boundaries[:-1])

    @property
    def sources_after(self) -> tuple[int, ...]:
        """Sources finished after each chunk."""
        if self.block_size is None:
            return tuple(before + 1 for before in self.sources_before)
        return (*self.sources_before[1:], 1 - (-self.num_sublayers // self.block_size))

    @property
    def num_sources(self) -> int:
        """Sources of the final read."""
        return self.sources_after[-1]

    @property
    def blocks_finished(self) -> tuple[int, ...]:
        """Blocks that end within each chunk."""
        pairs = zip(self.sources_before, self.sources_after, strict=True)
        return tuple(after - before for before, after in pairs)

    @property
    def is_open(self) -> tuple[bool, ...]:
        """Whether each chunk starts inside a block, whose partial sum then comes along."""
        if self.block_size is None:
            return (False,) * self.num_chunks
        return tuple(start % self.block_size != 0 for start in self.boundaries[:-1])

    @property
    def is_used(self) -> tuple[tuple[bool, ...], ...]:
        """For each chunk and slot: whether a sub-layer is there. Slots are `num_slots` long."""
        return tuple(tuple(i < size for i in range(self.num_slots)) for size in self.sizes)

    @property
    def begins_block(self) -> tuple[tuple[bool, ...], ...]:
        """For each chunk and slot: whether its sub-layer is the first of a block."""
        size = self._sublayers_in_block
        return self._flags(lambda sublayer: sublayer % size == 0)

    @property
    def ends_block(self) -> tuple[tuple[bool, ...], ...]:
        """For each chunk and slot: whether its sub-layer is the last of a block."""
        size, end = self._sublayers_in_block, self.num_sublayers
        return self._flags(lambda sublayer: (sublayer + 1) % size == 0 or sublayer + 1 == end)

    @property
    def _sublayers_in_block(self) -> int:
        return self.num_sublayers if self.block_size is None else self.block_size

    def _flags(self, is_so) -> tuple[tuple[bool, ...], ...]:
        return tuple(
            tuple(i < size and is_so(start + i) for i in range(self.num_slots))
            for start, size in zip(self.boundaries, self.sizes, strict=False)
        )

    def rows(self) -> list[dict[str, object]]:
        """One row for each chunk, to print as a table."""
        return [
            {
                "chunk": c,
                "stage": c % self.stages,
                "virtual_stage": c // self.stages,
                "sublayers": f"{start} to {start + size - 1}",
                "sources_before": sources,
                "starts_inside_block": is_open,
                "blocks_finished": blocks,
            }
            for c, (start, size, sources, is_open, blocks) in enumerate(
                zip(
                    self.boundaries[:-1],
                    self.sizes,
                    self.sources_before,
                    self.is_open,
                    self.blocks_finished,
                    strict=True,
                )
            )
        ]
