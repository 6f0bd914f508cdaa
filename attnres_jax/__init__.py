"""Attention Residuals (arXiv:2603.15031) for JAX and Flax.

Axis letters, used as suffixes of array names (`queries_sd` is `[s, d]`) and in einsum strings:
    b batch, t time, d width, n sources, s reads of a block, l sub-layers,
    h heads, k head width, g key-value heads, f feed-forward width, v vocabulary
"""

from attnres_jax.diagnostics import Diagnostics as Diagnostics
from attnres_jax.diagnostics import diagnose as diagnose
from attnres_jax.diagnostics import read_diagnostics as read_diagnostics
from attnres_jax.models import ModelConfig as ModelConfig
from attnres_jax.models import TransformerLM as TransformerLM
from attnres_jax.models import retrofit as retrofit
from attnres_jax.models import scaling_law_model as scaling_law_model
from attnres_jax.modules import AttentionResidual as AttentionResidual
from attnres_jax.modules import AttentionResidualStack as AttentionResidualStack
from attnres_jax.ops import Bank as Bank
from attnres_jax.ops import BlockState as BlockState
from attnres_jax.ops import FinishedSources as FinishedSources
from attnres_jax.ops import depth_attention as depth_attention
from attnres_jax.ops import inter_block as inter_block
from attnres_jax.ops import merge as merge
from attnres_jax.ops import rms_norm as rms_norm
from attnres_jax.ops import single_phase as single_phase

__version__ = "0.1.0"
