"""What the five runs of the paper's scaling table share; not a run itself.

Attention Residuals, arXiv:2603.15031: context 8192, a cosine schedule, and for each model a peak
learning rate, sequences in a batch and tokens. The paper's models are mixtures of experts with Kimi
Linear attention on unpublished data. These are dense stand-ins of the same depth, heads, width and
number of (activated) parameters on the reader's text, so their losses do not compare.
"""

from attnres_jax import scaling_law_model
from train.config import Config, DataConfig, OptimizerConfig

CONTEXT = 8192


def scaling_config(name: str, *, learning_rate: float, batch_size: int, tokens: float) -> Config:
    """Returns the run of one row; `name` is its number of parameters, such as "436m"."""
    steps = round(tokens / (batch_size * CONTEXT))
    return Config(
        workdir=f"runs/scaling_{name}",
        model=scaling_law_model(
            name, vocab_size=32_768, compute_dtype="bfloat16", remat="block", tie_embeddings=False
        ),
        data=DataConfig(
            source="array_record",
            paths=("data/prepared",),
            tokenizer="data/prepared/tokenizer.json",
        ),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=learning_rate, schedule="cosine", warmup_steps=steps // 100
        ),
        steps=steps,
        batch_size=batch_size,
        context=CONTEXT,
        log_every=10,
        evaluate_every=1000,
        evaluation_tokens=10_000_000,
        checkpoint_every=1000,
    )
