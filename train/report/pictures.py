"""Two pictures of what the page shows, for a README or for people without a browser."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.report.comparison import differences
from train.report.run import Run

_COLOURS = ("#22609f", "#b4501f", "#277055", "#7d4a9e", "#8f6a0c", "#a63a5b")
_HEATMAP = ("#eef1f2", "#a9cbe3", "#3c7cb5", "#12345f")


def draw(runs: Sequence[Run], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws depth_by_run.png (heatmaps) and training_by_depth.png (curves).

    Returns:
        The files.
    """
    # Imported here: drawing is the only thing that needs it.
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = {"depth_by_run.png": _heatmaps, "training_by_depth.png": _curves}
    paths = []
    for name, make in figures.items():
        with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
            figure = make(plt, runs)
            figure.supxlabel(_provenance(runs), fontsize=7, color="#625d54")
            paths.append(folder / name)
            figure.savefig(paths[-1], dpi=130)
            plt.close(figure)
    return paths


def _heatmaps(plt: Any, runs: Sequence[Run]) -> Any:
    """A row of panels: the dilution of each run, and the depth weights where there are reads."""
    panels = [(run, name) for run in runs for name in ("dilution", "depth_weights")]
    panels = [panel for panel in panels if _array(*panel) is not None] or [(runs[0], "")]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.0), layout="constrained", squeeze=False
    )
    for axis, (run, name) in zip(axes[0], panels, strict=True):
        _heatmap(axis, run, name)
    return figure


def _heatmap(axis: Any, run: Run, name: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    matrix = _array(run, name)
    if matrix is None:
        axis.set_axis_off()
        axis.text(
            0.5, 0.5, run.problems.get("diagnostics", "no diagnostics"), ha="center", wrap=True
        )
        return
    assert run.diagnostics is not None
    colours = LinearSegmentedColormap.from_list("depth", _HEATMAP)
    largest = float(np.nanmax(matrix))
    axis.imshow(matrix, cmap=colours, vmin=0, vmax=largest, aspect="auto")
    if matrix.size <= 160:
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                colour = "white" if value > 0.45 * largest else "black"
                axis.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7
                )
    outputs = ["embedding", *map(_sublayer, range(run.diagnostics.num_sublayers))]
    rows = [f"before {one}" for one in outputs[1:]] + ["final read"]
    columns = outputs if name == "dilution" else list(run.diagnostics.reads[-1].sources)
    every = max(1, len(rows) // 32)
    axis.set_yticks(range(0, len(rows), every), rows[::every])
    every = max(1, len(columns) // 32)
    axis.set_xticks(range(0, len(columns), every), columns[::every], rotation=60, ha="right")
    what = "share of each output" if name == "dilution" else "mean depth weights"
    axis.set_title(f"{run.name}: {what}", fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _curves(plt: Any, runs: Sequence[Run]) -> Any:
    """Magnitude and gradient by depth, and the losses where the runs may be compared."""
    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.6), layout="constrained")
    shown = (
        ("read_norm", "root mean square of the hidden state"),
        ("gradient_norm_sublayer", "gradient at each output, root mean square"),
    )
    for axis, (name, label) in zip(axes, shown, strict=False):
        for run, colour in zip(runs, _cycle(runs), strict=True):
            values = _array(run, name)
            if values is not None:
                places = range(1, len(values) + 1)
                axis.plot(places, values, ".-", color=colour, label=run.name)
        axis.set(xlabel="depth (sub-layers)", ylabel=label, yscale="log")
    _losses(axes[2], runs)
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    return figure


def _losses(axis: Any, runs: Sequence[Run]) -> None:
    different = differences(runs)
    if different:
        axis.set_axis_off()
        fields = ", ".join(one.field for one in different)
        axis.text(0.5, 0.5, f"not compared: {fields} differ", ha="center", wrap=True)
        return
    for run, colour in zip(runs, _cycle(runs), strict=True):
        lines = [line for line in run.metrics if line.get("loss") is not None]
        steps = [line["step"] for line in lines]
        axis.plot(steps, [line["loss"] for line in lines], color=colour, lw=1, label=run.name)
    axis.set(xlabel="step", ylabel="training loss, nats per token")


def _provenance(runs: Sequence[Run]) -> str:
    places = [
        f"{run.name}, step {run.diagnostics.step if run.diagnostics else run.step}" for run in runs
    ]
    return f"measured: {'; '.join(places)}"


def _array(run: Run, name: str) -> np.ndarray | None:
    return None if run.diagnostics is None else run.diagnostics.arrays.get(name)


def _cycle(runs: Sequence[Run]) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(len(runs))]


def _sublayer(index: int) -> str:
    return f"{('attention', 'MLP')[index % 2]} {index // 2 + 1}"
