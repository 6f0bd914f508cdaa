"""The command line of the report.

    python -m train.report runs/quickstart_standard runs/quickstart -o report.html
    python -m train.report --demo

Exit codes: 0 done, 1 a training run of the demo failed, 2 refused, 130 Ctrl-C.
"""

import dataclasses
import logging
import pathlib
import sys
import webbrowser
from collections.abc import Sequence
from typing import Annotated

import tyro

from train.arguments import read_arguments
from train.checkpoint import CheckpointError
from train.report.comparison import differences
from train.report.demo import train_the_pair
from train.report.page import render
from train.report.payload import payload
from train.report.pictures import draw
from train.report.run import Run, read_run, short_names
from train.report.text import capture


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Makes one self-contained page about runs: what sub-layers read, and how depth matters."""

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]] = ()
    """Folders of runs."""
    output: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-o"])] = pathlib.Path("report.html")
    """HTML file to write."""
    text: str = ""
    """Text whose tokens are shown one by one, at most a run's context; empty takes the first
    held-out text of each run."""
    png: pathlib.Path | None = None
    """Folder for two pictures of the same, for places where HTML cannot be shown."""
    demo: bool = False
    """Train the quickstart pair, standard and Block, if no run is given, and open the report."""


def main(arguments: Sequence[str]) -> int:
    """Writes the report and returns the exit code.

    Args:
        arguments: Those after `python -m train.report`.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    # Orbax logs housekeeping as warnings.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        options = read_arguments(ReportOptions, arguments, prog="python -m train.report")
        paths = options.runs
        if not paths and options.demo:
            paths, code = train_the_pair()
            if code:
                return code
        if not paths:
            raise ValueError("name the folder of at least one run, or add --demo")
        names = short_names(paths)
        runs = [
            _with_text(read_run(path, name), options.text)
            for path, name in zip(paths, names, strict=True)
        ]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(render(payload(runs)), encoding="utf-8")
        pictures = draw(runs, options.png) if options.png else []
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for run in runs:
        for why in run.problems.values():
            print(f"not in the report: {run.name}: {why}", file=sys.stderr)
    for one in differences(runs):
        print(f"not side by side: {one.field} is {one.values}", file=sys.stderr)
    for path in (options.output, *pictures):
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    if options.demo:
        webbrowser.open(options.output.resolve().as_uri())
    return 0


def _with_text(run: Run, text: str) -> Run:
    """Adds what the newest checkpoint does token by token; without one the rest is still shown."""
    if run.settings["model"]["residual"] == "standard":
        return run
    print(f"{run.name}: running the newest checkpoint on a text")
    try:
        return dataclasses.replace(run, text=capture(run.path, text))
    except (ValueError, CheckpointError) as error:
        why = f"single tokens: {' '.join(str(error).split())}"
        return dataclasses.replace(run, problems=run.problems | {"text": why})
