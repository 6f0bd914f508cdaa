"""Drawing text from a model.

Every new token runs the model over a whole window of `context` tokens. That needs no cache and
compiles once; it costs about `context` times the arithmetic of a cached step, which is fine for
looking at what a run has learned.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.tokenizer import Tokenizer


def generate(
    graphdef: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    context: int,
    prompt: str = "",
    tokens: int = 400,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[str]:
    """Draws tokens one by one until enough are drawn or the document ends.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        params: The parameters.
        tokenizer: Of the run.
        context: Tokens that the model was trained to look at.
        prompt: Text to continue; empty begins a new document.
        tokens: How many to draw.
        temperature: Divides the logits; 0 takes the likeliest token always.
        top_k: Only the likeliest so many tokens are drawn; 0 allows all.
        seed: Of the draws.

    Yields:
        Pieces of text, never half a character.
    """
    next_token = make_next_token(
        graphdef, tokenizer.vocab_size, temperature=temperature, top_k=top_k
    )
    prompt_ids = tokenizer.encode(prompt.encode())
    # Training text begins every document after the end of another.
    ids = [tokenizer.end_of_document, *prompt_ids.tolist()]
    key = jax.random.key(seed)
    num_given, printed = len(ids), ""
    for number in range(tokens):
        recent = ids[-context:]
        window_t = np.zeros(context, np.int32)
        window_t[: len(recent)] = recent
        token = next_token(params, window_t, len(recent), jax.random.fold_in(key, number))
        ids.append(int(token))
        if ids[-1] == tokenizer.end_of_document:
            break
        text = tokenizer.decode(ids[num_given:])
        # The first bytes of a character decode to U+FFFD until the others are there.
        if not text.endswith("\ufffd"):
            yield text[len(printed) :]
            printed = text


def make_next_token(
    graphdef: Any, vocab_size: int, *, temperature: float, top_k: int
) -> Callable[..., jax.Array]:
    """Builds the compiled draw of one token after a window that is padded at its end.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        vocab_size: The tokenizer's; further rows of the model are never drawn.
        temperature: Divides the logits; 0 takes the likeliest.
        top_k: How many of the likeliest may be drawn; 0 for all.

    Returns:
        `next_token(params, window_t, length, key)`, an int32 scalar.
    """

    @jax.jit
    def next_token(params: Any, window_t: jax.Array, length: int, key: jax.Array) -> jax.Array:
        logits_btv = nnx.merge(graphdef, params)(window_t[None])
        # Attention is causal, so what stands after the last token has no influence.
        logits_v = logits_btv[0, length - 1, :vocab_size]
        if temperature == 0:
            return jnp.argmax(logits_v)
        if 0 < top_k < vocab_size:
            least = jax.lax.top_k(logits_v, top_k)[0][-1]
            logits_v = jnp.where(logits_v < least, -jnp.inf, logits_v)
        return jax.random.categorical(key, logits_v / temperature)

    return next_token
