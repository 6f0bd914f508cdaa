"""What a run folder holds, as far as it can be read."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from train.metrics import read_metrics
from train.report.diagnostics import Diagnostics, DiagnosticsError, read_newest
from train.report.text import Text


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        name: Short name, unique in a report.
        path: The folder.
        settings: The resolved configuration, as `train.config.to_json` gives it.
        commit: The checkout that trained it last; empty where that is unknown.
        counts: How much text the run found.
        metrics: Lines of metrics.jsonl.
        diagnostics: The newest, or None.
        text: What was captured token by token, or None.
        problems: What is missing and why, by what it is: "diagnostics", "metrics", "text", or the
            name of an array.
    """

    name: str
    path: pathlib.Path
    settings: dict[str, Any]
    commit: str
    counts: dict[str, int]
    metrics: list[dict[str, Any]]
    diagnostics: Diagnostics | None
    text: Text | None
    problems: dict[str, str]

    @property
    def step(self) -> int:
        """The newest step that metrics.jsonl records."""
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.settings["batch_size"] * self.settings["context"]

    @property
    def parameters(self) -> int | None:
        """Number of parameters, where the record has it."""
        return next((line["parameters"] for line in self.metrics if "parameters" in line), None)


def read_run(path: pathlib.Path, name: str) -> Run:
    """Reads a run folder; everything but its configuration may be missing.

    Raises:
        ValueError: The folder is not that of a run.
    """
    config_path = path / "config.json"
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; name the folder of a run")
    try:
        description = json.loads(config_path.read_text(encoding="utf-8"))
        settings, counts = description["settings"], description["data"]
        settings["model"]["residual"], settings["batch_size"], settings["context"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config_path} cannot be read ({type(error).__name__}: {error}); name the folder of a"
            " run that `python -m train` made"
        ) from error
    problems = {}
    metrics = [line for line in read_metrics(path) if isinstance(line.get("step"), int)]
    if not any("loss" in line for line in metrics):
        problems["metrics"] = f"{path / 'metrics.jsonl'} has no line with a loss"
    diagnostics = None
    try:
        diagnostics = read_newest(path)
        problems |= diagnostics.unusable
        if diagnostics.remark:
            problems["remark"] = diagnostics.remark
    except DiagnosticsError as error:
        problems["diagnostics"] = str(error)
    commit = str(description.get("commit", ""))
    return Run(name, path, settings, commit, counts, metrics, diagnostics, None, problems)


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The folder's name where that tells the runs apart, and else the path as given."""
    names = [path.resolve().name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]
