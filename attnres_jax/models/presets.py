"""The models of the paper's scaling-law sweep, as dense stand-ins."""

from typing import Any

from attnres_jax.models.config import ModelConfig

# Name: transformer layers and heads, width. Attention Residuals, arXiv:2603.15031, scaling table;
# the name is the number of activated parameters without embeddings.
_SCALING_TABLE = {
    "194m": (12, 896),
    "241m": (13, 960),
    "296m": (14, 1024),
    "436m": (16, 1168),
    "528m": (17, 1264),
}

_HEAD_WIDTH = 64


def scaling_law_model(name: str, **overrides: Any) -> ModelConfig:
    """Returns a dense model with the depth, heads and width of a row of the paper's scaling table.

    The paper's models are mixtures of experts with Kimi Linear attention. These are dense, with
    plain attention of head width 64, and a feed-forward width at which their parameters without
    embeddings are the row's number of activated ones.

    Args:
        name: "194m", "241m", "296m", "436m" or "528m".
        **overrides: Fields of `ModelConfig` to set; `vocab_size` must be among them. The block size
            is 4 unless set, as in the paper's ablation (eight blocks of the 436M model).

    Raises:
        ValueError: There is no such row.
    """
    if name not in _SCALING_TABLE:
        raise ValueError(f"no scaling-law model {name!r}; there are {', '.join(_SCALING_TABLE)}")
    num_layers, width = _SCALING_TABLE[name]
    parameters = float(name.removesuffix("m")) * 1e6
    in_attention = 4 * width * num_layers * _HEAD_WIDTH
    feed_forward_width = (parameters / num_layers - in_attention) / (3 * width)
    fields: dict[str, Any] = {
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_layers,
        "head_width": _HEAD_WIDTH,
        "feed_forward_width": 16 * round(feed_forward_width / 16),
        "block_size": 4,
    }
    return ModelConfig(**fields | overrides)
