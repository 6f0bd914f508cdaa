"""What Block Attention Residuals cost a training step, next to the standard residual.

    python -m benchmarks.step_overhead [--json]

Both models have the same weights and take the same step (loss and gradients, float32) on this
machine. Rounds are interleaved in one process and the ratio is one of medians, so that a busy
machine slows both alike. Temporary memory is what the compiler plans, without running anything.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import track

from attnres_jax import ModelConfig, TransformerLM
from benchmarks.rows import print_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Shape of the measured step."""

    width: int = 512
    """Width of the residual stream (D)."""
    num_layers: int = 8
    """Transformer layers, two sub-layers each."""
    block_size: int = 4
    """Sub-layers in a block (S)."""
    batch_size: int = 4
    context: int = 512
    """Tokens in a sequence; the step has batch_size times as many."""
    rounds: int = 9
    """Timed steps of each model."""
    json: bool = False
    """Print one JSON line a row instead of a table."""


def gradient_step(config: ModelConfig):
    """Returns a jitted `params, tokens -> loss and gradients`, and the parameters it takes."""
    graphdef, params = nnx.split(TransformerLM(config, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, tokens_bt):
        logits_btv = nnx.merge(graphdef, params)(tokens_bt[:, :-1])
        targets_bt1 = tokens_bt[:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_btv), targets_bt1, axis=-1))

    return jax.jit(jax.value_and_grad(loss)), params


def main(settings: Settings) -> None:
    """Measures and prints one row for each rematerialisation setting."""
    tokens_bt = jax.random.randint(
        jax.random.key(0), (settings.batch_size, settings.context + 1), 0, 256
    )
    rows = []
    for remat in ("none", "block"):
        compiled, arguments = {}, {}
        for residual in ("standard", "block"):
            config = ModelConfig(
                vocab_size=256,
                width=settings.width,
                num_layers=settings.num_layers,
                num_heads=settings.width // 64,
                feed_forward_width=16 * round(settings.width / 6),
                residual=residual,
                block_size=settings.block_size,
                remat=remat,
            )
            step, params = gradient_step(config)
            compiled[residual] = step.lower(params, tokens_bt).compile()
            arguments[residual] = (params, tokens_bt)
            jax.block_until_ready(compiled[residual](*arguments[residual]))
        seconds = {residual: [] for residual in compiled}
        rounds = range(settings.rounds)
        for _ in track(rounds, f"remat={remat}", console=Console(stderr=True), transient=True):
            for residual, step in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(step(*arguments[residual]))
                seconds[residual].append(time.perf_counter() - start)
        median = {residual: statistics.median(times) for residual, times in seconds.items()}
        temporary = {
            residual: step.memory_analysis().temp_size_in_bytes
            for residual, step in compiled.items()
        }
        rows.append(
            {
                "remat": remat,
                "standard_seconds": median["standard"],
                "block_seconds": median["block"],
                "step_time_ratio": median["block"] / median["standard"],
                "standard_temporary_mib": temporary["standard"] / 2**20,
                "block_temporary_mib": temporary["block"] / 2**20,
                "temporary_memory_ratio": temporary["block"] / temporary["standard"],
            }
        )
    title = (
        f"Block against standard on {jax.devices()[0].device_kind}: D={settings.width},"
        f" L={2 * settings.num_layers}, S={settings.block_size},"
        f" {settings.batch_size * settings.context} tokens, float32"
    )
    print_rows(title, rows, as_json=settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
