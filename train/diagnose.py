"""Measures what the newest checkpoint of a run reads over depth, token by token of one text.

python -m train.diagnose --workdir=runs/quickstart --text="def main(" --output=main.json
"""

import dataclasses
import logging
import pathlib
import sys
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from attnres_jax import Diagnostics, diagnose
from train.arguments import read_arguments
from train.checkpoint import CheckpointError, Checkpoints
from train.config import Config
from train.data import load_documents, validation_batches
from train.setup import load_run
from train.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """Measures depth weights, norms, gradients and shares of a run on one text."""

    workdir: str
    """Folder of the run."""
    output: pathlib.Path
    """File to write: .json, or .csv with a row for each value."""
    text: str = ""
    """Text to read, at most the run's context; empty takes the first held-out text."""

    def __post_init__(self) -> None:
        if self.output.suffix not in (".json", ".csv"):
            raise ValueError(f"output: {self.output} must end in .json or .csv")


def main(arguments: Sequence[str]) -> int:
    """Writes the file and returns the exit code.

    Args:
        arguments: Those after `python -m train.diagnose`.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    # Orbax logs housekeeping as warnings.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        options = read_arguments(DiagnoseOptions, arguments, prog="python -m train.diagnose")
        diagnostics = diagnose_text(options.workdir, options.text)
    except (ValueError, CheckpointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    as_json = options.output.suffix == ".json"
    content = diagnostics.to_json() + "\n" if as_json else diagnostics.to_csv()
    options.output.write_text(content, encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


def diagnose_text(workdir: str, text: str) -> Diagnostics:
    """Measures the newest checkpoint of a run on one text, with per-token arrays.

    Args:
        workdir: Folder of the run.
        text: At most the run's context; empty takes the first held-out text.

    Raises:
        ValueError: The folder holds no checkpoint, or the text is too long.
        CheckpointError: No checkpoint can be read.
    """
    config, graphdef, params = load_run(workdir)
    tokenizer = load_tokenizer(config.data.tokenizer)
    ids = _ids(text, config, tokenizer)

    @jax.jit
    def measure(params, tokens_bt):
        return diagnose(nnx.merge(graphdef, params), tokens_bt, per_token=True)

    measured = jax.device_get(measure(params, ids[None]))
    step = Checkpoints(workdir, read_only=True).steps()[0]
    pieces = tuple(_piece(tokenizer, int(id_)) for id_ in ids[:-1])
    return dataclasses.replace(measured, step=step, tokens=pieces)


def _ids(text: str, config: Config, tokenizer: Tokenizer) -> np.ndarray:
    """What the model reads, from an end of document, and the last token that it predicts."""
    if not text:
        documents = load_documents(config.data, tokenizer)
        validation = validation_batches(
            documents, tokenizer, batch_size=1, context=config.context, max_tokens=config.context
        )
        weights_t = validation.batches[0]["weights"][0]
        return validation.batches[0]["tokens"][0][: 1 + int(weights_t.sum())]
    ids = tokenizer.encode(text.encode())
    if len(ids) > config.context:
        raise ValueError(
            f"text: {len(ids)} tokens are more than the run's context of {config.context}; shorten"
        )
    return np.concatenate([[tokenizer.end_of_document], ids]).astype(np.int32)


def _piece(tokenizer: Tokenizer, id_: int) -> str:
    return "⏹" if id_ == tokenizer.end_of_document else tokenizer.decode([id_])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
