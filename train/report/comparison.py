"""Which runs may stand side by side: those that saw equally much of the same text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from train.report.run import Run

_DATA_SETTINGS = (
    "source",
    "paths",
    "text_field",
    "tokenizer",
    "validation_fraction",
    "max_document_bytes",
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field that must agree and does not.

    Attributes:
        field: Name of the setting or count.
        values: Its value in each run, by the run's name.
    """

    field: str
    values: dict[str, Any]


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Lists what forbids to compare the losses of these runs; nothing if they may be."""
    fields = [_must_agree(run) for run in runs]
    names = list(dict.fromkeys(name for values in fields for name in values))
    found = []
    for name in names:
        values = {
            run.name: field.get(name, "absent") for run, field in zip(runs, fields, strict=True)
        }
        if len({repr(value) for value in values.values()}) > 1:
            found.append(Difference(name, values))
    return found


def _must_agree(run: Run) -> dict[str, Any]:
    data = run.settings["data"]
    return {
        **{f"data.{name}": data.get(name, "absent") for name in _DATA_SETTINGS},
        **{f"{name} found": count for name, count in run.counts.items()},
        "context": run.settings["context"],
        "tokens trained on": run.tokens,
        "evaluation_tokens": run.settings.get("evaluation_tokens", "absent"),
    }
