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
        scalars: The backward pass's first kernel.
        gradients: Its second kernel.
        row_tokens: Tokens whose contributions to a query's gradient are summed into one row.
    """

    compute_capability: int
    sources_per_launch: int
    forward: Step
    scalars: Step
    gradients: Step
    row_tokens: int

    def __post_init__(self):
        if not 1 <= self.sources_per_launch <= MAX_SOURCES:
            raise ValueError(
                f"sources_per_launch: 1 to {MAX_SOURCES}, got {self.sources_per_launch}"
            )
        least = max(32, self.gradients.tokens)
        if self.row_tokens < least or self.row_tokens % self.gradients.tokens:
            raise ValueError(
                f"row_tokens: at least {least} and a multiple of {self.gradients.tokens}"
                f" (gradients.tokens), got {self.row_tokens}"
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

# Backward, the fastest of some tens on an H200, in bfloat16; for many reads, gradients have more
# warps than that, as the fastest spilled registers. Forward, what spills none.
_FEW_READS = {
    "forward": Step(num_warps=8, tokens=4, columns=128, num_stages=3),
    "scalars": Step(num_warps=1, tokens=1, columns=128, num_stages=3),
    "gradients": Step(num_warps=4, tokens=2, columns=128, num_stages=2),
    "row_tokens": 128,
}
_MANY_READS = _FEW_READS | {
    "gradients": Step(num_warps=4, tokens=2, columns=64, num_stages=2),
    "row_tokens": 256,
}
_BOTH = {16: _FEW_READS, 24: _MANY_READS}
LAUNCHES: dict[int, dict[int, dict[str, Any]]] = {80: _BOTH, 90: _BOTH, 100: _BOTH}
"""By compute capability and the most reads that they are for."""


def choose_tiling(
    num_sources: int, num_reads: int, width: int, dtype, *, compute_capability: int
) -> Tiling:
    """Returns the launches for so many reads of n sources `[t, width]` of a dtype.

    Raises:
        ValueError: A GPU older than 8.0, or an unsupported dtype.
    """
    dtype = jnp.dtype(dtype)
    launches = launches_for(LAUNCHES, dtype, compute_capability)
    most_reads = min((most for most in launches if num_reads <= most), default=max(launches))
    launch = launches[most_reads]
    num_launches = -(-num_sources // MAX_SOURCES)
    sources_per_launch = -(-num_sources // num_launches)

    changes: dict[str, dict[str, int]] = {}
    gpu = launches_for(GPUS, dtype, compute_capability)
    # Two programs share a multiprocessor, and have half of their sources still to read again.
    in_hand = gpu.multiprocessors * launch["forward"].tokens
    in_hand *= sources_per_launch * width * dtype.itemsize
    if in_hand > gpu.cache:
        changes["forward"] = {"tokens": 2}
    if dtype != jnp.bfloat16:
        # Products of float32 take twice the registers, and float16 is multiplied as such.
        changes["forward"] = {"tokens": 2, "columns": 64, "num_stages": 2}
    if dtype == jnp.float32:
        changes["scalars"] = {"columns": launch["scalars"].columns // 2}
        changes["gradients"] = {"columns": 32}
    launch = launch | {k: dataclasses.replace(launch[k], **v) for k, v in changes.items()}
    return Tiling(
        compute_capability=compute_capability,
        sources_per_launch=sources_per_launch,
        **launch,
    )
