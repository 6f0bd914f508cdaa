"""Generates text from the newest checkpoint of a run.

python -m train.sample --workdir=runs/quickstart --prompt="def main(" --tokens=200
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence

from train.arguments import read_arguments
from train.checkpoint import CheckpointError
from train.generate import generate
from train.setup import load_run
from train.tokenizer import load_tokenizer


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
    try:
        options = read_arguments(SampleOptions, arguments, prog="python -m train.sample")
        config, graphdef, params = load_run(options.workdir)
        tokenizer = load_tokenizer(config.data.tokenizer)
        print(options.prompt, end="", flush=True)
        pieces = generate(
            graphdef,
            params,
            tokenizer,
            context=config.context,
            prompt=options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
        for text in pieces:
            print(text, end="", flush=True)
        print()
    except (ValueError, CheckpointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
