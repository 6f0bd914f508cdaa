"""What the page knows, as values that JSON has. Nothing is rounded or filled in here."""

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import attnres_jax
from train.report.comparison import differences
from train.report.diagnostics import Diagnostics
from train.report.paper import load_paper
from train.report.run import Run
from train.report.text import Text, pack_rows, pack_values
from train.revision import checkout

_CURVES = ("loss", "gradient_norm", "validation/loss", "validation/bits_per_byte")


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page draws."""
    return {
        "made": {
            "commit": checkout(),
            "library": attnres_jax.__version__,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        },
        "runs": [_run(run) for run in runs],
        "differences": [
            {"field": one.field, "values": {k: _text(v) for k, v in one.values.items()}}
            for one in differences(runs)
        ],
        "paper": load_paper(),
    }


def _run(run: Run) -> dict[str, Any]:
    model = run.settings["model"]
    residual = model["residual"]
    return {
        "name": run.name,
        "path": str(run.path),
        "residual": residual,
        "blockSize": {"full": 1, "standard": None}.get(residual, model["block_size"]),
        "numSublayers": 2 * model["num_layers"],
        "width": model["width"],
        "numHeads": model["num_heads"],
        "vocabSize": model["vocab_size"],
        "dtype": model.get("compute_dtype", "float32"),
        "optimizer": run.settings["optimizer"]["name"],
        "data": _data(run),
        "seed": run.settings["seed"],
        "context": run.settings["context"],
        "batchSize": run.settings["batch_size"],
        "step": run.step,
        "steps": run.settings["steps"],
        "tokens": run.tokens,
        "parameters": run.parameters,
        "curves": {name: _curve(run, name) for name in _CURVES},
        "diagnostics": _diagnostics(run.diagnostics),
        "text": _captured(run.text),
        "commit": run.commit,
        "settings": run.settings,
        "problems": run.problems,
    }


def _data(run: Run) -> str:
    data = run.settings["data"]
    return " ".join([data["source"], *data["paths"]])


def _curve(run: Run, name: str) -> dict[str, list[Any]]:
    lines = [line for line in run.metrics if name in line]
    return {"step": [line["step"] for line in lines], "value": [line[name] for line in lines]}


def _diagnostics(diagnostics: Diagnostics | None) -> dict[str, Any] | None:
    if diagnostics is None:
        return None
    return {
        "step": diagnostics.step,
        "reads": _reads(diagnostics),
        "arrays": {
            name: _nested(array)
            for name, array in diagnostics.arrays.items()
            if not name.endswith("_per_token")
        },
    }


def _reads(diagnostics: Diagnostics) -> list[dict[str, Any]]:
    return [{"kind": read.kind, "sources": list(read.sources)} for read in diagnostics.reads]


def _captured(text: Text | None) -> dict[str, Any] | None:
    if text is None:
        return None
    diagnostics = text.diagnostics
    counts = [len(read.sources) for read in diagnostics.reads]
    arrays = diagnostics.arrays
    packed: dict[str, Any] = {
        "origin": text.origin,
        "step": diagnostics.step,
        "tokens": list(text.tokens),
    }
    weights = arrays.get("depth_weights_per_token")
    packed["weights"] = None if weights is None else pack_rows(weights, counts)
    packed["reads"] = _reads(diagnostics)
    packed["meanWeights"] = None if weights is None else _nested(weights.mean(0))
    # The two-phase section follows these through a block; Full has no open partial sum to merge.
    logits = arrays.get("logits_per_token")
    if diagnostics.residual == "block" and logits is not None:
        packed["logits"] = pack_rows(logits, counts)
        packed["lse"] = pack_values(arrays["lse_per_token"])
        packed["gate"] = pack_values(arrays["gate_per_token"])
    return packed


def _nested(array: np.ndarray) -> Any:
    """Nested lists, null where there is no value."""
    if array.ndim > 1:
        return [_nested(one) for one in array]
    return [value if math.isfinite(value) else None for value in array.tolist()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
