"""Diagnostics of a run: measured now and then on the same held-out text, one JSON line each.

diagnostics.jsonl lies beside metrics.jsonl; `attnres_jax.read_diagnostics` reads it. A line is what
`attnres_jax.Diagnostics.to_json` gives, with five significant digits.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attnres_jax import Diagnostics, diagnose

_DIGITS = 5


def make_diagnostics_step(
    graphdef: Any, mesh: jax.sharding.Mesh
) -> Callable[[Any, dict[str, jax.Array]], Diagnostics]:
    """Builds the compiled measurement of a batch of held-out text.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        mesh: Splits the batch.

    Returns:
        `diagnostics_step(params, batch)` for a batch of "tokens", int32 `[B, T + 1]`, and
        "weights", float32 `[B, T]`.
    """

    def diagnostics_step(params: Any, batch: dict[str, jax.Array]) -> Diagnostics:
        model = nnx.merge(graphdef, params)
        return diagnose(model, batch["tokens"], weights_bt=batch["weights"])

    return jax.jit(diagnostics_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def first_sequences(batch: dict[str, Any], least: int, multiple: int) -> dict[str, Any]:
    """The first rows of a batch: at least so many if it has them, and a multiple of `multiple`."""
    rows = -(-least // multiple) * multiple
    return {name: array[:rows] for name, array in batch.items()}


class DiagnosticsWriter:
    """Appends to diagnostics.jsonl.

    Args:
        workdir: Folder of the run.
        step: Step that the run continues from. Later lines are dropped, since the same steps are
            about to be made again; so is a line that was cut off.
    """

    def __init__(self, workdir: str | pathlib.Path, step: int):
        self._path = pathlib.Path(workdir) / "diagnostics.jsonl"
        if jax.process_index() != 0 or not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _is_whole_and_at_most(line, step)]
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text("".join(kept), encoding="utf-8")
        os.replace(scratch, self._path)

    def write(self, step: int, diagnostics: Diagnostics) -> None:
        """Writes one line; it is on its way to the disk when this returns."""
        if jax.process_index() != 0:
            return
        line = dataclasses.replace(jax.device_get(diagnostics), step=step).to_json(digits=_DIGITS)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _is_whole_and_at_most(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False
