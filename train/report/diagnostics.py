"""Reads diagnostics.jsonl as files are found: of another version, cut off, or with NaNs.

An array that cannot be used is left out with the reason, so that everything else can be shown.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

VERSION = 1
FILE_NAME = "diagnostics.jsonl"

AXES = {
    "depth_weights": ("read", "source"),
    "depth_weights_per_token": ("time", "read", "source"),
    "entropy": ("read",),
    "sublayer_norm": ("sublayer",),
    "source_norm": ("read", "source"),
    "read_norm": ("read",),
    "block_norm": ("block",),
    "dilution": ("read", "output"),
    "gradient_norm_sublayer": ("sublayer",),
    "gradient_norm_read": ("read",),
    "logit_lens_loss": ("read",),
    "logits_per_token": ("time", "read", "source"),
    "lse_per_token": ("time", "read"),
    "gate_per_token": ("time", "read"),
}
"""Names of the arrays that the page can show, and their axes."""

_MAY_LACK_VALUES = ("lse_per_token", "gate_per_token")  # Not every read has two phases.


class DiagnosticsError(ValueError):
    """There are no diagnostics that can be shown; the message says why, and the way out."""


@dataclasses.dataclass(frozen=True)
class Read:
    """One depth attention.

    Attributes:
        index: From 0; the last is the final read.
        kind: "pre-attention", "pre-MLP" or "final".
        sources: Names of what it attends to.
    """

    index: int
    kind: str
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """One line of diagnostics.jsonl.

    Attributes:
        step: Step at which they were taken.
        residual: "standard", "full" or "block".
        block_size: Sub-layers in a block (S), or None.
        num_sublayers: L.
        reads: The L + 1 reads.
        arrays: float64 by name, NaN where there is no such value.
        unusable: Why an array that is there cannot be used, by name.
        remark: What else a reader should know, such as that a later line is cut off.
    """

    step: int | None
    residual: str
    block_size: int | None
    num_sublayers: int
    reads: tuple[Read, ...]
    arrays: Mapping[str, np.ndarray]
    unusable: Mapping[str, str]
    remark: str = ""


def read_newest(workdir: pathlib.Path) -> Diagnostics:
    """Reads the newest whole line of a run's diagnostics.jsonl.

    Raises:
        DiagnosticsError: There is no such line, or it is of another version.
    """
    path = workdir / FILE_NAME
    if not path.exists():
        raise DiagnosticsError(
            f"{path} does not exist; train with --diagnostics.every=50 to write it"
        )
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    cut_off = 0
    for text in reversed(texts):
        try:
            values = json.loads(text)
        except ValueError:
            cut_off += 1
            continue
        remark = f"{cut_off} newer line(s) of {path} are incomplete" if cut_off else ""
        return dataclasses.replace(parse(values, str(path)), remark=remark)
    raise DiagnosticsError(f"{path} has no complete line; let the run write its diagnostics again")


def parse(values: Any, where: str) -> Diagnostics:
    """Checks one line.

    Args:
        values: What its JSON holds.
        where: Named in messages.

    Raises:
        DiagnosticsError: The line is not one of this version.
    """
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        raise DiagnosticsError(
            f"{where} is of version {version} and this report reads version {VERSION}; use the"
            " report of the checkout that trained the run, or train it again"
        )
    try:
        reads = tuple(
            Read(int(read["index"]), str(read["kind"]), tuple(map(str, read["sources"])))
            for read in values["reads"]
        )
        num_sublayers = int(values["num_sublayers"])
        described = {name: values["arrays"][name] for name in AXES if name in values["arrays"]}
        residual, block_size, step = values["residual"], values["block_size"], values["step"]
    except (KeyError, TypeError, ValueError) as error:
        raise DiagnosticsError(f"{where} lacks a field of version {VERSION}: {error!r}") from error
    if len(reads) != num_sublayers + 1:
        raise DiagnosticsError(
            f"{where} has {len(reads)} reads for {num_sublayers} sub-layers; there is one before"
            " each and a final one"
        )
    arrays, unusable = {}, {}
    for name, described_array in described.items():
        try:
            arrays[name] = _array(name, described_array, reads)
        except (KeyError, TypeError, ValueError) as error:
            unusable[name] = f"{name} in {where}, step {step}: {error}"
    return Diagnostics(step, residual, block_size, num_sublayers, reads, arrays, unusable)


def _array(name: str, described: Any, reads: tuple[Read, ...]) -> np.ndarray:
    if tuple(described["axes"]) != AXES[name]:
        raise ValueError(f"the axes are {described['axes']}, not {list(AXES[name])}")
    array = np.array(described["values"], np.float64)  # None becomes NaN.
    lengths = {"read": len(reads), "sublayer": len(reads) - 1, "output": len(reads)}
    lengths["source"] = max(len(read.sources) for read in reads)
    for axis, length in zip(AXES[name], array.shape, strict=True):
        if axis in lengths and length != lengths[axis]:
            raise ValueError(f"axis {axis!r} has length {length}, not {lengths[axis]}")
    if name in _MAY_LACK_VALUES:
        return array
    bad = np.argwhere(~np.isfinite(array) & _available(name, reads, array.shape))
    if len(bad):
        place = ", ".join(f"{axis} {i}" for axis, i in zip(AXES[name], bad[0], strict=True))
        raise ValueError(
            f"{len(bad)} value(s) are not finite, the first at {place}; did the run diverge?"
        )
    return array


def _available(name: str, reads: tuple[Read, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Where an array must have a value: sources that a read has, outputs that came before it."""
    last = AXES[name][-1]
    if last == "source":
        count = np.array([len(read.sources) for read in reads])
    elif last == "output":
        count = np.arange(1, len(reads) + 1)
    else:
        return np.ones(shape, bool)
    return np.broadcast_to(np.arange(shape[-1]) < count[:, None], shape)
