"""Run folders with invented numbers, as `python -m train` would leave them."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from attnres_jax import Diagnostics, ModelConfig
from train.config import Config, DataConfig, to_json
from train.report.diagnostics import Diagnostics as Parsed
from train.report.diagnostics import Read
from train.report.text import Text


def write_run(
    folder: pathlib.Path,
    *,
    residual: str = "block",
    num_layers: int = 3,
    block_size: int = 4,
    diagnostics: bool = True,
    steps: int = 20,
    **changes: Any,
) -> pathlib.Path:
    """Writes config.json, metrics.jsonl and, if wanted, diagnostics.jsonl."""
    folder.mkdir(parents=True)
    model = ModelConfig(
        vocab_size=257,
        width=16,
        num_layers=num_layers,
        num_heads=2,
        feed_forward_width=24,
        residual=residual,  # pyrefly: ignore
        block_size=block_size,
    )
    config = Config(
        model=model, workdir=str(folder), steps=100, batch_size=4, context=32, **changes
    )
    description = {
        "settings": to_json(config),
        "data": {"train_tokens": 1000},
        "commit": "0123456789ab",
    }
    (folder / "config.json").write_text(json.dumps(description), encoding="utf-8")
    lines: list[dict[str, Any]] = [{"step": 0, "parameters": 1234}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 5.0 / step**0.3, "gradient_norm": 1.0 / step})
    lines.append({"step": steps, "validation/loss": 2.5, "validation/bits_per_byte": 3.6})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if diagnostics:
        measured = invented(
            residual,
            block_size if residual == "block" else None,
            2 * num_layers,
            seed=len(residual),
        )
        (folder / "diagnostics.jsonl").write_text(measured.to_json() + "\n", encoding="utf-8")
    return folder


def invented(
    residual: str, block_size: int | None, num_sublayers: int, *, time: int = 0, seed: int = 0
) -> Diagnostics:
    """Diagnostics of random numbers with the shapes and gaps of real ones."""
    rng = np.random.default_rng(seed)
    empty = Diagnostics({}, residual, block_size, num_sublayers)  # pyrefly: ignore
    counts = [len(read.sources) for read in empty.reads]
    num_reads, most = num_sublayers + 1, max(counts)
    has_source = np.arange(most) < np.array(counts)[:, None]
    has_output = np.arange(num_reads) <= np.arange(num_reads)[:, None]

    def weights(*leading: int) -> tuple[np.ndarray, np.ndarray]:
        logits = rng.normal(size=(*leading, num_reads, most)).astype(np.float32)
        terms = np.where(has_source, np.exp(logits), 0)
        alpha = terms / terms.sum(-1, keepdims=True)
        return np.where(has_source, logits, np.nan), np.where(has_source, alpha, np.nan)

    shares = np.where(has_output, rng.random((num_reads, num_reads)), 0)
    shares /= shares.sum(-1, keepdims=True)
    arrays = {
        "sublayer_norm": rng.random(num_sublayers) + 0.1,
        "read_norm": rng.random(num_reads) + 0.1,
        "dilution": np.where(has_output, shares, np.nan),
        "gradient_norm_sublayer": rng.random(num_sublayers) + 0.1,
        "gradient_norm_read": rng.random(num_reads) + 0.1,
        "logit_lens_loss": rng.random(num_reads) + 2,
    }
    if residual != "standard":
        arrays["depth_weights"] = weights()[1]
        arrays["entropy"] = rng.random(num_reads)
    if time:
        logits, alpha = weights(time)
        arrays |= {"depth_weights_per_token": alpha, "logits_per_token": logits}
        lse, gate = np.full((2, time, num_reads), np.nan)
        for read, count in enumerate(counts):
            is_open = empty.reads[read].sources[-1].startswith("partial")
            finished = count - is_open
            lse[:, read] = np.log(np.exp(logits[:, read, :finished]).sum(-1))
            if is_open:
                gate[:, read] = alpha[:, read, finished]
        arrays |= {"lse_per_token": lse, "gate_per_token": gate}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    return dataclasses.replace(empty, arrays=arrays, step=20)


def invented_text(measured: Diagnostics) -> Text:
    """A text whose tokens are letters, new lines and an end of document."""
    time = len(measured.arrays["depth_weights_per_token"])
    letters = ["⏹", *("def f(x):\n  return </script> x" * time)][:time]
    parsed = Parsed(
        measured.step,
        measured.residual,
        measured.block_size,
        measured.num_sublayers,
        tuple(Read(*read) for read in measured.reads),
        {name: np.asarray(array, np.float64) for name, array in measured.arrays.items()},
        {},
    )
    return Text("An invented text", letters, parsed)


def other_data() -> DataConfig:
    """Settings of other text."""
    return DataConfig(source="text", paths=("other.txt",))
