"""Finds documents, checks every one of them, and remembers where each lies.

An index holds offsets, never text, and the check happens while it is built, so that a run stops
before anything is compiled. Every source gives documents of UTF-8 text:

- stdlib: the .py files of the running interpreter's standard library, without its test suites,
  its tables and files made for this machine. Files that are empty or not UTF-8 are skipped and
  counted.
- text: files. jsonl: one JSON object a line. parquet: one row each.
- Text longer than `max_document_bytes` is cut after a line end, or inside a line (between two
  characters) where the line is longer. Memory stays bounded by that size, for JSONL by the longest
  line, and for Parquet by the text of two row groups.

What happens to odd text:

- A byte order mark at the start of a file is dropped. CRLF and NUL bytes are kept: they are text.
- Bad, and so refused or skipped by `bad_records`: text that is empty or only white space (a whole
  file for text, else a record), invalid UTF-8, a line that is not JSON (cut off, perhaps), JSON
  that is not an object, an object without the key, a value that is not text, a lone surrogate, a
  row group that cannot be read. Of a text file only the piece with the bad bytes is skipped.
- Blank lines of a JSONL file are no records and are passed over.
- A missing or unreadable file, a pattern that matches nothing and a missing column are always
  refused.

A document belongs to validation by the BLAKE2 hash of its name, "path:number". The path counts
from the fixed part of the pattern, so that moving a folder moves no document between the splits.
The number is that of the JSONL line or Parquet row, from 1, or of the piece of a text file, from 0;
a record, and a file of the standard library (number 0), stay in one split even when cut.
Validation is kept in the order of the hashes, so that its beginning is a fair sample.
"""

import array
import codecs
import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from train.files import DataError, did_you_mean, find_files, standard_library

if TYPE_CHECKING:  # Worker processes import this module, but need no model library.
    from train.config import DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDocuments:
    """Where every document lies, and which split it belongs to.

    Attributes:
        source: "stdlib", "text", "jsonl" or "parquet".
        text_field: The JSONL key or Parquet column.
        files: Paths.
        file: int64 [documents], index into `files`.
        start: int64 [documents], byte offset in the file; for Parquet the row group.
        size: int64 [documents], bytes in the file; for Parquet the row in its group.
        cut: int64 [documents], where the document starts in the text of its record.
        length: int64 [documents], bytes of text.
        train: int64 [train documents], indices of documents.
        validation: int64 [validation documents], indices of documents.
        counts: Documents and bytes of both splits, and what was skipped.
    """

    source: str
    text_field: str
    files: tuple[str, ...]
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    cut: np.ndarray
    length: np.ndarray
    train: np.ndarray
    validation: np.ndarray
    counts: dict[str, int]

    def text(self, index: int) -> bytes:
        """Reads one document as UTF-8.

        Raises:
            DataError: The file is no longer what it was when it was indexed.
        """
        path = self.files[self.file[index]]
        start, size, cut = int(self.start[index]), int(self.size[index]), int(self.cut[index])
        length = int(self.length[index])
        try:
            if self.source == "parquet":
                record = _row_group(path, start, self.text_field)[size].as_py()
            else:
                with open(path, "rb") as file:
                    file.seek(start)
                    record = file.read(size)
                if self.source == "jsonl":
                    record = _json_text(record, self.text_field)
            text = record[cut : cut + length]
            text.decode("utf-8")
        except (OSError, ValueError, LookupError) as error:
            raise DataError(f"{path} changed while it was in use ({error})") from error
        if len(text) != length:
            raise DataError(f"{path} changed while it was in use (it is shorter now)")
        return text


def index_documents(config: "DataConfig") -> TextDocuments:
    """Finds and checks all documents of a text source and splits them.

    Raises:
        DataError: See the module's docstring.
    """
    if config.max_document_bytes < 4:
        raise DataError(
            f"data.max_document_bytes={config.max_document_bytes} must be at least 4, the bytes of "
            "the longest UTF-8 character"
        )
    named_files = standard_library() if config.source == "stdlib" else find_files(config.paths)
    index = _Index("skip" if config.source == "stdlib" else config.bad_records)
    for number, (name, path) in enumerate(named_files):
        index.begin_file(number, name)
        try:
            match config.source:
                case "jsonl":
                    _index_jsonl(path, config, index)
                case "parquet":
                    _index_parquet(path, config, index)
                case _:
                    _index_text(path, config, index)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    columns = {name: np.asarray(column, np.int64) for name, column in index.columns.items()}
    hashes = np.asarray(index.hashes, np.uint64)
    held_out = hashes < np.uint64(config.validation_fraction * 2**64)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    validation = validation[np.argsort(hashes[validation], kind="stable")]
    return TextDocuments(
        source=config.source,
        text_field=config.text_field,
        files=tuple(path for _, path in named_files),
        **columns,
        train=train,
        validation=validation,
        counts={
            "train_documents": len(train),
            "train_bytes": int(columns["length"][train].sum()),
            "validation_documents": len(validation),
            "validation_bytes": int(columns["length"][validation].sum()),
            **index.skipped,
        },
    )


