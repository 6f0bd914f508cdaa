"""How phase 1 is launched on NVIDIA GPUs: data by compute capability."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpus import launches_for

MAX_READS = 24
"""Outputs that a launch has parameters for."""
MAX_SOURCES = 16
"""Sources that it has gradients for."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The part of the work that a program of a kernel has in hand at a time.

    Attributes:
        num_warps: Warps of the program.
        tokens: Tokens.
        columns: Columns of the width.
        num_stages: Steps in flight: while one is computed, the next ones' rows are fetched.
    """

    num_warps: int
    tokens: int
    columns: int
    num_stages: int

    def __post_init__(self):
        for name in ("num_warps", "tokens", "columns"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: Triton needs a power of two, got {value}")
        if self.columns < 16:
            raise ValueError(f"columns: matrix units need at least 16, got {self.columns}")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Launches of the kernels of phase 1.

    Attributes:
        compute_capability: Of the GPU that the kernels are compiled for: 80, 90, 100, ...
        sources_per_launch: Sources that a launch reads; more take several launches.
        forward: The forward pass's kernel.
        backward: The backward pass's first kernel.
        query_gradients: Its second kernel.
        row_tokens: Tokens whose contributions to a query's gradient are summed into one row.
    """

    compute_capability: int
    sources_per_launch: int
    forward: Step
    backward: Step
    query_gradients: Step
    row_tokens: int

    def __post_init__(self):
        if not 1 <= self.sources_per_launch <= MAX_SOURCES:
            raise ValueError(
                f"sources_per_launch: 1 to {MAX_SOURCES}, got {self.sources_per_launch}"
            )
        least = max(32, self.query_gradients.tokens)
        if self.row_tokens < least or self.row_tokens % self.query_gradients.tokens:
            raise ValueError(
                f"row_tokens: at least {least} and a multiple of {self.query_gradients.tokens}"
                f" (query_gradients.tokens), got {self.row_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The largest card of a compute capability.

    Attributes:
        multiprocessors: How many it has.
        cache: Bytes of the second-level cache that they share.
    """

    multiprocessors: int
    cache: int


GPUS = {80: Gpu(108, 40 * 2**20), 90: Gpu(132, 50 * 2**20), 100: Gpu(148, 126 * 2**20)}


@dataclasses.dataclass(frozen=True)
class Launches:
    """Steps that spill no register.

    A program of the first two kernels reads its rows twice. So that it finds them in the cache the
    second time, the first of several steps is taken whose programs have few enough rows in hand.

    Attributes:
        forward: Of the forward pass's kernel.
        backward: Of the backward pass's first kernel.
        query_gradients: Of its second kernel.
        row_tokens: As in `Tiling`.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    query_gradients: Step
    row_tokens: int


_LAUNCHES = Launches(
    forward=(Step(8, 4, 128, 3), Step(8, 2, 128, 3), Step(16, 1, 256, 3)),
    backward=(Step(8, 2, 128, 2), Step(16, 1, 256, 3)),
    query_gradients=Step(4, 2, 128, 3),
    row_tokens=128,
)
LAUNCHES = {80: _LAUNCHES, 90: _LAUNCHES, 100: _LAUNCHES}
"""By compute capability; in bfloat16."""
# Products of float32 take twice the registers, and float16 is multiplied as such in places.
_FLOAT16 = {"forward": (Step(8, 2, 64, 2),)}
_FLOAT32 = _FLOAT16 | {"backward": (Step(8, 2, 32, 2),), "query_gradients": Step(4, 2, 64, 3)}
OF_DTYPE: dict[str, dict[str, Any]] = {"bfloat16": {}, "float16": _FLOAT16, "float32": _FLOAT32}
WARPS_A_MULTIPROCESSOR = 16
"""So many run at once, by the registers that these steps take."""


def choose_tiling(
    num_sources: int, num_reads: int, width: int, dtype, *, compute_capability: int
) -> Tiling:
    """Returns the launches for so many reads of n sources `[t, width]` of a dtype.

    Raises:
        ValueError: A GPU older than 8.0, or an unsupported dtype.
    """
    dtype = jnp.dtype(dtype)
    gpu = launches_for(GPUS, dtype, compute_capability)
    launches = launches_for(LAUNCHES, dtype, compute_capability)
    launches = dataclasses.replace(launches, **OF_DTYPE[dtype.name])
    num_launches = -(-num_sources // MAX_SOURCES)
    sources_per_launch = -(-num_sources // num_launches)

    def fitting(steps: tuple[Step, ...], rows: int) -> Step:
        for step in steps:
            programs = gpu.multiprocessors * WARPS_A_MULTIPROCESSOR // step.num_warps
            # On average, a program has read half of its rows and not yet read them again.
            if programs * step.tokens * rows * width * dtype.itemsize / 2 <= gpu.cache:
                return step
        return steps[-1]

    return Tiling(
        compute_capability=compute_capability,
        sources_per_launch=sources_per_launch,
        forward=fitting(launches.forward, sources_per_launch),
        backward=fitting(launches.backward, sources_per_launch + num_reads),
        query_gradients=launches.query_gradients,
        row_tokens=launches.row_tokens,
    )
