"""How phase 1 is launched on NVIDIA GPUs: data by compute capability, chosen by registers."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A launch of the kernels of phase 1.

    Attributes:
        compute_capability: Of the GPU that the kernels are compiled for: 80, 90, 100, ...
        num_warps: Warps of a program.
        tokens: Tokens of a program.
        half: Columns of half a tile.
        chunks: Tiles that cover a token's row.
        packed: Whether tiles are kept as words of two 16-bit elements.
        sources_per_launch: Sources that a program keeps in registers.
        hold: Whether the backward kernel keeps the sources to its end. It loads them again, from
            the cache, where the registers are too few for them and for their gradients.
        num_stages: Reads in flight: while one is computed, the next one's rows are fetched.
        row_tokens: Tokens whose contributions to a query's gradient are summed into one row.
        gradient_columns: Columns of a query's gradient that a program computes.
    """

    compute_capability: int
    num_warps: int
    tokens: int
    half: int
    chunks: int
    packed: bool
    sources_per_launch: int
    hold: bool
    num_stages: int = 2
    row_tokens: int = 256
    gradient_columns: int = 128

    def __post_init__(self):
        powers = {"num_warps": self.num_warps, "tokens": self.tokens, "half": self.half}
        for name, value in powers.items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: Triton needs a power of two, got {value}")
        if self.half < 4:
            raise ValueError(f"half: at least 4 columns, got {self.half}")
        if not 1 <= self.sources_per_launch <= 16:
            raise ValueError(f"sources_per_launch: 1 to 16, got {self.sources_per_launch}")
        if self.row_tokens < 32 or self.row_tokens % 32:
            raise ValueError(f"row_tokens: a multiple of 32, got {self.row_tokens}")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Registers of a thread that may hold sources.

    Attributes:
        num_warps: Warps of a program.
        held: Registers for the sources.
        with_gradients: Registers for the sources and their gradients together.
    """

    num_warps: int
    held: int
    with_gradients: int


# What matters here, 65,536 registers a multiprocessor and 255 a thread, is the same from compute
# capability 8.0 to 10.0, and no kernel uses more than 24 KiB of shared memory.
_BUDGETS = (Budget(4, 128, 150), Budget(8, 144, 150))
BUDGETS = {80: _BUDGETS, 90: _BUDGETS, 100: _BUDGETS}
MAX_TOKENS = 16
MAX_SOURCES = 16


def choose_tiling(num_sources: int, width: int, dtype, *, compute_capability: int) -> Tiling:
    """Returns the launch for n sources `[t, width]` of a dtype.

    The fewest warps whose registers hold a token's sources, so that reductions over the width take
    few steps, and the number of tokens that leaves the fewest columns of the last tile idle. Where
    the registers of eight warps do not hold all sources, several launches share them.

    Raises:
        ValueError: A GPU older than 8.0, an unsupported dtype, or rows too wide for registers.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"triton_gpu: sources are float32, bfloat16 or float16, got {dtype};"
            ' convert them, or use implementation="xla"'
        )
    known = [capability for capability in BUDGETS if capability <= compute_capability]
    if not known:
        raise ValueError(
            "triton_gpu: needs an NVIDIA GPU of compute capability 8.0 or newer, got"
            f' {compute_capability / 10}; use implementation="xla"'
        )
    packed = dtype.itemsize == 2 and width % 2 == 0
    registers_per_tile = 4 if packed else 8
    wanted = min(num_sources, MAX_SOURCES)
    columns, chunks, fitting = {}, {}, []
    for budget in BUDGETS[max(known)]:
        # Eight columns of a tile are a thread's: loads of 16 bytes.
        columns = {t: 256 * budget.num_warps // t for t in (1, 2, 4, 8, MAX_TOKENS)}
        chunks = {t: -(-width // c) for t, c in columns.items()}
        held = {t: wanted * registers_per_tile * c for t, c in chunks.items()}
        fitting = [t for t in columns if held[t] <= budget.held]
        if fitting:
            break
    if fitting:
        tokens = min(fitting, key=lambda t: (chunks[t] * columns[t], t))
        sources = wanted
    else:
        tokens = 1
        sources = budget.held // (registers_per_tile * chunks[1])
        if sources == 0:
            raise ValueError(
                "triton_gpu: rows have at most"
                f" {budget.held // registers_per_tile * columns[1]} elements of {dtype},"
                f' got {width}; use implementation="xla"'
            )
    held_here = sources * registers_per_tile * chunks[tokens]
    return Tiling(
        compute_capability=compute_capability,
        num_warps=budget.num_warps,
        tokens=tokens,
        half=columns[tokens] // 2,
        chunks=chunks[tokens],
        packed=packed,
        sources_per_launch=sources,
        hold=held_here + 8 * sources <= budget.with_gradients,
    )
