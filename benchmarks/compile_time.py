"""How compile time grows with layers when the number of blocks stays.

    python -m benchmarks.compile_time [--json]

Compiles the training gradient of 16 and of 48 layers, both in 8 blocks. Sub-layers inside a block
are scanned, so that only the number of blocks should matter. Rounds are interleaved, and the ratio
is one of medians.
"""

import dataclasses
import statistics
import time

import jax
import tyro

from attnres_jax import ModelConfig
from benchmarks.rows import print_rows
from benchmarks.step_overhead import gradient_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compiled, and how often."""

    num_blocks: int = 8
    """Blocks in both models."""
    width: int = 256
    """Width of the residual stream (D)."""
    rounds: int = 3
    """Compilations of each model."""
    json: bool = False
    """Print one JSON line a row instead of a table."""


def main(settings: Settings) -> None:
    """Measures and prints one row for each depth."""
    tokens_bt = jax.ShapeDtypeStruct((2, 129), "int32")
    depths = (16, 48)
    seconds = {depth: [] for depth in depths}
    for _ in range(settings.rounds):
        for depth in depths:
            config = ModelConfig(
                vocab_size=256,
                width=settings.width,
                num_layers=depth,
                num_heads=settings.width // 64,
                feed_forward_width=2 * settings.width,
                block_size=2 * depth // settings.num_blocks,
            )
            step, params = gradient_step(config)
            start = time.perf_counter()
            step.lower(params, tokens_bt).compile()
            seconds[depth].append(time.perf_counter() - start)
    median = {depth: statistics.median(times) for depth, times in seconds.items()}
    rows = [
        {
            "layers": depth,
            "blocks": settings.num_blocks,
            "compile_seconds": median[depth],
            f"ratio_to_{depths[0]}_layers": median[depth] / median[depths[0]],
        }
        for depth in depths
    ]
    print_rows("Compile time of a training gradient on this machine", rows, as_json=settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
