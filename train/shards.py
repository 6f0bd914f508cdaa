"""Reads the folders of tokenised documents that `train.prepare` writes.

A folder holds `train-*.array_record` and `validation-*.array_record`, one document a record as
little-endian ids without the end of document; `tokenizer.json`, except for bytes; and
`metadata.json`:

    format_version  SHARD_FORMAT
    tokenizer       the tokenizer's fingerprint: "byte", or the SHA-256 of tokenizer.json
    vocab_size      of the tokenizer
    dtype           of the ids, "<u2" or "<u4"
    max_id          largest id stored or used to end a document
    splits          by split: documents, tokens (each end of document is one), bytes of text, and
                    shards, the number of documents by file name
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

import grain
import numpy as np

from train.files import DataError
from train.tokenizer import Tokenizer

SHARD_FORMAT = 1
"""Version of the folders that `train.prepare` writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDocuments:
    """Tokenised documents in ArrayRecord shards, split when `train.prepare` wrote them.

    Attributes:
        records: One document a record, without its end of document.
        dtype: Of the stored ids, "<u2" or "<u4".
        train: int64 [train documents], indices of documents.
        validation: int64 [validation documents], indices of documents.
        counts: Documents, tokens (each end of document is one) and bytes of both splits.
    """

    records: grain.sources.ArrayRecordDataSource
    dtype: str
    train: np.ndarray
    validation: np.ndarray
    counts: dict[str, int]


def load_shards(paths: Iterable[str], tokenizer: Tokenizer) -> TokenDocuments:
    """Opens folders written by `train.prepare`, together one data set.

    Raises:
        DataError: A path is not such a folder, a shard is damaged or missing, or the ids are those
            of another tokenizer.
    """
    shards: dict[str, list[str]] = {"train": [], "validation": []}
    counts: dict[str, int] = {}
    dtypes = set()
    for path in paths:
        folder = pathlib.Path(path).expanduser()
        metadata = _read_metadata(folder, tokenizer)
        dtypes.add(metadata["dtype"])
        for split, files in shards.items():
            for name, records in metadata["splits"][split]["shards"].items():
                files.append(_checked_shard(folder / name, records))
            for unit in ("documents", "tokens", "bytes"):
                key = f"{split}_{unit}"
                counts[key] = counts.get(key, 0) + metadata["splits"][split][unit]
    first_validation = counts["train_documents"]
    return TokenDocuments(
        records=grain.sources.ArrayRecordDataSource(shards["train"] + shards["validation"]),
        dtype=dtypes.pop(),
        train=np.arange(first_validation),
        validation=np.arange(first_validation, first_validation + counts["validation_documents"]),
        counts=counts,
    )


def _read_metadata(folder: pathlib.Path, tokenizer: Tokenizer) -> dict:
    path = folder / "metadata.json"
    if not path.is_file():
        raise DataError(
            f'data.paths: "{folder}" is not a folder written by `python -m train.prepare` '
            "(it has no metadata.json)"
        )
    try:
        metadata = json.loads(path.read_bytes())
        version, fingerprint = metadata["format_version"], metadata["tokenizer"]
        max_id = metadata["max_id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from error
    if version != SHARD_FORMAT:
        raise DataError(
            f"{path}: format version {version} is not {SHARD_FORMAT}, the one read here; "
            "prepare the data again"
        )
    if fingerprint != tokenizer.fingerprint:
        wanted = "byte" if fingerprint == "byte" else folder / "tokenizer.json"
        raise DataError(
            f"{folder} was written with another tokenizer than data.tokenizer; "
            f"set --data.tokenizer={wanted}"
        )
    if max_id >= tokenizer.vocab_size:
        raise DataError(
            f"{path}: the shards hold id {max_id}, outside the tokenizer's {tokenizer.vocab_size} "
            "ids; prepare the data again"
        )
    return metadata


def _checked_shard(path: pathlib.Path, records: int) -> str:
    try:
        with grain.sources.ArrayRecordDataSource(str(path)) as source:
            found = len(source)
    except Exception as error:  # The reader raises bare RuntimeError and others.
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a readable ArrayRecord file ({reason})") from error
    if found != records:
        raise DataError(f"{path}: holds {found} documents, and metadata.json says {records}")
    return str(path)
