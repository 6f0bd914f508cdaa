"""Per-token captures on one text, packed for the page.

A page of a deep model holds millions of numbers and must open at once. Each token's numbers are
little-endian float32 in base64, ragged rows one after the other without cells that do not exist,
and the page decodes only the token that is looked at.
"""

import base64
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from train.diagnose import diagnose_text
from train.report.diagnostics import Diagnostics, Read


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as the model read it.

    Attributes:
        origin: Where the text is from, in words.
        tokens: The text of each token.
        diagnostics: Captured on it, with the per-token arrays.
    """

    origin: str
    tokens: Sequence[str]
    diagnostics: Diagnostics


def capture(workdir: pathlib.Path, text: str) -> Text:
    """Runs the newest checkpoint of a run on a text.

    Args:
        workdir: Folder of the run.
        text: At most the run's context; empty takes the first held-out text of the run.

    Raises:
        ValueError: The folder holds no checkpoint, or the text is too long.
        CheckpointError: No checkpoint can be read.
    """
    measured = diagnose_text(str(workdir), text)
    assert measured.tokens is not None
    diagnostics = Diagnostics(
        step=measured.step,
        residual=measured.residual,
        block_size=measured.block_size,
        num_sublayers=measured.num_sublayers,
        reads=tuple(Read(*read) for read in measured.reads),
        arrays={name: np.asarray(array, np.float64) for name, array in measured.arrays.items()},
        unusable={},
    )
    origin = "The text of --text" if text else "The first held-out text of the run"
    return Text(origin, measured.tokens, diagnostics)


def pack_rows(array_tln: np.ndarray, counts: Sequence[int]) -> list[str]:
    """Packs `[time, read, source]`: for each token the first `counts[l]` entries of each row l."""
    keep_ln = np.arange(array_tln.shape[-1]) < np.asarray(counts)[:, None]
    return [_base64(array_ln[keep_ln]) for array_ln in array_tln]


def pack_values(array_tl: np.ndarray) -> list[str]:
    """Packs `[time, read]`, NaN where a read has no such value."""
    return [_base64(array_l) for array_l in array_tl]


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")
