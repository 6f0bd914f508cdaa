"""Generates text from the newest checkpoint of a run.

    python -m train.sample --workdir=runs/quickstart --prompt="def main(" --tokens=200

Every new token runs the model over a whole window of `context` tokens. That needs no cache and
compiles once; it costs about `context` times the arithmetic of a cached step, which is fine for
looking at what a run has learned.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from train.checkpoint import CheckpointError, Checkpoints
from train.config import Config, from_json
from train.loop import abstract_setup
from train.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Generates text from the newest checkpoint of a run."""

    workdir: str
    """Folder of the run."""
    prompt: str = ""
    """Text to continue; empty begins a new document."""
    tokens: int = 400
    """Tokens to generate."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token always."""
    top_k: int = 0
    """Only the likeliest so many tokens are drawn; 0 allows all."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")


def main(arguments: Sequence[str]) -> int:
    """Prints generated text as it comes and returns the exit code.

    Args:
        arguments: Those after `python -m train.sample`.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    # Orbax logs housekeeping as warnings.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    options = tyro.cli(SampleOptions, args=arguments, prog="python -m train.sample")
    try:
        config, graphdef, params = load_run(options.workdir)
        tokenizer = load_tokenizer(config.data.tokenizer)
        print(options.prompt, end="", flush=True)
        for text in generate(config, graphdef, params, tokenizer, options):
            print(text, end="", flush=True)
        print()
    except (ValueError, CheckpointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def load_run(workdir: str) -> tuple[Config, Any, Any]:
    """Restores the newest checkpoint of a run.

    Returns:
        The configuration, the model's definition and its parameters.

    Raises:
        ValueError: The folder holds no checkpoint, or one of another version.
        CheckpointError: No checkpoint can be read.
    """
    checkpoints = Checkpoints(workdir, read_only=True)
    description = checkpoints.newest_description()
    if description is None:
        raise ValueError(f"{workdir} holds no checkpoint; --workdir names the folder of a run")
    config = from_json(description["settings"])
    setup = abstract_setup(config)
    state = checkpoints.restore(setup.template, None)
    checkpoints.close()
    assert state is not None
    return config, setup.graphdef, state.params


def generate(
    config: Config, graphdef: Any, params: Any, tokenizer: Tokenizer, options: SampleOptions
) -> Iterator[str]:
    """Draws tokens one by one until enough are drawn or the document ends.

    Args:
        config: Of the run.
        graphdef: From `load_run`.
        params: From `load_run`.
        tokenizer: Of the run.
        options: Prompt, number of tokens, and how to draw.

    Yields:
        Pieces of text, never half a character.
    """
    next_token = make_next_token(
        graphdef, tokenizer.vocab_size, temperature=options.temperature, top_k=options.top_k
    )
    prompt = tokenizer.encode(options.prompt.encode())
    # Training text begins every document after the end of another.
    ids = [tokenizer.end_of_document, *prompt.tolist()]
    key = jax.random.key(options.seed)
    num_given, printed = len(ids), ""
    for number in range(options.tokens):
        recent = ids[-config.context :]
        window_t = np.zeros(config.context, np.int32)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
