import io
import json
import os
import signal

import numpy as np
import pytest
import rich.console

from train import prepare as prepare_module
from train.config import DataConfig
from train.data import DataError, document_tokens, load_documents, train_batches
from train.prepare import PrepareConfig, main, prepare
from train.tokenizer import load_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}  # é\n" * (1 + i % 3) for i in range(30)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


@pytest.fixture(autouse=True)
def keep_signals():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(text, output, **settings):
    data = DataConfig(source="jsonl", paths=(text,), tokenizer=settings.pop("tokenizer", "byte"))
    config = PrepareConfig(output=str(output), data=data, **settings)
    return data, prepare(config, rich.console.Console(file=io.StringIO()))


def load(folder, tokenizer="byte"):
    config = DataConfig(source="array_record", paths=(str(folder),), tokenizer=str(tokenizer))
    return load_documents(config, load_tokenizer(str(tokenizer)))


@pytest.mark.parametrize("train_tokenizer", [False, True])
def test_shards_hold_what_the_text_gives(text, tmp_path, train_tokenizer):
    data, metadata = run(
        text,
        tmp_path / "out",
        train_tokenizer=train_tokenizer,
        vocab_size=280,
        shard_tokens=200,
    )
    name = str(tmp_path / "out" / "tokenizer.json") if train_tokenizer else "byte"
    tokenizer = load_tokenizer(name)
    before, after = load_documents(data, tokenizer), load(tmp_path / "out", name)
    ids = []
    for split in ("train", "validation"):
        assert len(getattr(before, split)) == len(getattr(after, split)) > 0
        for i, j in zip(getattr(before, split), getattr(after, split), strict=True):
            ids.append(document_tokens(before, i, tokenizer))
            np.testing.assert_array_equal(document_tokens(after, j, tokenizer), ids[-1])
        written = ids[-len(getattr(after, split)) :]
        assert after.counts[f"{split}_tokens"] == sum(map(len, written))
        assert after.counts[f"{split}_documents"] == len(written)
        assert after.counts[f"{split}_bytes"] == before.counts[f"{split}_bytes"]
    assert metadata["max_id"] == max(map(np.max, ids))
    assert metadata["vocab_size"] == (280 if train_tokenizer else 257)
    shards = metadata["splits"]["train"]["shards"]
    assert len(shards) > 2
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        ["metadata.json", "validation-00000.array_record", *shards]
        + ["tokenizer.json"] * train_tokenizer
    )


def test_shards_train_as_the_text_does(text, tmp_path):
    data, _ = run(text, tmp_path / "out")
    tokenizer = load_tokenizer("byte")
    first = []
    for documents in (load_documents(data, tokenizer), load(tmp_path / "out")):
        batches = train_batches(documents, data, tokenizer, batch_size=2, context=31, seed=0)
        first.append([next(batches)["tokens"] for _ in range(20)])
        batches.close()
    np.testing.assert_array_equal(*first)


def test_the_tokenizer_sees_the_training_split_only(text, tmp_path, monkeypatch):
    seen = []
    train = prepare_module.train_tokenizer

    def watched(texts, vocab_size):
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(prepare_module, "train_tokenizer", watched)
    data, _ = run(text, tmp_path / "out", train_tokenizer=True, vocab_size=260)
    documents = load_documents(data, load_tokenizer("byte"))
    assert seen == [documents.text(i).decode() for i in documents.train]


def test_large_vocabularies_are_stored_in_four_bytes(text, tmp_path, monkeypatch):
    tokenizer = load_tokenizer("byte")
    monkeypatch.setattr(type(tokenizer), "vocab_size", 2**16 + 1)
    _, metadata = run(text, tmp_path / "out")
    assert metadata["dtype"] == "<u4"
    documents = load(tmp_path / "out")
    found = sorted(
        tokenizer.decode(document_tokens(documents, i, tokenizer)) for i in range(len(TEXTS))
    )
    assert found == sorted(TEXTS)


# --- Damaged or foreign folders. ---


def change_metadata(folder, **changes):
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "metadata.json").unlink(), "not a folder written by .*train.prepare"),
        (lambda f: (f / "metadata.json").write_text("{"), r"metadata\.json: cannot be read"),
        (lambda f: (f / "metadata.json").write_text("{}"), r"metadata\.json: cannot be read"),
        (lambda f: change_metadata(f, format_version=2), "format version 2 is not 1"),
        (lambda f: change_metadata(f, tokenizer="ab12"), r"--data\.tokenizer=.*tokenizer\.json"),
        (lambda f: change_metadata(f, max_id=257), "hold id 257, outside the tokenizer's 257"),
        (lambda f: (f / "train-00000.array_record").unlink(), "train-00000.* not a readable"),
        (lambda f: shorten(f / "train-00000.array_record"), "train-00000.* not a readable"),
        (
            lambda f: (f / "train-00000.array_record").write_bytes(
                (f / "validation-00000.array_record").read_bytes()
            ),
            "holds .* documents, and metadata.json says",
        ),
    ],
)
def test_a_damaged_folder_is_refused(text, tmp_path, damage, message):
    run(text, tmp_path / "out")
    load(tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_byte_tokenizer_on_subword_shards_is_refused(text, tmp_path):
    run(text, tmp_path / "out", train_tokenizer=True, vocab_size=260)
    with pytest.raises(DataError, match=r"another tokenizer .* --data\.tokenizer=.*/out/tokenizer"):
        load(tmp_path / "out")


# --- The command line. ---


def test_the_command_prints_how_to_train(text, tmp_path, capsys):
    arguments = ["--data.source=jsonl", "--data.paths", text, "--train-tokenizer"]
    output = str(tmp_path / "my out")
    assert main([f"--output={output}", "--vocab-size=270", *arguments]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert f"--data.source=array_record --data.paths '{output}'" in command
    assert command.endswith(f"'--data.tokenizer={output}/tokenizer.json' --model.vocab-size=270")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.paths=nowhere.txt", "--data.source=text"], 'there is no file "nowhere.txt"'),
        (["--train-tokenizer", "--vocab-size=256"], "vocab_size=256 must be at least 257"),
        (["--train-tokenizer", "--data.tokenizer=t.json"], "leave one of them out"),
        (["--data.source=array_record", "--data.paths=x"], "prepared already"),
        (["--shard-tokens=0"], "shard_tokens=0 must be at least 1"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(tmp_path, capsys, arguments, message):
    assert main([f"--output={tmp_path}/new/out", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and not printed.out
    assert os.listdir(tmp_path) == []


def test_a_folder_with_content_is_left_alone(text, tmp_path):
    (tmp_path / "out").mkdir()
    run(text, tmp_path / "out")
    before = (tmp_path / "out" / "metadata.json").read_bytes()
    with pytest.raises(DataError, match="is there already"):
        run(text, tmp_path / "out", train_tokenizer=True, vocab_size=260)
    assert (tmp_path / "out" / "metadata.json").read_bytes() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(text, tmp_path, monkeypatch, number, code):
    monkeypatch.chdir(tmp_path)

    def interrupt(texts, vocab_size):
        assert [name for name in os.listdir(tmp_path) if "partial" in name]
        signal.raise_signal(number)

    monkeypatch.setattr(prepare_module, "train_tokenizer", interrupt)
    # Shells let their background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = main(["--output=out", "--train-tokenizer"])
    except SystemExit as exit:
        found = exit.code
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == code
    assert os.listdir(tmp_path) == ["text.jsonl"]
