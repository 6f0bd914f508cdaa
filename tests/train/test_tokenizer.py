import json
import pickle

import numpy as np
import pytest

from train.data import DataError
from train.tokenizer import SubwordTokenizer, load_tokenizer, train_tokenizer

TEXT = "def naïve(x):\r\n\treturn x + '\U0001f600'  # \x00 <|end_of_document|>\n"


@pytest.fixture(scope="module")
def content():
    return train_tokenizer(["return x + 1\n" * 20, "def f(x):\n" * 20], 300)


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(content)
    return str(path)


def test_byte_ids_are_the_bytes():
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode("é!".encode())
    assert ids.dtype == np.int32
    assert ids.tolist() == [0xC3, 0xA9, 0x21]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_bytes_that_are_no_text_decode_to_a_mark():
    # A sample may end inside a character, and a padded vocabulary has ids beyond 256.
    assert load_tokenizer("byte").decode([0x68, 0xC3, 256, 300, 0x69]) == "h\ufffdi"


def test_subword_text_comes_back_in_fewer_tokens(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(TEXT.encode())) == TEXT
    assert len(tokenizer.encode(b"return x + 1\n")) < 6


@pytest.mark.parametrize("kind", ["byte", "subword"])
def test_token_bytes_add_up_to_the_text(kind, path):
    tokenizer = load_tokenizer("byte" if kind == "byte" else path)
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.token_bytes[ids].sum() == len(TEXT.encode())
    assert tokenizer.token_bytes[tokenizer.end_of_document] == 0
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert ids.max() < tokenizer.vocab_size


def test_text_cannot_end_its_own_document(path):
    tokenizer = load_tokenizer(path)
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert copy.end_of_document not in copy.encode(b"a<|end_of_document|>b")


def test_settings_of_truncation_and_padding_do_not_change_the_ids(content):
    settings = json.loads(content)
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = SubwordTokenizer(json.dumps(settings).encode(), "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(TEXT.encode())) == TEXT


def test_a_small_text_gives_at_least_all_bytes():
    tokenizer = SubwordTokenizer(train_tokenizer(["aa"], 257), "tokenizer.json")
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode(TEXT.encode())) == TEXT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: "{", "not a tokenizer.json"),
        (lambda s: s.replace("<|end_of_document|>", "<|endofdocument|>"), "did you mean <|endofd"),
        (lambda s: json.dumps(json.loads(s) | {"decoder": None}), "only ByteLevel"),
    ],
)
def test_other_tokenizers_are_refused(content, change, message):
    with pytest.raises(DataError, match=message.replace("|", r"\|")) as error:
        SubwordTokenizer(change(content.decode()).encode(), "some/tokenizer.json")
    assert str(error.value).startswith("some/tokenizer.json: ")


def test_a_mistyped_name_is_met_with_the_nearest():
    with pytest.raises(DataError, match=r'"bytes" is neither "byte".*did you mean byte'):
        load_tokenizer("bytes")
