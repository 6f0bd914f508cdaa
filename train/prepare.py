"""Tokenises text once and writes it as ArrayRecord shards for training.

    python -m train.prepare --output prepared --data.source=text --data.paths 'texts/**/*.txt' \
        --train-tokenizer --vocab-size=8192

Training on the shards then needs no text and no tokenising: `--data.source=array_record
--data.paths prepared`. The folder appears only when it is complete.
"""

import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys

import rich.console
import rich.progress
from array_record.python import array_record_module

from train.arguments import read_arguments
from train.config import DataConfig
from train.data import load_documents
from train.files import DataError
from train.shards import SHARD_FORMAT
from train.sources import TextDocuments
from train.tokenizer import SubwordTokenizer, Tokenizer, load_tokenizer, train_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Tokenise text once and write it as ArrayRecord shards for training."""

    output: str
    """Folder to write; it must not exist yet, or be empty."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The text, how it is cut into documents, and how these are split."""
    train_tokenizer: bool = False
    """Train a byte-level BPE tokenizer on the training split instead of using data.tokenizer."""
    vocab_size: int = 8192
    """Largest vocabulary of a tokenizer that is trained here."""
    shard_tokens: int = 100_000_000
    """Begin a new shard after this many tokens."""


def prepare(config: PrepareConfig, console: rich.console.Console) -> dict:
    """Writes the folder `config.output` and returns its metadata.

    Raises:
        DataError: The text, the tokenizer or the output folder cannot be used.
    """
    output = pathlib.Path(config.output).expanduser().absolute()
    _check(config, output)
    tokenizer = load_tokenizer("byte" if config.train_tokenizer else config.data.tokenizer)
    documents = load_documents(config.data, tokenizer)
    assert isinstance(documents, TextDocuments)

    # Written beside its final place, so that the last step is one rename.
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        with rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.MofNCompleteColumn(),
            console=console,
            disable=not console.is_terminal,
        ) as progress:
            if config.train_tokenizer:
                train = progress.track(documents.train, description="Reading for the tokenizer")
                texts = (documents.text(index).decode("utf-8") for index in train)
                content = train_tokenizer(texts, config.vocab_size)
                tokenizer = SubwordTokenizer(content, "tokenizer.json")
            if isinstance(tokenizer, SubwordTokenizer):
                (partial / "tokenizer.json").write_bytes(tokenizer.content)
            metadata = _write_shards(documents, tokenizer, config.shard_tokens, partial, progress)
        (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        os.replace(partial, output)
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return metadata


def _check(config: PrepareConfig, output: pathlib.Path) -> None:
    if config.data.source == "array_record":
        raise DataError("data.source=array_record is prepared already; name a source of text")
    if config.train_tokenizer and config.data.tokenizer != "byte":
        raise DataError(
            f"--train-tokenizer makes a tokenizer, and --data.tokenizer={config.data.tokenizer} "
            "names one; leave one of them out"
        )
    if config.train_tokenizer and config.vocab_size < 257:
        raise DataError(
            f"vocab_size={config.vocab_size} must be at least 257: 256 bytes and the end of a "
            "document"
        )
    if config.shard_tokens < 1:
        raise DataError(f"shard_tokens={config.shard_tokens} must be at least 1")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise DataError(f"{output} is there already and is not an empty folder; choose another")


def _write_shards(
    documents: TextDocuments,
    tokenizer: Tokenizer,
    shard_tokens: int,
    folder: pathlib.Path,
    progress: rich.progress.Progress,
) -> dict:
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    max_id, splits = tokenizer.end_of_document, {}
    for split in ("train", "validation"):
        name, writer = _open_shard(folder, split, 0)
        shards, tokens, shard_end = {name: 0}, 0, shard_tokens
        for index in progress.track(getattr(documents, split), description=f"Writing {split}"):
            if tokens >= shard_end:
                writer.close()
                name, writer = _open_shard(folder, split, len(shards))
                shards[name], shard_end = 0, tokens + shard_tokens
            ids = tokenizer.encode(documents.text(index))
            writer.write(ids.astype(dtype).tobytes())
            shards[name] += 1
            max_id = max(max_id, int(ids.max(initial=0)))
            tokens += len(ids) + 1
        writer.close()
        splits[split] = {
            "documents": documents.counts[f"{split}_documents"],
            "tokens": tokens,
            "bytes": documents.counts[f"{split}_bytes"],
            "shards": shards,
        }
    return {
        "format_version": SHARD_FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype,
        "max_id": max_id,
        "splits": splits,
    }


def _open_shard(
    folder: pathlib.Path, split: str, number: int
) -> tuple[str, array_record_module.ArrayRecordWriter]:
    name = f"{split}-{number:05d}.array_record"
    # One record a group: training reads records in random order.
    return name, array_record_module.ArrayRecordWriter(str(folder / name), "group_size:1")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 2 for bad input, 130 after Ctrl-C."""
    console = rich.console.Console(stderr=True)
    # Without this a terminated run would leave its unfinished folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        config = read_arguments(PrepareConfig, arguments, prog="python -m train.prepare")
        metadata = prepare(config, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    for split, counts in metadata["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['bytes']:,} bytes"
        )
    command = ["python", "-m", "train", "--config=configs/quickstart.py"]
    command += ["--data.source=array_record", "--data.paths", config.output]
    if metadata["tokenizer"] != "byte":
        command.append(f"--data.tokenizer={os.path.join(config.output, 'tokenizer.json')}")
        command.append(f"--model.vocab-size={metadata['vocab_size']}")
    print("Train on it with:", shlex.join(command), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
