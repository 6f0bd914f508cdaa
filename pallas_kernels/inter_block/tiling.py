"""Tiles of phase 1 on TPUs: how many tokens one step of the grid holds, by what fits in VMEM."""

import dataclasses
import math
from typing import Literal

from pallas_kernels.chips import Chip

LANES = 128
GROUP = 8
"""Tokens that share a matrix of weights: the rows of a register."""
TOKENS = (256, 128, 64, 32, 16)
"""Rows of one step, best first; fewer than 16 do not fill a register of 16-bit numbers."""
MAX_SOURCES = 48
"""Sources of one launch: more would not compile in reasonable time, and are chained instead."""
FINISHED = 512
SHARE = 0.85
"""Share of VMEM that windows may take; the rest is for the compiler's own scratch."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much work of a kernel is scheduled together.

    Attributes:
        whole: Columns of the widest row that a product over d takes at once.
        contracted: Columns that it takes at a time of a wider one.
        numbers: Numbers per token that groups of 8 tokens may have in work together.
        groups: How many of these groups at most.
    """

    whole: int
    contracted: int
    numbers: int
    groups: int


# By the width of the matrix unit. A narrow one takes longer over a group: more than 8 at D=2048 and
# S=12 give it no more to do, but twice the code, and in the forward they spill.
LIMITS = {
    ("forward", 128): Limits(7168, 1152, numbers=460_000, groups=8),
    ("forward", 256): Limits(7168, 1152, numbers=460_000, groups=16),
    ("backward", 128): Limits(2304, 2304, numbers=230_000, groups=16),
    ("backward", 256): Limits(1152, 1152, numbers=460_000, groups=16),
}


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The shape of one grid step.

    Attributes:
        tokens: Rows of every source that a step holds: a multiple of 16 that divides 128, or a
            multiple of 128.
        contracted: Columns that a product over d takes at a time, a multiple of 128.
        finished: Columns of the results that are computed at a time, a multiple of 128.
        unroll: Groups of 8 tokens that are scheduled together, a divisor of their number.
        vmem_bytes: What the kernel may use.
        matrix_width: Rows and columns of the chip's matrix unit.
    """

    tokens: int
    contracted: int
    finished: int
    unroll: int
    vmem_bytes: int
    matrix_width: int

    def __post_init__(self) -> None:
        if self.tokens < 16 or (128 % self.tokens and self.tokens % 128):
            raise ValueError(
                "tokens: expected 16, 32, 64 or a multiple of 128 rows in a grid step,"
                f" got {self.tokens}"
            )
        for name in ("contracted", "finished"):
            if getattr(self, name) < LANES or getattr(self, name) % LANES:
                raise ValueError(
                    f"{name}: expected a multiple of 128 columns, got {getattr(self, name)}"
                )
        groups = min(self.tokens, LANES) // GROUP
        if self.unroll < 1 or groups % self.unroll:
            raise ValueError(
                f"unroll: expected a divisor of {groups}, the groups of 8 tokens, got {self.unroll}"
            )


def window_bytes(kind: Literal["forward", "backward"], tokens: int, shape: "Shape") -> int:
    """Bytes of VMEM that the windows and scratch of one step take, each window held twice."""
    n, s, itemsize = shape.n, shape.s, shape.itemsize
    width, lanes = math.ceil(shape.d / LANES) * LANES, max(tokens, LANES)
    if kind == "forward":
        # Reads that are carried from one launch to the next are float32, in and out.
        rows = itemsize * n + (8 if shape.carried else itemsize) * s
        statistics = s * pad(n) + 2 * pad(s) + 2 * pad(n)
        vectors = 4 * pad(3 * s) * width
        scratch = n * pad(s) + n * min(tokens, LANES) + 3 * LANES
    else:
        rows = itemsize * (3 * n + s)
        statistics = 2 * s * pad(n) + 2 * pad(s) + pad(n)
        vectors = 4 * (pad(3 * s) + pad(s)) * width + 4 * GROUP * s * LANES
        scratch = s * pad(3 * n + 2) + n * LANES * math.ceil(3 * s / LANES)
    windows = rows * tokens * width + 4 * statistics * lanes + vectors
    return 2 * windows + 4 * LANES * scratch


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a launch works on: n sources, s reads, t tokens, width d, bytes of a number."""

    n: int
    s: int
    t: int
    d: int
    itemsize: int
    carried: bool = False


def choose(kind: Literal["forward", "backward"], shape: Shape, chip: Chip) -> Tiling | None:
    """Returns the tile for a shape on a chip, or None where not even the smallest one fits."""
    if shape.n > MAX_SOURCES:
        return None
    vmem_bytes = int(chip.vmem_bytes * SHARE)
    for tokens in TOKENS:
        if tokens > max(LANES, shape.t) or (kind == "backward" and tokens > LANES):
            continue
        if window_bytes(kind, tokens, shape) > vmem_bytes:
            continue
        limits = LIMITS[kind, 256 if chip.matrix_width >= 256 else 128]
        return Tiling(
            tokens=tokens,
            contracted=_contracted(shape.d, limits),
            finished=FINISHED,
            unroll=_unroll(tokens, shape, limits),
            vmem_bytes=int(chip.vmem_bytes * 0.95),
            matrix_width=chip.matrix_width,
        )
    return None


def _unroll(tokens: int, shape: Shape, limits: Limits) -> int:
    """Enough groups in flight to keep the matrix unit busy, and no more code than that."""
    groups = min(tokens, LANES) // GROUP
    in_flight = 2 * limits.numbers // (shape.itemsize * shape.s * shape.d)
    most = max(min(in_flight, limits.groups), 1)
    return max(k for k in range(1, groups + 1) if groups % k == 0 and k <= most)


def _contracted(d: int, limits: Limits) -> int:
    """The largest multiple of 128 up to the limit that divides the whole registers of d."""
    most = limits.whole if d <= limits.whole else limits.contracted
    registers = max(d // LANES, 1)
    return LANES * max(k for k in range(1, most // LANES + 1) if registers % k == 0)


def pad(rows: int) -> int:
    """Returns the rows of whole registers that hold these."""
    return -(-rows // 8) * 8
