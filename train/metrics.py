"""What a run leaves to read: metrics.jsonl, TensorBoard files, and a bar or lines on the terminal.

metrics.jsonl is the record: one JSON object a line with "step" and flat names, written by process 0
only. A number that is not finite is null, so that every line is valid JSON.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
import rich.table
import tensorboardX


class MetricsWriter:
    """Appends to metrics.jsonl and to the TensorBoard files beside it.

    Args:
        workdir: Folder of the run.
        step: Step that the run continues from. Later lines, which the earlier process wrote after
            its last checkpoint, are dropped, since the same steps are about to be made again; so is
            a line that was cut off.
    """

    def __init__(self, workdir: str | pathlib.Path, step: int):
        self._file = None
        if jax.process_index() != 0:
            return
        path = pathlib.Path(workdir) / "metrics.jsonl"
        lines = [line for line in read_metrics(workdir) if line["step"] <= step]
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(scratch, path)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = tensorboardX.SummaryWriter(
            str(path.parent / "tensorboard"), purge_step=step + 1 if step else None
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line; it is on its way to the disk when this returns."""
        if self._file is None:
            return
        numbers = {name: float(value) for name, value in values.items()}
        line = {name: _json_number(number) for name, number in numbers.items()}
        self._file.write(json.dumps({"step": step} | line, allow_nan=False) + "\n")
        self._file.flush()
        for name, number in numbers.items():
            if math.isfinite(number):
                self._tensorboard.add_scalar(name, number, step)

    def close(self) -> None:
        """Writes what is buffered and closes the files."""
        if self._file is not None:
            self._file.close()
            self._tensorboard.close()


def read_metrics(workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """Reads the whole lines of metrics.jsonl; a last one that was cut off is left out."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def _json_number(number: float) -> int | float | None:
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def evaluation_metrics(
    sums: Mapping[str, np.ndarray], num_bytes: int, params: Any
) -> dict[str, float]:
    """Turns the sums over all held-out batches into means.

    Bits per byte is the whole loss in bits over the bytes of the text, which makes tokenizers
    comparable. Normalised entropy is that of a token's depth weights over log n, averaged over
    tokens: 1 spreads evenly over the n sources, 0 takes a single one. A read of one source has
    nothing to choose and is given 0.

    Args:
        sums: From the evaluation step, added up over batches.
        num_bytes: Bytes of text that the weighted tokens stand for.
        params: Nested dict of parameters in layer order, for the norms of the pseudo-queries.

    Returns:
        Flat names and finite values where the model's are. Reads are numbered from 00, the final
        one last; sources from 00, the embedding.
    """
    tokens = float(sums["tokens"])
    metrics = {
        "validation/loss": float(sums["nats"]) / tokens,
        "validation/bits_per_byte": float(sums["nats"]) / math.log(2) / num_bytes,
        "validation/tokens": tokens,
    }
    for name, total in sums.items():
        kind, _, read = name.partition("/")
        if kind == "weight":
            for source, weight in enumerate(total / tokens):
                metrics[f"depth/weight/read_{read}/source_{source:02d}"] = float(weight)
            entropy = float(sums[f"entropy/{read}"]) / tokens
            num_sources = len(total)
            metrics[f"depth/entropy/read_{read}"] = (
                entropy / math.log(num_sources) if num_sources > 1 else 0.0
            )
    for depth, norm in enumerate(np.sqrt(sums["hidden_square"] / sums["positions"])):
        metrics[f"depth/hidden_norm/{depth:02d}"] = float(norm)
    for read, norm in enumerate(query_norms(params)):
        metrics[f"depth/query_norm/read_{read:02d}"] = norm
    return metrics


def depth_table(lines: Sequence[dict[str, Any]]) -> rich.table.Table | None:
    """Shows the mean depth weights of the newest evaluation, a row for each read.

    Args:
        lines: From `read_metrics`.

    Returns:
        A table, or None where no evaluation has depth weights or there are more than 12 sources,
        which do not fit a terminal.
    """
    weights: dict[str, list[float]] = {}
    for line in lines:
        evaluated = {k: v for k, v in line.items() if k.startswith("depth/weight/")}
        if evaluated:
            weights = {}
        for name, weight in sorted(evaluated.items()):
            weights.setdefault(name.split("/")[2], []).append(weight)
    if not 0 < max(map(len, weights.values()), default=0) <= 12:
        return None
    reads = list(weights.values())
    title = "What each sub-layer reads: mean depth weights on held-out text"
    table = rich.table.Table("reader", title=title)
    for source in range(len(reads[-1])):
        table.add_column(f"block {source}" if source else "embedding", justify="right")
    for index, row in enumerate(reads):
        kind = "head" if index == len(reads) - 1 else ("attention", "feed-forward")[index % 2]
        table.add_row(f"{index + 1} {kind}", *(f"{weight:.2f}" for weight in row))
    return table


def query_norms(params: Any) -> list[float]:
    """Euclidean norm of every read's pseudo-query, the final one last; empty without AttnRes."""
    queries = [
        np.atleast_2d(np.asarray(params[owner]["query"]))
        for owner in ("reads", "final_read")
        if owner in params
    ]
    return [float(norm) for query_ld in queries for norm in np.linalg.norm(query_ld, axis=-1)]


class Clock:
    """Times training alone: evaluations, checkpoints and the first compilation are left out."""

    def __init__(self):
        self._started = math.nan
        self._steps = 0

    def restart(self) -> None:
        """Starts, or forgets what was timed so far."""
        self._started, self._steps = time.perf_counter(), 0

    def tick(self) -> None:
        """Counts one step."""
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Leaves out what is done inside."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - paused

    def steps_per_second(self) -> float:
        """Mean since the last restart; NaN before that or before a step."""
        elapsed = time.perf_counter() - self._started
        return self._steps / elapsed if self._steps and elapsed > 0 else math.nan


class Display:
    """A progress bar on a terminal, one plain line for each report elsewhere.

    Only process 0 prints.

    Args:
        steps: Steps in the whole run.
        step: Steps already made.
    """

    def __init__(self, steps: int, step: int):
        self._steps = steps
        self._console = rich.console.Console(quiet=jax.process_index() != 0, highlight=False)
        self._bar = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[status]}"),
                rich.progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=step, status="compiling")
            self._bar.start()

    def report(self, step: int, loss: float, tokens_per_second: float, seconds: float) -> None:
        """Shows the newest loss, the speed and the seconds that remain."""
        speed = f"{tokens_per_second:,.0f}" if math.isfinite(tokens_per_second) else "-"
        status = f"loss {loss:.4f}  {speed} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
            return
        remaining = "-"
        if math.isfinite(seconds):
            minutes, seconds = divmod(round(seconds), 60)
            remaining = f"{minutes}:{seconds:02d}"
        self.print(f"step {step}/{self._steps}  {status}  ETA {remaining}")

    def print(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()