class _Index:
    """Collects the columns of `TextDocuments` in compact arrays."""

    def __init__(self, bad_records: str):
        self.columns = {
            name: array.array("q") for name in ("file", "start", "size", "cut", "length")
        }
        self.hashes = array.array("Q")
        self.skipped = {"skipped_records": 0, "skipped_empty": 0}
        self._bad_records = bad_records

    def begin_file(self, number: int, name: str) -> None:
        self._file, self._name = number, name

    def add(self, number: int, *, start: int, size: int, cut: int, length: int) -> None:
        row = {"file": self._file, "start": start, "size": size, "cut": cut, "length": length}
        for name, value in row.items():
            self.columns[name].append(value)
        # Names of files need not be UTF-8.
        name = f"{self._name}:{number}".encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(name, digest_size=8).digest()
        self.hashes.append(int.from_bytes(digest, "little"))

    def reject(self, where: str, why: str, counter: str = "skipped_records") -> None:
        if self._bad_records == "fail":
            raise DataError(f"{where}: {why}; --data.bad-records=skip passes over such text")
        self.skipped[counter] += 1

    def reject_empty(self, where: str) -> None:
        self.reject(where, "holds no text", "skipped_empty")


def _pieces(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Cuts a stream after line ends, or between characters of a longer line."""
    buffer = b""
    while buffer := buffer + file.read(max_bytes + 1 - len(buffer)):
        end = len(buffer)
        if end > max_bytes:
            end = buffer.rfind(b"\n", 0, max_bytes) + 1
            end = end or codecs.utf_8_decode(buffer[:max_bytes], "replace", False)[1]
        yield buffer[:end]
        buffer = buffer[end:]


def _index_text(path: str, config: "DataConfig", index: _Index) -> None:
    with open(path, "rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(start)
        line, blank, pieces = 1, True, []
        for number, piece in enumerate(_pieces(file, config.max_document_bytes)):
            blank = blank and piece.isspace()
            try:
                piece.decode("utf-8")
                pieces.append((number, start, len(piece)))
            except UnicodeDecodeError as error:
                bad_line = line + piece.count(b"\n", 0, error.start)
                index.reject(f"{path}:{bad_line}", _not_utf8(error))
            start += len(piece)
            line += piece.count(b"\n")
    if blank:
        index.reject_empty(f"{path}:1")
        return
    for number, start, size in pieces:
        number = 0 if config.source == "stdlib" else number
        index.add(number, start=start, size=size, cut=0, length=size)


def _index_jsonl(path: str, config: "DataConfig", index: _Index) -> None:
    start, records = 0, 0
    with open(path, "rb") as file:
        for line, record in enumerate(file, 1):
            size = len(record)
            if line == 1 and record.startswith(codecs.BOM_UTF8):
                start, size = len(codecs.BOM_UTF8), size - len(codecs.BOM_UTF8)
                record = record[start:]
            if not record.isspace():
                records += 1
                try:
                    text = _json_text(record, config.text_field)
                except ValueError as error:
                    index.reject(f"{path}:{line}", str(error))
                else:
                    _add_record(text, f"{path}:{line}", line, start, size, config, index)
            start += size
    if not records:
        index.reject_empty(f"{path}:1")


def _index_parquet(path: str, config: "DataConfig", index: _Index) -> None:
    try:
        schema, metadata = pq.read_schema(path), pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file ({_first_line(error)})") from error
    if config.text_field not in schema.names:
        raise DataError(
            f'{path}: there is no column "{config.text_field}" '
            f"(data.text_field){did_you_mean(config.text_field, schema.names)}; the columns are "
            f"{', '.join(schema.names)}"
        )
    kind = schema.field(config.text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(kind) for is_text in (pa.types.is_string, pa.types.is_large_string)):
        raise DataError(f'{path}: the column "{config.text_field}" holds {kind}, not strings')
    if not metadata.num_rows:
        index.reject_empty(path)
    first_row = 1
    for group in range(metadata.num_row_groups):
        try:
            rows = _row_group(path, group, config.text_field)
        except (pa.ArrowInvalid, OSError) as error:
            index.reject(f"{path}: row group {group}", f"cannot be read ({_first_line(error)})")
            rows = ()
        for row, value in enumerate(rows):
            where, text = f"{path}: row {first_row + row}", value.as_py()
            try:
                if text is None:
                    raise ValueError(f'"{config.text_field}" is null')
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                index.reject(where, _not_utf8(error))
            except ValueError as error:
                index.reject(where, str(error))
            else:
                _add_record(text, where, first_row + row, group, row, config, index)
        first_row += metadata.row_group(group).num_rows


def _add_record(
    text: bytes, where: str, number: int, start: int, size: int, config: "DataConfig", index: _Index
) -> None:
    if not text or text.isspace():
        index.reject_empty(where)
        return
    cut = 0
    for piece in _pieces(io.BytesIO(text), config.max_document_bytes):
        index.add(number, start=start, size=size, cut=cut, length=len(piece))
        cut += len(piece)


def _json_text(record: bytes, key: str) -> bytes:
    """Gives the text of one JSONL line; the message of a ValueError says what is wrong with it."""
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}); the line may be cut off") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}, not an object with a text")
    if key not in value:
        shown = ", ".join(list(value)[:10])
        raise ValueError(
            f'has no "{key}" (data.text_field){did_you_mean(key, value)}; has: {shown}'
        )
    if not isinstance(value[key], str):
        raise ValueError(f'"{key}" is {type(value[key]).__name__}, not text')
    try:
        return value[key].encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(value[key][error.start]):04x}"
        raise ValueError(f'"{key}" holds half a character, the surrogate {surrogate}') from None


@functools.lru_cache(maxsize=2)
def _row_group(path: str, group: int, column: str) -> pa.ChunkedArray:
    rows = pq.ParquetFile(path).read_row_group(group, columns=[column]).column(column)
    if pa.types.is_dictionary(rows.type):
        rows = rows.cast(rows.type.value_type)
    # As bytes: Arrow does not check that its strings are UTF-8.
    return rows.cast(pa.large_binary())


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
