"""Flax (nnx) modules. They hold only `nnx.Param`s, and calling one changes nothing."""

from attnres_jax.modules.attention import Attention as Attention
from attnres_jax.modules.attention_residual import AttentionResidual as AttentionResidual
from attnres_jax.modules.attention_residual import AttentionResidualStack as AttentionResidualStack
from attnres_jax.modules.attention_residual import ReadVectors as ReadVectors
from attnres_jax.modules.feed_forward import FeedForward as FeedForward
from attnres_jax.modules.rms_norm import RMSNorm as RMSNorm
