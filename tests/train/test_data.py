import itertools
import json
import os
import time
import tracemalloc

import grain
import numpy as np
import orbax.checkpoint as ocp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.config import DataConfig
from train.data import (
    DataError,
    check_vocab,
    document_tokens,
    load_documents,
    train_batches,
    validation_batches,
)
from train.sources import index_documents
from train.tokenizer import load_tokenizer, train_tokenizer

BYTES = load_tokenizer("byte")
END = 256


def index(path, source="text", **settings):
    """Loads both splits of files, which must give each some documents."""
    return load_documents(DataConfig(source=source, paths=(str(path),), **settings), BYTES)


def scan(path, source="text", **settings):
    """Indexes files of which the few documents may all fall into one split."""
    return index_documents(DataConfig(source=source, paths=(str(path),), **settings))


def texts(documents):
    """All documents, in the order of the files."""
    return [documents.text(i) for i in range(len(documents.file))]


def jsonl(path, *values):
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


def many(path, count=40):
    """Enough documents that each split has some."""
    return jsonl(path, *(f"document {i} " + "x" * (7 * i % 23) for i in range(count)))


# --- How text is cut and what is kept. ---


@pytest.mark.parametrize(
    ("content", "max_bytes", "pieces"),
    [
        (b"aaa\nbb\ncccccccc", 6, [b"aaa\n", b"bb\n", b"cccccc", b"cc"]),
        (b"aaa\nbb", 6, [b"aaa\nbb"]),
        ("ééééé".encode(), 5, ["éé".encode(), "éé".encode(), "é".encode()]),
        ("\U0001f600\U0001f600".encode(), 4, ["\U0001f600".encode()] * 2),
        (b"\xef\xbb\xbfbom\n", 99, [b"bom\n"]),
        (b"a\r\nb\r\n", 4, [b"a\r\n", b"b\r\n"]),
        (b"nul \x00\n", 99, [b"nul \x00\n"]),
        (b"\n\n\n\n\na", 4, [b"\n\n\n\n", b"\na"]),
    ],
)
def test_text_is_cut_at_line_ends_and_kept_byte_for_byte(tmp_path, content, max_bytes, pieces):
    (tmp_path / "a.txt").write_bytes(content)
    documents = scan(tmp_path / "a.txt", max_document_bytes=max_bytes)
    assert texts(documents) == pieces
    assert documents.counts["train_bytes"] + documents.counts["validation_bytes"] == len(
        content.removeprefix(b"\xef\xbb\xbf")
    )


