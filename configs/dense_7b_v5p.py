"""A dense 7B Block AttnRes model on a TPU v5p slice of 4x4x4 chips.

python -m train --config=configs/dense_7b_v5p.py
"""

from attnres_jax.parallel import MeshConfig, PipelineConfig
from configs.dense_7b import dense_7b_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return dense_7b_config(
        "dense_7b_v5p",
        mesh=MeshConfig(stage=4, data=1, fsdp=16),
        pipeline=PipelineConfig(virtual_stages=2, microbatches=16),
    )
