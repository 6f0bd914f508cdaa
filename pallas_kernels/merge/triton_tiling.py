"""How phase 2 is launched on NVIDIA GPUs: data by compute capability, chosen by registers."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.gpus import launches_for


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A launch of one kernel of phase 2.

    Attributes:
        compute_capability: Of the GPU that the kernel is compiled for: 80, 90, 100, ...
        num_warps: Warps of a program.
        tokens: Tokens that a program works on at a time.
        half: Columns of half a tile.
        chunks: Tiles that cover a token's row.
        packed: Whether tiles are kept as words of two 16-bit elements.
        row_tokens: Tokens that a program of the backward kernel runs through; it sums their share
            of the parameters' gradients into one row.
        num_stages: Tokens in flight in that run: while some are computed, the next are fetched.
    """

    compute_capability: int
    num_warps: int
    tokens: int
    half: int
    chunks: int
    packed: bool
    row_tokens: int = 128
    num_stages: int = 3

    def __post_init__(self):
        powers = {"num_warps": self.num_warps, "tokens": self.tokens, "half": self.half}
        for name, value in powers.items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: Triton needs a power of two, got {value}")
        if self.half < 4:
            raise ValueError(f"half: at least 4 columns, got {self.half}")
        if self.row_tokens < 32 or self.row_tokens % self.tokens:
            raise ValueError(
                f"row_tokens: at least 32 and a multiple of tokens={self.tokens},"
                f" got {self.row_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the choice depends on.

    Attributes:
        multiprocessors: Of the largest card of the capability.
        forward: (warps, most tiles a row) that leave no register spilled, in order of preference.
        backward: The same for the backward kernel.
        backward_few_tokens: The same where its programs, each of which sums over many tokens, are
            too few to share a multiprocessor: one alone needs many warps.
        wide_backward: The same for that of the single-phase read, which keeps more rows, and for
            float32 rows, which take more registers.
    """

    multiprocessors: int
    forward: tuple[tuple[int, int], ...] = ((4, 3), (8, 4), (16, 4), (16, 16))
    backward: tuple[tuple[int, int], ...] = ((4, 2), (8, 2), (16, 2), (16, 16))
    backward_few_tokens: tuple[tuple[int, int], ...] = ((16, 1), (16, 2), (16, 16))
    wide_backward: tuple[tuple[int, int], ...] = ((4, 2), (8, 2), (8, 4), (16, 16))


GPUS = {80: Gpu(108), 90: Gpu(132), 100: Gpu(148)}
LEAST_ROW_TOKENS = 80
"""Shares of the parameters' gradients are then less than 2% of what the kernel moves."""
WARPS_A_MULTIPROCESSOR = 24
"""So many hide the latency of memory."""
MAX_TOKENS = 16


def choose_tiling(
    num_tokens: int,
    width: int,
    dtype,
    *,
    compute_capability: int,
    backward: bool,
    single_phase: bool = False,
) -> Tiling:
    """Returns the launch for arrays `[num_tokens, width]` whose output has a dtype.

    Raises:
        ValueError: A GPU older than 8.0, an unsupported dtype, or rows too wide for registers.
    """
    dtype = jnp.dtype(dtype)
    gpu = launches_for(GPUS, dtype, compute_capability)
    launches = gpu.forward
    if backward and (single_phase or dtype.itemsize == 4):
        launches = gpu.wide_backward
    elif backward:
        few = num_tokens < 2 * gpu.multiprocessors * LEAST_ROW_TOKENS
        launches = gpu.backward_few_tokens if few else gpu.backward
    num_warps, most_chunks, columns, chunks, fitting = 0, 0, {}, {}, []
    for num_warps, most_chunks in launches:
        # Eight columns of a tile are a thread's: loads of 16 bytes.
        columns = {t: 256 * num_warps // t for t in (1, 2, 4, 8, MAX_TOKENS)}
        chunks = {t: -(-width // c) for t, c in columns.items()}
        fitting = [t for t in columns if chunks[t] <= most_chunks]
        if fitting:
            break
    if not fitting:
        raise ValueError(
            f"triton_gpu: rows have at most {most_chunks * columns[1]} elements, got {width};"
            ' use implementation="xla"'
        )
    # The fewest idle columns; then, backward, many tokens in flight.
    tokens = min(fitting, key=lambda t: (chunks[t] * columns[t], -t if backward else t))
    programs = max(1, WARPS_A_MULTIPROCESSOR // num_warps)
    row_bytes = chunks[tokens] * columns[tokens] * tokens * dtype.itemsize
    share = max(LEAST_ROW_TOKENS, -(-num_tokens // (gpu.multiprocessors * programs)))
    return Tiling(
        compute_capability=compute_capability,
        num_warps=num_warps,
        tokens=tokens,
        half=columns[tokens] // 2,
        chunks=chunks[tokens],
        packed=dtype.itemsize == 2 and width % 2 == 0,
        row_tokens=-(-share // tokens) * tokens,
        # Ten rows a stage in 160 KiB of shared memory, which the smallest has.
        num_stages=3 if row_bytes <= 2**12 else 2 if row_bytes <= 2**14 else 1,
    )