def test_one_line_of_200_megabytes_takes_little_memory(tmp_path):
    path = tmp_path / "line.txt"
    path.touch()
    os.truncate(path, 200_000_000)  # A hole in the file reads as NUL bytes, which are text.
    tracemalloc.start()
    documents = index(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(documents.file) == -(-200_000_000 // 16_384)
    assert peak < 5_000_000


def test_long_records_are_cut_and_stay_in_one_split(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *(f"{i} one\ntwo\n" for i in range(30)))
    documents = index(path, "jsonl", max_document_bytes=8)
    assert texts(documents)[:2] == [b"0 one\n", b"two\n"]
    sides = np.isin(np.arange(60), documents.validation)
    assert sides.any()
    assert (sides[::2] == sides[1::2]).all()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_parquet_rows_are_read_from_their_row_group(tmp_path, compression):
    rows = [f"row {i} é\n" for i in range(50)]
    table = pa.table({"id": range(50), "body": rows})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=7, compression=compression)
    documents = index(path, "parquet", text_field="body")
    assert texts(documents) == [row.encode() for row in rows]


def test_parquet_keeps_dictionary_columns(tmp_path):
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(scan(tmp_path / "a.parquet", "parquet")) == [b"a", b"b", b"a"]


def test_globs_are_recursive_sorted_and_name_no_file_twice(tmp_path):
    for name in ("b/c/2.txt", "a/1.txt", "b/3.txt", "b/other.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    config = DataConfig(source="text", paths=(f"{tmp_path}/**/*.txt", f"{tmp_path}/b/3.txt"))
    assert texts(index_documents(config)) == [b"a/1.txt", b"b/3.txt", b"b/c/2.txt"]


# --- What is refused or skipped. ---

LINE = b'{"text": "good"}\n'
BAD = {
    "empty text": ("text", b"", ":1: holds no text"),
    "only newlines": ("text", b"\n\r\n\n", ":1: holds no text"),
    "invalid utf-8": ("text", b"one\ntwo\nth\xffree\nfour\n", r":3: is not UTF-8 \(byte 0xff"),
    "character cut off": ("text", b"one\n\xc3", ":2: is not UTF-8"),
    "empty jsonl": ("jsonl", b"", ":1: holds no text"),
    "blank jsonl": ("jsonl", b"\n\n", ":1: holds no text"),
    "truncated": ("jsonl", LINE * 2 + b'{"text": "go', r":3: is not JSON .* cut off"),
    "scalar": ("jsonl", LINE + b"7\n", ":2: is a JSON int, not an object"),
    "missing key": ("jsonl", b'{"txt": "a", "id": 1}\n', r':1: has no "text".*did you mean txt'),
    "not text": ("jsonl", LINE + b'{"text": null}\n', ':2: "text" is NoneType, not text'),
    "surrogate": ("jsonl", LINE + rb'{"text": "\ud800"}' + b"\n", r":2: .*surrogate \\ud800"),
    "bytes in json": ("jsonl", LINE + b'{"text": "\xff"}\n', ":2: is not UTF-8"),
    "nested too deep": ("jsonl", b"[" * 100_000 + b"\n", ":1: is not JSON"),
    "empty record": ("jsonl", LINE + b'{"text": " "}\n', ":2: holds no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_refused_with_path_and_line(tmp_path, case):
    source, content, message = BAD[case]
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        scan(path, source)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_skipped_and_counted(tmp_path, case):
    source, content, _ = BAD[case]
    (tmp_path / "bad").write_bytes(content)
    documents = scan(tmp_path / "bad", source, bad_records="skip")
    counts = documents.counts
    assert counts["skipped_records"] + counts["skipped_empty"] == 1
    assert texts(documents) == [b"good"] * content.count(LINE)


def test_lines_are_counted_over_pieces(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree\n\xff\n")
    with pytest.raises(DataError, match=r"a\.txt:4: is not UTF-8"):
        scan(tmp_path / "a.txt", max_document_bytes=6)


def test_only_the_piece_with_bad_bytes_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\nt\xffo\nthree\n")
    documents = scan(tmp_path / "a.txt", max_document_bytes=6, bad_records="skip")
    assert texts(documents) == [b"one\n", b"three\n"]
    assert documents.counts["skipped_records"] == 1


def test_nul_escapes_crlf_and_blank_lines_of_jsonl_are_fine(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"text": "a\\u0000"}\r\n\r\n{"text": "b"}')
    assert texts(scan(tmp_path / "a", "jsonl")) == [b"a\x00", b"b"]


def test_bad_parquet_rows_are_refused_or_skipped(tmp_path):
    not_utf8 = pa.array([b"fine", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": not_utf8}), tmp_path / "bytes.parquet")
    with pytest.raises(DataError, match="row 2: is not UTF-8"):
        scan(tmp_path / "bytes.parquet", "parquet")
    pq.write_table(pa.table({"text": ["fine", None, ""]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match='row 2: "text" is null'):
        scan(tmp_path / "null.parquet", "parquet")
    documents = scan(tmp_path / "null.parquet", "parquet", bad_records="skip")
    assert texts(documents) == [b"fine"]
    assert (documents.counts["skipped_records"], documents.counts["skipped_empty"]) == (1, 1)


@pytest.mark.parametrize("bad_records", ["fail", "skip"])
def test_what_is_wrong_with_the_settings_is_never_skipped(tmp_path, bad_records):
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("text")
    wrong = [
        ("parquet", "a.parquet", "contents", "no column.*did you mean content.*content, n"),
        ("parquet", "a.parquet", "n", "holds int64, not strings"),
        ("parquet", "a.txt", "text", "not a Parquet file"),
        ("text", "b.txt", "text", r"there is no file .*b\.txt\".*did you mean a\.txt"),
        ("text", "*.md", "text", r"\*\.md\" matches no file"),
        ("text", ".", "text", "is a folder"),
    ]
    for source, name, field, message in wrong:
        with pytest.raises(DataError, match=message) as error:
            scan(f"{tmp_path}/{name}", source, text_field=field, bad_records=bad_records)
        assert str(tmp_path) in str(error.value)


def test_documents_must_hold_any_character(tmp_path):
    with pytest.raises(DataError, match=r"data\.max_document_bytes=3 must be at least 4"):
        scan(tmp_path / "a.txt", max_document_bytes=3)


def test_a_file_that_changes_later_is_noticed(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    documents = scan(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("01234")
    with pytest.raises(DataError, match=r"a\.txt changed while it was in use"):
        documents.text(0)


# --- Splits. ---


def test_the_split_hashes_names_and_nothing_else(tmp_path):
    names = {}
    for folder in ("here", "there/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        documents = index(many(tmp_path / folder / "a.jsonl"), "jsonl", validation_fraction=0.2)
        names[folder] = documents.validation.tolist()
    assert names["here"] == names["there/deeper"]
    # BLAKE2b-64 of "a.jsonl:1" ... "a.jsonl:40", little-endian, below a fifth of 2**64; ascending.
    assert names["here"] == [17, 9, 19, 5, 16, 7, 33, 28, 29]


def test_a_larger_fraction_keeps_what_was_held_out(tmp_path):
    path = many(tmp_path / "a.jsonl", 200)
    small, large = (
        index(path, "jsonl", validation_fraction=share).validation for share in (0.1, 0.4)
    )
    assert set(small) < set(large)
    assert 10 <= len(small) <= 32
    assert 60 <= len(large) <= 100


def test_every_document_is_in_one_split_and_counted(tmp_path):
    documents = index(many(tmp_path / "a.jsonl"), "jsonl")
    both = np.concatenate([documents.train, documents.validation])
    assert sorted(both) == list(range(40))
    lengths = np.array([len(text) for text in texts(documents)])
    for split in ("train", "validation"):
        indices = getattr(documents, split)
        assert documents.counts[f"{split}_documents"] == len(indices)
        assert documents.counts[f"{split}_bytes"] == lengths[indices].sum()
        assert documents.counts[f"{split}_tokens"] == lengths[indices].sum() + len(indices)


def test_an_empty_split_is_refused_with_the_way_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", "one", "two")
    with pytest.raises(DataError, match=r"none of the 2 documents .* raise data\.validation_frac"):
        index(path, "jsonl", validation_fraction=1e-9)
    with pytest.raises(DataError, match=r"train split.* lower data\.validation_fraction"):
        index(path, "jsonl", validation_fraction=1 - 1e-9)


def test_the_standard_library_is_found_quickly_without_its_tests():
    begin = time.perf_counter()
    documents = load_documents(DataConfig(), BYTES)
    assert time.perf_counter() - begin < 2
    names = {os.path.basename(path) for path in documents.files}
    assert {"ast.py", "argparse.py"} <= names
    folders = {part for path in documents.files for part in path.split(os.sep)}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
    assert documents.counts["train_bytes"] > 5_000_000


# --- Training batches. ---


@pytest.fixture
def documents(tmp_path):
    """Files of 7, 0 and 5 documents."""
    jsonl(tmp_path / "a.jsonl", *("a" * n for n in (3, 1, 30, 8, 15, 4, 9)))
    jsonl(tmp_path / "b.jsonl")
    jsonl(tmp_path / "c.jsonl", *("c" * n for n in (5, 31, 2, 14, 7)))
    return index(tmp_path / "*.jsonl", "jsonl", bad_records="skip", validation_fraction=0.15)


def batches(documents, workers=0, prefetch=4, **arguments):
    config = DataConfig(workers=workers, prefetch=prefetch)
    arguments = {"batch_size": 2, "context": 15, "seed": 3, **arguments}
    return train_batches(documents, config, BYTES, **arguments)


def take(iterator, count):
    taken = [batch["tokens"] for batch in itertools.islice(iterator, count)]
    iterator.close()
    return taken


def cut_documents(taken):
    """Undoes the packing: the documents of the stream, the last and perhaps cut one left out."""
    stream = np.concatenate(taken).ravel()
    return [
        bytes(d[d != END].astype(np.uint8)) for d in np.split(stream, np.where(stream == END)[0])
    ][:-1]


def test_every_epoch_holds_every_document_once_in_a_new_order(documents):
    taken = take(batches(documents), 40)
    assert all(batch.shape == (2, 16) and batch.dtype == np.int32 for batch in taken)
    found, count = cut_documents(taken), len(documents.train)
    expected = sorted(documents.text(i) for i in documents.train)
    epochs = [found[i * count : (i + 1) * count] for i in range(4)]
    assert [sorted(epoch) for epoch in epochs] == [expected] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_alone_decides_the_order(documents):
    first, again = take(batches(documents), 6), take(batches(documents, prefetch=1), 6)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, take(batches(documents, seed=4), 6))


def test_resuming_at_any_step_gives_the_same_batches(documents):
    iterator, states = batches(documents), []
    for _ in range(30):
        states.append(iterator.get_state())
        next(iterator)
    texts_of_states = [json.dumps(state) for state in states]
    straight = take(batches(documents), 36)
    assert [json.dumps(state) for state in states] == texts_of_states
    iterator.close()
    for step, state in enumerate(texts_of_states):
        resumed = batches(documents)
        resumed.set_state(json.loads(state))
        np.testing.assert_array_equal(take(resumed, 6), straight[step : step + 6])


def test_a_state_stays_as_it_was_taken(documents):
    iterator = batches(documents)
    next(iterator)
    state = iterator.get_state()
    before = json.dumps(state)
    take(iterator, 9)
    assert json.dumps(state) == before


def test_worker_processes_change_neither_batches_nor_resuming(documents):
    straight = take(batches(documents), 12)
    iterator = batches(documents, workers=2)
    # Restored before the workers start, as after a crash, and again while they read ahead. One
    # pair of workers does for both: each takes seconds to import what it needs.
    beginning = json.dumps(batches(documents, workers=2).get_state())
    iterator.set_state(json.loads(beginning))
    for step in range(5):
        np.testing.assert_array_equal(next(iterator)["tokens"], straight[step])
    state = json.dumps(iterator.get_state())
    for step in range(5, 12):
        np.testing.assert_array_equal(next(iterator)["tokens"], straight[step])
    iterator.set_state(json.loads(state))
    np.testing.assert_array_equal(take(iterator, 7), straight[5:])


def test_orbax_saves_and_restores_the_iterator(documents, tmp_path):
    iterator = batches(documents)
    for _ in range(3):
        next(iterator)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        save = grain.checkpoint.CheckpointSave(iterator)
        manager.save(3, args=ocp.args.Composite(batches=save))
        manager.wait_until_finished()
        expected = take(iterator, 4)
        restored = batches(documents)
        restore = grain.checkpoint.CheckpointRestore(restored)
        manager.restore(3, args=ocp.args.Composite(batches=restore))
    np.testing.assert_array_equal(take(restored, 4), expected)


def test_shards_share_the_documents_out(documents):
    found = []
    for shard in range(3):
        taken = take(batches(documents, shard_index=shard, shard_count=3), 12)
        found.append(set(cut_documents(taken)))
    assert sorted(itertools.chain(*found)) == sorted(documents.text(i) for i in documents.train)


def test_more_shards_than_documents_are_refused(documents):
    with pytest.raises(DataError, match=r"training documents cannot be shared among 99 shards"):
        batches(documents, shard_count=99)


def test_a_context_longer_than_the_data_is_refused(documents):
    tokens = documents.counts["train_tokens"]
    take(batches(documents, context=tokens - 1), 1)
    with pytest.raises(DataError, match=f"context={tokens} .* takes {tokens + 1} .* has {tokens};"):
        batches(documents, context=tokens)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    check_vocab(BYTES, 257)
    with pytest.raises(DataError, match=r"model\.vocab_size=256 is smaller than .* 257"):
        check_vocab(BYTES, 256)


# --- Validation. ---


def held_out(documents, tokenizer=BYTES):
    return np.concatenate([document_tokens(documents, i, tokenizer) for i in documents.validation])


def validate(documents, tokenizer=BYTES, **arguments):
    arguments = {"batch_size": 3, "context": 8, "max_tokens": 10**9, **arguments}
    return validation_batches(documents, tokenizer, **arguments)


@pytest.mark.parametrize("max_tokens", [10**9, 24, 25, 5])
def test_every_held_out_token_is_predicted_once_from_its_predecessor(tmp_path, max_tokens):
    documents = index(many(tmp_path / "a.jsonl"), "jsonl")
    validation = validate(documents, max_tokens=max_tokens)
    stream = np.concatenate([[END], held_out(documents)[:max_tokens]])
    real = np.concatenate([b["weights"] for b in validation.batches]).ravel() == 1
    tokens = np.concatenate([b["tokens"] for b in validation.batches])
    np.testing.assert_array_equal(tokens[:, 1:].ravel()[real], stream[1:])
    np.testing.assert_array_equal(tokens[:, :-1].ravel()[real], stream[:-1])
    assert validation.tokens == real.sum() == len(stream) - 1
    assert validation.bytes == (stream != END).sum()
    assert len(validation.batches) == -(-validation.tokens // 24)
    for batch in validation.batches:
        assert batch["tokens"].shape == (3, 9) and batch["tokens"].dtype == np.int32
        assert batch["weights"].shape == (3, 8) and batch["weights"].dtype == np.float32
        assert set(np.unique(batch["weights"])) <= {0, 1}


def test_bytes_are_those_of_the_text_with_subwords(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer(["document xxxx é"] * 9, 280))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    documents = index(many(tmp_path / "a.jsonl"), "jsonl")
    validation = validate(documents, tokenizer)
    assert validation.bytes == documents.counts["validation_bytes"]
    assert validation.tokens < validation.bytes
