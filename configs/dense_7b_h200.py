"""A dense 7B Block AttnRes model on 64 NVIDIA H200s, eight in a node.

python -m train --config=configs/dense_7b_h200.py
"""

from attnres_jax.parallel import MeshConfig, PipelineConfig
from configs.dense_7b import dense_7b_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return dense_7b_config(
        "dense_7b_h200",
        mesh=MeshConfig(stage=8, data=1, fsdp=8),
        pipeline=PipelineConfig(virtual_stages=2, microbatches=32),
    )
