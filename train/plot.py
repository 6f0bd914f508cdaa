"""Draws what each sub-layer of a run reads: its depth weights on held-out text, as a PNG.

python -m train.plot --workdir=runs/quickstart --output=depth_weights.png
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.arguments import read_arguments
from train.metrics import read_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draws the depth weights of a run's newest evaluation."""

    workdir: str
    """Folder of the run."""
    output: pathlib.Path
    """PNG file to write."""


def main(arguments: Sequence[str]) -> int:
    """Writes the picture and returns the exit code.

    Args:
        arguments: Those after `python -m train.plot`.
    """
    try:
        options = read_arguments(PlotOptions, arguments, prog="python -m train.plot")
        step, weights_ln = newest_depth_weights(options.workdir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(weights_ln, f"Depth weights, step {step} of {options.workdir}", options.output)
    print(f"wrote {options.output}")
    return 0


def newest_depth_weights(workdir: str) -> tuple[int, np.ndarray]:
    """Reads the mean depth weights of the newest evaluation.

    Returns:
        Its step, and float64 `[L + 1, n]`: a row for each read, NaN where it has no such source.

    Raises:
        ValueError: The folder has no evaluation with depth weights.
    """
    for line in reversed(read_metrics(workdir)):
        names = [name for name in line if name.startswith("depth/weight/")]
        if not names:
            continue
        places = [(int(name[18:20]), int(name[-2:]), line[name]) for name in names]
        shape = (1 + max(read for read, _, _ in places), 1 + max(n for _, n, _ in places))
        weights_ln = np.full(shape, np.nan)
        for read, source, weight in places:
            weights_ln[read, source] = weight
        return line["step"], weights_ln
    raise ValueError(
        f"{workdir} has no evaluation with depth weights; train with model.residual block or full"
    )


def draw(weights_ln: np.ndarray, title: str, output: pathlib.Path) -> None:
    """Draws a heatmap with the value in each cell; sources that a read does not have stay blank."""
    # Imported here: drawing is the only thing that needs it.
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    num_reads, num_sources = weights_ln.shape
    size = (1.6 + 0.9 * num_sources, 1.2 + 0.36 * num_reads)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image: Any = axes.imshow(weights_ln, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for (read, source), weight in np.ndenumerate(weights_ln):
        if np.isfinite(weight):
            colour = "black" if weight > 0.6 else "white"
            axes.text(source, read, f"{weight:.2f}", ha="center", va="center", color=colour)
    kinds = [("attention", "feed-forward")[i % 2] for i in range(num_reads - 1)] + ["head"]
    axes.set_yticks(range(num_reads), [f"{i + 1} {kind}" for i, kind in enumerate(kinds)])
    labels = ["embedding", *(f"block {n}" for n in range(1, num_sources))]
    axes.set_xticks(range(num_sources), labels)
    axes.set_xlabel("source (the last of a row may be an open block's partial sum)", fontsize=8)
    axes.set_ylabel("read before")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label="mean depth weight")
    figure.savefig(output, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
