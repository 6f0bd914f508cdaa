"""From documents to batches: split, shuffle, pack, and batch with grain.

Training joins the shuffled documents, each followed by the tokenizer's end of document, into one
endless stream and cuts it into windows of context + 1 tokens: there is no padding, and every epoch
has its own order. The position in that stream (epoch, document, offset in a document that a window
cuts) is the iterator's state, so that a resumed run sees what an uninterrupted one would have
seen. The batches depend neither on the number of workers nor on prefetching.

Validation is one fixed stream, cut into windows that overlap by one token.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

import absl.flags
import grain
import numpy as np

from train.files import DataError as DataError
from train.shards import TokenDocuments, load_shards
from train.sources import TextDocuments, index_documents
from train.tokenizer import Tokenizer

if TYPE_CHECKING:  # Worker processes import this module, but need no model library.
    from train.config import DataConfig

_DOCUMENTS_PER_WORKER = 32


type Documents = TextDocuments | TokenDocuments


def load_documents(config: "DataConfig", tokenizer: Tokenizer) -> Documents:
    """Finds, checks and splits all documents.

    `counts` of the result holds `train_documents`, `train_bytes`, the same for `validation`, and,
    for text sources, `skipped_records` and `skipped_empty`. `train_tokens` and
    `validation_tokens` are there where they are known before everything is tokenised: for the byte
    tokenizer and for prepared shards.

    Raises:
        DataError: A file or record cannot be used, or a split is empty.
    """
    if config.source == "array_record":
        documents = load_shards(config.paths, tokenizer)
    else:
        documents = index_documents(config)
        if tokenizer.fingerprint == "byte":
            for split in ("train", "validation"):
                tokens = documents.counts[f"{split}_bytes"] + documents.counts[f"{split}_documents"]
                documents.counts[f"{split}_tokens"] = tokens
    total = len(documents.train) + len(documents.validation)
    for split, other in (("validation", "raise"), ("train", "lower")):
        if not len(getattr(documents, split)):
            raise DataError(
                f"none of the {total} documents fell into the {split} split; give more text, "
                f"{other} data.validation_fraction (now {config.validation_fraction}), or make "
                f"shorter documents with data.max_document_bytes (now {config.max_document_bytes})"
            )
    return documents


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises a DataError if a model with `vocab_size` ids cannot read every id of the tokenizer."""
    if vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size};"
            f" set --model.vocab-size={tokenizer.vocab_size} or more"
        )


def document_tokens(documents: Documents, index: int, tokenizer: Tokenizer) -> np.ndarray:
    """Reads one document as int32 ids, the end of the document last."""
    if isinstance(documents, TokenDocuments):
        ids = np.frombuffer(documents.records[index], documents.dtype)
    else:
        ids = tokenizer.encode(documents.text(index))
    tokens = np.empty(len(ids) + 1, np.int32)
    tokens[:-1], tokens[-1] = ids, tokenizer.end_of_document
    return tokens


