"""What the runs of a dense 7B model share; not a run itself.

32 layers of width 4096 with grouped-query attention and SwiGLU of width 14336: 7.25 billion
parameters. Its 64 sub-layers are 8 blocks of 8, as many blocks as the paper recommends. A batch is
256 sequences of 4096 tokens, and 100,000 steps are 105 billion tokens.
"""

from attnres_jax import ModelConfig
from attnres_jax.parallel import MeshConfig, PipelineConfig
from train.config import Config, DataConfig, OptimizerConfig

STEPS = 100_000
BATCH_SIZE = 256


def dense_7b_config(name: str, *, mesh: MeshConfig, pipeline: PipelineConfig) -> Config:
    """Returns the run on one kind of cluster."""
    return Config(
        workdir=f"runs/{name}",
        model=ModelConfig(
            vocab_size=32_768,
            width=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            feed_forward_width=14_336,
            residual="block",
            block_size=8,
            rope_theta=500_000.0,
            tie_embeddings=False,
            compute_dtype="bfloat16",
            remat="block",
        ),
        data=DataConfig(
            source="array_record",
            paths=("data/prepared",),
            tokenizer="data/prepared/tokenizer.json",
            shards=16,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, schedule="wsd", warmup_steps=2000, weight_decay=0.1
        ),
        mesh=mesh,
        pipeline=pipeline,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        context=4096,
        evaluate_every=1000,
        evaluation_tokens=10_000_000,
        checkpoint_every=500,
    )
