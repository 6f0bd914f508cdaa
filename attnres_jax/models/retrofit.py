"""Turning a trained standard-residual model into one with Attention Residuals."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from attnres_jax.models.config import ModelConfig
from attnres_jax.models.transformer import TransformerLM


def retrofit(
    config: ModelConfig, params: Any, **changes: Any
) -> tuple[ModelConfig, nnx.State, list[str]]:
    """Loads the parameters of a standard-residual model into one with Attention Residuals.

    The new pseudo-queries are zero and the new gains one, so that each read is the mean of its n
    sources: 1 / n of the old model's residual stream. The norm that follows removes that factor
    exactly if it adds eps / n**2, since RMSNorm(x / n; eps / n**2) = RMSNorm(x; eps). The new
    config records this as `retrofit=True`; its loss at step 0 is the old model's to rounding.

    Args:
        config: The standard-residual model's config.
        params: Its parameters: `nnx.split(model, nnx.Param)[1]`, as it is or from a checkpoint.
        **changes: Fields of the new config, such as `block_size=8`; `residual` is "block" unless
            set.

    Returns:
        The new config, the new parameters, and the paths of the leaves that were not in `params`.

    Raises:
        ValueError: The old model is not a standard one, or a leaf is missing, unknown or of another
            shape; the message names it.
    """
    if config.residual != "standard":
        raise ValueError(f'retrofit starts from residual="standard", got {config.residual!r}')
    fields: dict[str, Any] = {"residual": "block"} | changes
    new_config = dataclasses.replace(config, **fields, retrofit=True)
    abstract = nnx.eval_shape(lambda: TransformerLM(new_config, rngs=nnx.Rngs(0)))
    wanted = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    given = dict(nnx.to_flat_state(params))
    leaves, added = [], []
    for path, leaf in wanted:
        name = ".".join(map(str, path))
        if path in given:
            value = given.pop(path)[...]
            if value.shape != leaf.shape:
                raise ValueError(
                    f"{name}: the model has shape {list(leaf.shape)}, the parameters given have"
                    f" {list(value.shape)}"
                )
        elif path[0] in ("reads", "final_read"):
            fill = jnp.zeros if path[-1] == "query" else jnp.ones
            value = fill(leaf.shape, leaf.dtype)
            added.append(name)
        else:
            raise ValueError(f"{name}: missing from the parameters given; only reads may be new")
        leaves.append((path, nnx.Param(value)))
    if given:
        unknown = ", ".join(".".join(map(str, path)) for path in given)
        raise ValueError(f"the model has no parameters called {unknown}")
    return new_config, nnx.from_flat_state(leaves), added
