"""A 0.8M-parameter character model of Shakespeare, nanoGPT's published CPU setting.

    python -m train --config=configs/shakespeare_char.py --data.paths=input.txt

`input.txt` is the tiny Shakespeare text (1.1 MB), which does not come with this project. Add
`--model.residual=standard` or `--model.residual=full` to compare, with another `--workdir`.
"""

from attnres_jax import ModelConfig
from train.config import Config, DataConfig, OptimizerConfig


def get_config() -> Config:
    """Returns the run."""
    return Config(
        workdir="runs/shakespeare_char",
        model=ModelConfig(
            vocab_size=257,
            width=128,
            num_layers=4,
            num_heads=4,
            feed_forward_width=344,
            residual="block",
            block_size=4,
        ),
        data=DataConfig(source="text", paths=("input.txt",), validation_fraction=0.15),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, schedule="cosine", weight_decay=0.1, beta2=0.99
        ),
        steps=2000,
        batch_size=12,
        context=64,
        evaluate_every=500,
        evaluation_tokens=200_000,
        checkpoint_every=500,
    )