def train_batches(
    documents: Documents,
    config: "DataConfig",
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    context: int,
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
) -> grain.DatasetIterator:
    """Gives endless batches {"tokens": int32 [batch_size, context + 1]}.

    The model reads `tokens[:, :-1]` and predicts `tokens[:, 1:]`. The state (`get_state`,
    `set_state`; values that JSON has) belongs to the same documents, tokenizer and arguments, and
    to the same `config.workers`. Call `close` on the iterator when done: it stops threads and
    processes.

    Args:
        documents: From `load_documents`.
        config: For `workers`, which read and tokenise, and `prefetch`, the batches kept ready.
        tokenizer: That of `load_documents`.
        batch_size: Sequences in a batch of this shard.
        context: Tokens that are predicted in a sequence.
        seed: Of the order of documents, below 2**32.
        shard_index: Which share of the documents to read.
        shard_count: Into how many shares the documents are divided; no document is in two.

    Raises:
        DataError: There are fewer documents than shards, or fewer than context + 1 tokens.
    """
    if len(documents.train) < shard_count:
        raise DataError(
            f"{len(documents.train)} training documents cannot be shared among {shard_count} "
            "shards; make shorter documents with data.max_document_bytes, or lower data.shards"
        )
    available = 0
    for index in documents.train.tolist():
        available += len(document_tokens(documents, index, tokenizer))
        if available > context:
            break
    else:
        raise DataError(
            f"context={context} is longer than the data: a sequence takes {context + 1} tokens "
            f"and the training split has {available}; lower context or give more text"
        )
    if not absl.flags.FLAGS.is_parsed():
        # Grain reads its own flags when it starts workers, and this program has no absl main.
        absl.flags.FLAGS.mark_as_parsed()
    source = _Split(documents, documents.train[shard_index::shard_count], tokenizer)
    dataset = (
        grain.MapDataset.source(source)
        .seed(seed)
        .shuffle()
        .repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .mp_prefetch(
            grain.MultiprocessingOptions(config.workers, _DOCUMENTS_PER_WORKER), _begin_worker
        )
    )
    # Packed after the workers, so that their number does not change the batches.
    dataset = _Pack(dataset, length_struct={"tokens": context + 1})
    dataset = dataset.map(_only_tokens).batch(batch_size, drop_remainder=True)
    return iter(
        grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.prefetch)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The held-out tokens of one evaluation.

    Attributes:
        batches: {"tokens": int32 [batch_size, context + 1], "weights": float32 [batch_size,
            context]}. The weight is 1 for a token to be predicted and 0 for padding.
        tokens: Predicted tokens in all batches.
        bytes: UTF-8 bytes that those tokens stand for, the end of a document for none. Bits per
            byte are the summed loss in nats / ln 2 / bytes.
    """

    batches: list[dict[str, np.ndarray]]
    tokens: int
    bytes: int


def validation_batches(
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    context: int,
    max_tokens: int,
) -> Validation:
    """Gives the first `max_tokens` held-out tokens, each predicted exactly once.

    The stream begins with an end of document, so that the first token is predicted too. Windows
    overlap by one token. All of it is held in memory, at 8 bytes a token.

    Args:
        documents: From `load_documents`.
        tokenizer: That of `load_documents`.
        batch_size: Sequences in a batch.
        context: Tokens that are predicted in a sequence.
        max_tokens: Predicted tokens at most.

    Raises:
        DataError: `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise DataError(f"evaluation_tokens={max_tokens} must be at least 1")
    parts, count = [np.array([tokenizer.end_of_document], np.int32)], 0
    for index in documents.validation.tolist():
        parts.append(document_tokens(documents, index, tokenizer))
        count += len(parts[-1])
        if count >= max_tokens:
            break
    count = min(count, max_tokens)
    predicted = np.concatenate(parts)[1 : count + 1]

    batch_count = -(-count // (batch_size * context))
    rows = batch_count * batch_size
    stream = np.full(rows * context + 1, tokenizer.end_of_document, np.int32)
    stream[1 : count + 1] = predicted
    windows = np.lib.stride_tricks.sliding_window_view(stream, context + 1)[::context]
    windows = windows.reshape(batch_count, batch_size, context + 1)
    weights = (np.arange(rows * context) < count).astype(np.float32)
    weights = weights.reshape(batch_count, batch_size, context)
    return Validation(
        batches=[{"tokens": windows[i].copy(), "weights": weights[i]} for i in range(batch_count)],
        tokens=count,
        bytes=int(tokenizer.token_bytes[predicted].sum()),
    )


class _Split:
    """Random access to the tokens of some documents, for grain."""

    def __init__(self, documents: Documents, indices: np.ndarray, tokenizer: Tokenizer):
        self._documents, self._indices, self._tokenizer = documents, indices, tokenizer

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        document = int(self._indices[index])
        return {"tokens": document_tokens(self._documents, document, self._tokenizer)}

    def __repr__(self) -> str:
        return f"_Split({len(self)} documents)"


class _Pack(grain.experimental.ConcatThenSplitIterDataset):
    """Grain's packing, with a state that survives JSON."""

    def __iter__(self) -> grain.DatasetIterator:
        return _PackIterator(super().__iter__())


class _PackIterator(grain.DatasetIterator):
    """Gives restored states back the tuples that JSON turned into lists.

    Grain compares the slice of the document that a window has cut with a tuple that means "no
    document". A list is never equal to it, and a document would be dropped.
    """

    def __init__(self, packing: grain.DatasetIterator):
        super().__init__(packing)
        self._packing = packing

    def __next__(self):
        return next(self._packing)

    def get_state(self):
        return self._packing.get_state()

    def set_state(self, state):
        slices = {name: tuple(bounds) for name, bounds in state["remainder_slices"].items()}
        self._packing.set_state({**state, "remainder_slices": slices})


def _only_tokens(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": packed["tokens"]}


def _begin_worker(index: int, count: int) -> None:
    """Leaves Ctrl-C to the main process, and ends the worker when that process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
