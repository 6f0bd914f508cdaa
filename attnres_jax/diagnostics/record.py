"""Diagnostics as data: arrays with named axes, written as JSON or CSV and read back."""

import csv
import dataclasses
import io
import json
import math
import pathlib
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from attnres_jax.models.config import Residual
from attnres_jax.ops.block import block_boundaries

VERSION = 1

AXES: dict[str, tuple[str, ...]] = {
    "depth_weights": ("read", "source"),
    "entropy": ("read",),
    "sublayer_norm": ("sublayer",),
    "source_norm": ("read", "source"),
    "read_norm": ("read",),
    "block_norm": ("block",),
    "dilution": ("read", "output"),
    "gradient_norm_sublayer": ("sublayer",),
    "gradient_norm_read": ("read",),
    "logit_lens_loss": ("read",),
    "depth_weights_per_token": ("time", "read", "source"),
    "logits_per_token": ("time", "read", "source"),
    "lse_per_token": ("time", "read"),
    "gate_per_token": ("time", "read"),
}
"""The axes of each array; those per token have one more in front, batch, for several sequences."""


_ALL_AXES = ("batch", "time", "read", "source", "sublayer", "block", "output")


class ReadInfo(NamedTuple):
    """Which read, and what it attends to.

    Attributes:
        index: From 0; the L-th is the final one.
        kind: What follows: attention, an MLP, or the final norm.
        sources: Their names, in the order of the axis `source`.
    """

    index: int
    kind: Literal["pre-attention", "pre-MLP", "final"]
    sources: tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """What was measured, as arrays with named axes. A pytree: `jax.jit` may return it.

    Axes: `read` is one of the L + 1 reads; `source` counts the embedding as 0, then blocks, an open
    partial sum in the place of its block; `sublayer` one of the L sub-layers from 0; `block` one of
    the blocks from 0, without the embedding; `output` the embedding as 0, then the sub-layers.
    What is not there (a source that a read does not have, an output that is still to come) is NaN.

    Attributes:
        arrays: By name; see `AXES` for their axes, and `diagnose` for what they say.
        residual: "standard", "full" or "block".
        block_size: Sub-layers in a block (S); None unless `residual` is "block".
        num_sublayers: L.
        step: Training step, where one is known.
        tokens: The text of the tokens along the axis `time`, where it is known.
    """

    arrays: dict[str, Any]
    residual: Residual = dataclasses.field(metadata={"static": True})
    block_size: int | None = dataclasses.field(metadata={"static": True})
    num_sublayers: int = dataclasses.field(metadata={"static": True})
    step: int | None = dataclasses.field(default=None, metadata={"static": True})
    tokens: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def reads(self) -> list[ReadInfo]:
        """The reads in order, the final one last."""
        return describe_reads(self.residual, self.block_size, self.num_sublayers)

    def axes(self, name: str) -> tuple[str, ...]:
        """The names of an array's axes."""
        axes = AXES[name]
        return axes if np.ndim(self.arrays[name]) == len(axes) else ("batch", *axes)

    def to_json(self, *, digits: int | None = None) -> str:
        """Writes one line of JSON, version 1; `from_json` reads it back.

        Args:
            digits: Significant digits of the numbers; None keeps all that float32 has.

        Returns:
            An object with `version`, `step`, `residual`, `block_size`, `num_sublayers`, `reads`
            (`index`, `kind`, `sources` of each), `arrays` (`axes` and nested lists `values` of
            each) and, where known, `tokens`. A value that is not there or not finite is null.
        """
        arrays = {
            name: {"axes": self.axes(name), "values": _nested(np.asarray(array), digits)}
            for name, array in self.arrays.items()
        }
        reads = [read._asdict() for read in self.reads]
        values = {"version": VERSION} | self._described() | {"reads": reads, "arrays": arrays}
        if self.tokens is not None:
            values["tokens"] = self.tokens
        return json.dumps(values, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Diagnostics":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is no JSON, or not of this version.
        """
        values = json.loads(text)
        version = values.get("version") if isinstance(values, dict) else None
        if version != VERSION:
            raise ValueError(
                f"diagnostics of version {version!r} cannot be read, only {VERSION}; measure again"
            )
        try:
            arrays = {
                name: np.array(array["values"], np.float32)  # None becomes NaN.
                for name, array in values["arrays"].items()
            }
            tokens = values.get("tokens")
            return cls(
                arrays,
                values["residual"],
                values["block_size"],
                values["num_sublayers"],
                values["step"],
                None if tokens is None else tuple(tokens),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"diagnostics lack or garble a part: {error!r}") from error

    def to_csv(self) -> str:
        """Writes a table with a row for each value; `from_csv` reads it back.

        The first line is a comment with what else `to_json` says, but the tokens. The columns are
        `array`, the axes (an index from 0, empty where the array has no such axis) and `value`,
        empty where there is none.
        """
        text = io.StringIO()
        text.write(f"# {json.dumps({'version': VERSION} | self._described())}\n")
        writer = csv.writer(text, lineterminator="\n")
        used = {axis for name in self.arrays for axis in self.axes(name)}
        names = [axis for axis in _ALL_AXES if axis in used]
        writer.writerow(["array", *names, "value"])
        for name, array in self.arrays.items():
            axes = self.axes(name)
            for index, value in np.ndenumerate(np.asarray(array)):
                places = dict(zip(axes, index, strict=True))
                number = str(value) if math.isfinite(value) else ""
                writer.writerow([name, *(places.get(axis, "") for axis in names), number])
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> "Diagnostics":
        """Reads what `to_csv` wrote.

        Raises:
            ValueError: The text is of another form or version.
        """
        first, _, table = text.partition("\n")
        if not first.startswith("# {"):
            raise ValueError("diagnostics: the first line of the CSV must be its comment, # {…}")
        described = json.loads(first[2:])
        if described.pop("version") != VERSION:
            raise ValueError(f"diagnostics: this is not version {VERSION}; measure again")
        rows = csv.reader(io.StringIO(table))
        columns = next(rows)[1:-1]
        found: dict[str, dict[tuple[int, ...], float]] = {}
        for name, *places, value in rows:
            place_of = dict(zip(columns, places, strict=True))
            axes = [axis for axis in ("batch", *AXES[name]) if place_of.get(axis)]
            index = tuple(int(place_of[axis]) for axis in axes)
            found.setdefault(name, {})[index] = float(value) if value else math.nan
        arrays = {}
        for name, values in found.items():
            arrays[name] = np.empty(1 + np.array(list(values)).max(0), np.float32)
            for index, value in values.items():
                arrays[name][index] = value
        return cls(arrays, **described)

    def _described(self) -> dict[str, Any]:
        names = ("step", "residual", "block_size", "num_sublayers")
        return {name: getattr(self, name) for name in names}


def describe_reads(
    residual: Residual, block_size: int | None, num_sublayers: int
) -> list[ReadInfo]:
    """Lists the L + 1 reads of a model and names their sources.

    A standard residual has one source, the residual stream. The layers are numbered from 1, so the
    outputs are "attention 1", "MLP 1", "attention 2" and so on.
    """
    blocks = block_boundaries(num_sublayers, block_size or 1)
    outputs = [
        "embedding",
        *(f"{('attention', 'MLP')[i % 2]} {i // 2 + 1}" for i in range(num_sublayers)),
    ]
    reads = []
    for index in range(num_sublayers + 1):
        kind = "final" if index == num_sublayers else ("pre-attention", "pre-MLP")[index % 2]
        finished = sum(stop <= index for _, stop in blocks)
        if residual == "standard":
            sources = ["residual stream"]
        elif residual == "full":
            sources = outputs[: index + 1]
        else:
            sources = ["embedding", *(f"block {n + 1}" for n in range(finished))]
            if index < num_sublayers and index > blocks[finished][0]:
                sources.append(f"partial sum of block {finished + 1}")
        reads.append(ReadInfo(index, kind, tuple(sources)))
    return reads


def read_diagnostics(path: str | pathlib.Path) -> list[Diagnostics]:
    """Reads a file with one `to_json` a line; a last line that was cut off is left out.

    Args:
        path: The file, or the folder of a run that has a `diagnostics.jsonl`.

    Raises:
        ValueError: A line is not of this version, or one before the last is no JSON; the message
            names file and line.
        FileNotFoundError: There is no such file.
    """
    path = pathlib.Path(path)
    path = path / "diagnostics.jsonl" if path.is_dir() else path
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            records.append(Diagnostics.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def _nested(array: np.ndarray, digits: int | None) -> Any:
    if array.ndim:
        return [_nested(row, digits) for row in array]
    if not np.isfinite(array):
        return None
    # The shortest text that reads back as the same float32.
    return float(str(array[()]) if digits is None else f"{array:.{digits}g}")
