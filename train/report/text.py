"""Per-token captures on one text, packed for the page.

A page of a deep model holds millions of numbers and must open at once. Each token's numbers are
little-endian float32 in base64, ragged rows one after the other without cells that do not exist,
and the page decodes only the token that is looked at.
"""

import base64
import dataclasses
from collections.abc import Sequence

import numpy as np

from train.report.diagnostics import Diagnostics


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


def pack_rows(array_tln: np.ndarray, counts: Sequence[int]) -> list[str]:
    """Packs `[time, read, source]`: for each token the first `counts[l]` entries of each row l."""
    keep_ln = np.arange(array_tln.shape[-1]) < np.asarray(counts)[:, None]
    return [_base64(array_ln[keep_ln]) for array_ln in array_tln]


def pack_values(array_tl: np.ndarray) -> list[str]:
    """Packs `[time, read]`, NaN where a read has no such value."""
    return [_base64(array_l) for array_l in array_tl]


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")
