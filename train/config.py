"""Everything a training run can be told, as frozen dataclasses that the command line overrides."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

from attnres_jax import ModelConfig
from attnres_jax.parallel import MeshConfig, PipelineConfig


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
    """Processes that read and tokenise documents; 0 does it in this one."""
    prefetch: int = 4
    """Batches kept ready ahead of the step."""
    shards: int = 1
    """Streams of documents that a batch is made of, in equal parts; must divide the batch size. A
    process reads and tokenises only those that it trains on: with several processes, set as many as
    replicas (mesh.data times mesh.fsdp). Part of what makes a run the same run."""

    def __post_init__(self) -> None:
        _check_types(self, "data.")
        _require(self.source == "stdlib" or self.paths, "data.paths", self.paths, "needs a file")
        _require(
            self.source != "stdlib" or not self.paths,
            "data.paths",
            self.paths,
            "is not used by data.source='stdlib'; name the source of these files",
        )
        _require(
            0 < self.validation_fraction < 1,
            "data.validation_fraction",
            self.validation_fraction,
            "must be between 0 and 1, both excluded",
        )
        _require_at_least(self, "data.", 1, "max_document_bytes", "prefetch", "shards")
        _require_at_least(self, "data.", 0, "workers")


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
    """Parts of a batch, one after another, whose gradients are averaged into one update; must
    divide the batch size. Each part has pipeline.microbatches of its own."""

    def __post_init__(self) -> None:
        _check_types(self, "optimizer.")
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            _require(value > 0, f"optimizer.{name}", value, "must be above 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", value, "must be at least 0 and below 1")
        for name in ("decay_fraction", "final_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"optimizer.{name}", value, "must be from 0 to 1")
        _require_at_least(self, "optimizer.", 0, "warmup_steps", "weight_decay", "clip_norm")
        _require_at_least(self, "optimizer.", 1, "accumulate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnosticsConfig:
    """Depth weights, norms, shares and gradients by depth, written to diagnostics.jsonl."""

    every: int = 0
    """Steps between two measurements; the first and the last state are measured too. 0: never."""
    sequences: int = 4
    """Held-out sequences to measure, the same each time; at most a batch, and rounded up to a
    multiple of the devices."""

    def __post_init__(self) -> None:
        _check_types(self, "diagnostics.")
        _require_at_least(self, "diagnostics.", 0, "every")
        _require_at_least(self, "diagnostics.", 1, "sequences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    diagnostics: DiagnosticsConfig = dataclasses.field(default_factory=DiagnosticsConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices along each axis; a resumed run may have another."""
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    """How a batch goes through the stages; without effect where mesh.stage is 1."""
    workdir: str
    """Folder for the resolved config, metrics and checkpoints; a run found there is resumed."""
    retrofit_from: str = ""
    """Folder of a finished run with the standard residual, whose weights start this one; set
    model.retrofit too."""
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
    sample_tokens: int = 0
    """Tokens that the trained model writes at the end, to show what it learned."""
    non_finite: Literal["halt", "skip"] = "halt"
    """At a loss or gradient that is not finite: stop, or skip the update and go on."""
    max_skipped_steps: int = 10
    """Stop after this many skipped steps in a row."""

    def __post_init__(self) -> None:
        _check_types(self, "")
        _check_types(self.model, "model.")
        _require(self.workdir != "", "workdir", self.workdir, "must name a folder")
        _require_at_least(
            self,
            "",
            1,
            *("steps", "batch_size", "context", "log_every", "evaluate_every", "evaluation_tokens"),
            *("checkpoint_every", "keep_checkpoints", "max_skipped_steps"),
        )
        _require_at_least(self, "", 0, "seed")
        _require(
            self.batch_size % self.optimizer.accumulate == 0,
            "optimizer.accumulate",
            self.optimizer.accumulate,
            f"must divide batch_size ({self.batch_size})",
        )
        _require(
            self.batch_size % self.data.shards == 0,
            "data.shards",
            self.data.shards,
            f"must divide batch_size ({self.batch_size})",
        )
        warmup, decay = self.optimizer.warmup_steps, 0
        if self.optimizer.schedule == "wsd":
            decay = round(self.optimizer.decay_fraction * self.steps)
        _require(
            warmup + decay <= self.steps,
            "optimizer.warmup_steps",
            warmup,
            f"and {decay} steps of decay do not fit into steps ({self.steps})"
            if decay
            else f"must be at most steps ({self.steps})",
        )


def to_json(config: Config) -> dict[str, Any]:
    """The configuration as values that JSON has."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict[str, Any]) -> Config:
    """The configuration that `to_json` was given.

    Raises:
        ValueError: The values were written by a version with other settings.
    """
    try:
        data = values["data"] | {"paths": tuple(values["data"]["paths"])}
        return Config(
            **values
            | {
                "model": ModelConfig(**values["model"]),
                "data": DataConfig(**data),
                "optimizer": OptimizerConfig(**values["optimizer"]),
                "diagnostics": DiagnosticsConfig(**values["diagnostics"]),
                "mesh": MeshConfig(**values["mesh"]),
                "pipeline": PipelineConfig(**values["pipeline"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the stored configuration is not of this version: {error}") from error


def _require(condition: object, name: str, value: object, rule: str) -> None:
    """Raises a ValueError naming the setting, its value and the rule that it breaks."""
    if not condition:
        raise ValueError(f"{name}: {value!r} {rule}")


def _require_at_least(instance: object, prefix: str, least: int, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        _require(value >= least, prefix + name, value, f"must be at least {least}")


def _check_types(instance: Any, prefix: str) -> None:
    """Refuses a field of another type: a config file is python, which would not notice."""
    for name, annotation in typing.get_type_hints(type(instance)).items():
        value = getattr(instance, name)
        if not _has_type(value, annotation):
            wanted = getattr(annotation, "__name__", None) or str(annotation)
            if typing.get_origin(annotation) is not None:
                wanted = str(annotation).replace("typing.", "")
            raise ValueError(f"{prefix}{name}: {value!r} must be of type {wanted}")


def _has_type(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return any(value is choice or value == choice for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, choice) for choice in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)
