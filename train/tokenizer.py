"""Text to token ids and back: bytes, or a byte-level tokenizer of the `tokenizers` library."""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.files import DataError, did_you_mean

END_OF_DOCUMENT = "<|end_of_document|>"
"""The token that a tokenizer.json must have."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; 256 ends a document.

    Attributes:
        vocab_size: 257.
        end_of_document: The id that follows every document.
        token_bytes: int32 [vocab_size], the bytes of text that each id stands for.
        fingerprint: Equal for two tokenizers that give equal ids.
    """

    vocab_size = 257
    end_of_document = 256
    fingerprint = "byte"

    def __init__(self):
        self.token_bytes = np.ones(self.vocab_size, np.int32)
        self.token_bytes[self.end_of_document] = 0

    def encode(self, text: bytes) -> np.ndarray:
        """Gives the int32 ids of UTF-8 text, without the end of the document."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Gives the text of ids; bytes that are not UTF-8 become U+FFFD, other ids nothing."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class SubwordTokenizer:
    """A byte-level tokenizer.json, with the same attributes and methods as `ByteTokenizer`.

    Only byte-level tokenizers (GPT-2, Llama 3, Qwen and those that `train.prepare` trains) are
    taken: with them every token stands for a known number of bytes, so that bits per byte are
    exact. Special tokens that are spelled out in the text are encoded as ordinary text, so that no
    document can end itself. `content` is the file itself.
    """

    def __init__(self, content: bytes, name: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # The library raises bare Exception.
            raise DataError(f"{name}: not a tokenizer.json of `tokenizers` ({error})") from error
        # The library keeps these three out of the JSON text and out of pickles.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        decoder = json.loads(content).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise DataError(
                f"{name}: the decoder is {decoder.get('type')}, and only ByteLevel tokenizers know "
                "how many bytes each token stands for; train one with "
                "`python -m train.prepare --train-tokenizer`"
            )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if END_OF_DOCUMENT not in vocabulary:
            hint = did_you_mean(END_OF_DOCUMENT, vocabulary)
            raise DataError(f"{name}: there is no {END_OF_DOCUMENT} token; add it{hint}")
        self.content, self._name = content, name
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = vocabulary[END_OF_DOCUMENT]
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, id_ in vocabulary.items():
            self.token_bytes[id_] = len(token)  # A character of the byte-level alphabet a byte.
        for id_, added in self._tokenizer.get_added_tokens_decoder().items():
            self.token_bytes[id_] = 0 if added.special else len(added.content.encode())
        self.token_bytes[self.end_of_document] = 0

    def __reduce__(self):
        # A worker process must get the settings that a pickled `tokenizers.Tokenizer` loses.
        return SubwordTokenizer, (self.content, self._name)

    def encode(self, text: bytes) -> np.ndarray:
        """Gives the int32 ids of UTF-8 text, without the end of the document."""
        encoding = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Gives the text of ids; bytes that are not UTF-8 become U+FFFD, special ids nothing."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=True)


type Tokenizer = ByteTokenizer | SubwordTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Loads "byte", or the tokenizer.json at the path `name`.

    Raises:
        DataError: There is no such file, or it is not a byte-level tokenizer with a
            `<|end_of_document|>` token.
    """
    if name == "byte":
        return ByteTokenizer()
    try:
        content = pathlib.Path(name).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            f'data.tokenizer="{name}" is neither "byte" nor a file that can be read '
            f"({error.strerror}){did_you_mean(name, ['byte'])}"
        ) from error
    return SubwordTokenizer(content, name)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-level BPE tokenizer.

    Args:
        texts: Documents.
        vocab_size: Tokens at most; the end of a document and the 256 bytes are always among them.

    Returns:
        The content of tokenizer.json.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()
