"""A decoder-only language model with standard, full or block residuals."""

from attnres_jax.models.config import ModelConfig as ModelConfig
from attnres_jax.models.presets import scaling_law_model as scaling_law_model
from attnres_jax.models.retrofit import retrofit as retrofit
from attnres_jax.models.transformer import TransformerLM as TransformerLM
