"""Everything a training run can be told, as frozen dataclasses that the command line overrides."""

import dataclasses
from typing import Literal

from attnres_jax import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "array_record"] = "stdlib"
    """stdlib: the source code of the running Python's standard library, on every machine.
    array_record: shards written by `python -m train.prepare`."""
    paths: tuple[str, ...] = ()
    """Files and globs; not used by stdlib."""
    text_field: str = "text"
    """The JSONL key or Parquet column that holds the text."""
    tokenizer: str = "byte"
    """"byte", or the path of a tokenizer.json written by the `tokenizers` library."""
    validation_fraction: float = 0.1
    """Share of the documents held out, chosen by a stable hash of each document's name."""
    max_document_bytes: int = 16_384
    """Longer plain text is cut at line ends into documents of at most this many bytes."""
    bad_records: Literal["skip", "fail"] = "fail"
    """What to do with text that cannot be read: skip and count it, or stop naming file and line."""
    workers: int = 0
    """Processes that prepare batches; 0 prepares them in this one."""
    prefetch: int = 4
    """Batches that each worker keeps ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule. Pseudo-queries, gains and embeddings are never given to Muon nor decayed."""

    name: Literal["adamw", "muon"] = "adamw"
    """Rule for the weight matrices; everything else is on AdamW always."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up: constant, one cosine, or stable then linear decay (WSD)."""
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    """Last share of the steps over which WSD decays."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay of weight matrices."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    accumulate: int = 1
    """Microbatches whose gradients are averaged into one update; must divide the batch size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    workdir: str
    """Folder for the resolved config, metrics and checkpoints; a run found there is resumed."""
    steps: int
    """Optimizer updates in the whole run."""
    batch_size: int
    """Sequences in one update, over all devices."""
    context: int
    """Tokens in a sequence (T)."""
    seed: int = 0
    """Seeds the initial parameters and the order of documents."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    evaluate_every: int = 200
    """Steps between two evaluations; the last step is always evaluated."""
    evaluation_tokens: int = 100_000
    """Held-out tokens in an evaluation, or all of them if there are fewer."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    non_finite: Literal["halt", "skip"] = "halt"
    """At a loss or gradient that is not finite: stop, or leave parameters and moments as they are."""
    max_skipped_steps: int = 10
    """Stop after this many skipped steps in a row."""
