"""A small Block AttnRes model of Python source code, trained in minutes on a CPU.

    python -m train --config=configs/quickstart.py

It learns from the source code of the standard library of the Python that runs it.
"""

from attnres_jax import ModelConfig
from train.config import Config, DiagnosticsConfig, OptimizerConfig


def get_config() -> Config:
    """Returns the run."""
    return Config(
        workdir="runs/quickstart",
        model=ModelConfig(
            vocab_size=257,
            width=128,
            num_layers=4,
            num_heads=4,
            feed_forward_width=344,
            residual="block",
            block_size=4,
        ),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=5e-3, schedule="wsd", warmup_steps=50, decay_fraction=0.4
        ),
        diagnostics=DiagnosticsConfig(every=50),
        steps=1100,
        batch_size=8,
        context=128,
        evaluate_every=550,
        evaluation_tokens=100_000,
        checkpoint_every=550,
        sample_tokens=400,
    )
