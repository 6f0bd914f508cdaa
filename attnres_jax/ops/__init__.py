"""Pure functions on arrays: depth attention, direct and in two phases. No Flax."""

from attnres_jax.ops.block import BlockState as BlockState
from attnres_jax.ops.depth_attention import OUTPUT_NAME as OUTPUT_NAME
from attnres_jax.ops.depth_attention import STATISTICS_NAME as STATISTICS_NAME
from attnres_jax.ops.depth_attention import depth_attention as depth_attention
from attnres_jax.ops.implementation import Implementation as Implementation
from attnres_jax.ops.rms_norm import inverse_rms as inverse_rms
from attnres_jax.ops.rms_norm import rms_norm as rms_norm
from attnres_jax.ops.single_phase import single_phase as single_phase
from attnres_jax.ops.sources import Bank as Bank
from attnres_jax.ops.sources import FinishedSources as FinishedSources
from attnres_jax.ops.sources import Sources as Sources
from attnres_jax.ops.two_phase import PARTIAL_SUM_NAME as PARTIAL_SUM_NAME
from attnres_jax.ops.two_phase import inter_block as inter_block
from attnres_jax.ops.two_phase import merge as merge
