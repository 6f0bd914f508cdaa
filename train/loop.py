"""The training loop, read from top to bottom: set up, restore, train, evaluate, save, finish."""

import json
import os
import pathlib
import shlex
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
from flax import nnx

from train import metrics as metrics_lib
from train import step as step_lib
from train.checkpoint import Checkpoints, check_same_run, describe
from train.config import Config
from train.data import (
    Validation,
    check_vocab,
    load_documents,
    train_batches,
    validation_batches,
)
from train.diagnostics import DiagnosticsWriter, first_sequences, make_diagnostics_step
from train.generate import generate
from train.setup import Setup, abstract_setup, check_retrofit, first_state
from train.signals import StopSignals, stopping_everywhere
from train.tokenizer import load_tokenizer


class NonFiniteError(RuntimeError):
    """The run stopped at a loss or gradient that is not finite."""


class Run(NamedTuple):
    """A checked run of which nothing has been compiled or written."""

    config: Config
    setup: Setup
    batches: Any
    validation: Validation
    description: dict[str, Any]


def prepare(config: Config) -> Run:
    """Checks everything that can be checked before compiling, and writes nothing.

    Raises:
        ValueError: A setting, the data or the workdir cannot be used; the message is one line.
    """
    setup = abstract_setup(config)
    num_devices = setup.mesh.size
    microbatch = config.batch_size // config.optimizer.accumulate
    if microbatch % num_devices:
        raise ValueError(
            f"batch_size / optimizer.accumulate: {microbatch} sequences cannot be shared by"
            f" {num_devices} devices; make it a multiple of {num_devices}"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocab(tokenizer, config.model.vocab_size)
    documents = load_documents(config.data, tokenizer)
    share = {
        "batch_size": config.batch_size // jax.process_count(),
        "context": config.context,
        "shard_index": jax.process_index(),
        "shard_count": jax.process_count(),
    }
    batches = train_batches(documents, config.data, tokenizer, seed=config.seed, **share)
    validation = validation_batches(
        documents, tokenizer, max_tokens=config.evaluation_tokens, **share
    )

    description = describe(config, documents.counts)
    saved = Checkpoints(config.workdir, read_only=True).newest_description()
    if saved is None and config.retrofit_from:
        check_retrofit(config)
    path = pathlib.Path(config.workdir) / "config.json"
    if saved is None and path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
    if saved is not None:
        check_same_run(saved, description)

    # Tracing says now, not after the folder is made, what the model cannot do here.
    tokens_bt = jax.ShapeDtypeStruct((config.batch_size, config.context), np.int32)
    jax.eval_shape(
        lambda params, tokens_bt: nnx.merge(setup.graphdef, params)(tokens_bt),
        setup.template.params,
        tokens_bt,
    )
    return Run(config, setup, batches, validation, description)


def train(run: Run, command: str) -> int:
    """Trains until the last step, a signal or an error.

    Args:
        run: From `prepare`.
        command: The command line that continues this run, for the closing words.

    Returns:
        0 when the last step is done, or 128 + the number of the signal that stopped the run.

    Raises:
        NonFiniteError: As `config.non_finite` says; the checkpoints before are intact.
        CheckpointError: A checkpoint could not be written or read.
    """
    config, setup, batches = run.config, run.setup, run.batches
    mesh = setup.mesh
    workdir = pathlib.Path(config.workdir)
    tokens_per_step = config.batch_size * config.context

    # ------------------------------------------------------------------- restore or initialise
    checkpoints = Checkpoints(workdir, config.keep_checkpoints)
    state = checkpoints.restore(setup.template, batches)
    added = []
    if state is None:
        state, added = first_state(config, setup)
    step = int(state.step)
    evaluated = any(
        line["step"] == step and "validation/loss" in line
        for line in metrics_lib.read_metrics(workdir)
    )
    if step >= config.steps and evaluated:
        batches.close()
        checkpoints.close()
        if jax.process_index() == 0:
            print(f"{workdir} already holds step {step} of {config.steps}: nothing to do")
        return 0

    # ------------------------------------------------------------------------- record
    if jax.process_index() == 0:
        scratch = workdir / "config.json.tmp"
        scratch.write_text(json.dumps(run.description, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, workdir / "config.json")
    writer = metrics_lib.MetricsWriter(workdir, step)
    diagnostics = DiagnosticsWriter(workdir, step)
    display = metrics_lib.Display(config.steps, step)
    clock = metrics_lib.Clock()
    if step:
        display.print(f"continuing {workdir} after step {step}")
    else:
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        counts = {f"data/{name}": count for name, count in run.description["data"].items()}
        writer.write(0, counts | {"parameters": num_parameters})
        display.print(
            f"{num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}"
        )
        if added:
            display.print(f"weights from {config.retrofit_from}; new: {', '.join(added)}")

    def finish_step(number: int, metrics: step_lib.Metrics) -> None:
        """Fetches, checks and records the metrics of a step, after the next one is dispatched."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        clock.tick()
        if values["skipped_in_row"]:
            _handle_non_finite(config, number, values, display)
        if number % config.log_every == 0 or number in (1, config.steps):
            speed = clock.steps_per_second()
            clock.restart()
            values |= {"tokens": number * tokens_per_step}
            values |= {"tokens_per_second": speed * tokens_per_step}
            writer.write(number, values)
            remaining = (config.steps - number) / speed
            display.report(number, values["loss"], speed * tokens_per_step, remaining)

    def evaluate(params: step_lib.Params) -> None:
        """Evaluates and records, unless told to stop meanwhile."""
        with clock.paused():
            values = _evaluate(run, evaluation_step, params, stop)
        if values is not None:
            writer.write(step, values)
            display.print(
                f"step {step}/{config.steps}  validation loss {values['validation/loss']:.4f}"
                f"  bits per byte {values['validation/bits_per_byte']:.4f}"
            )

    def measure(params: step_lib.Params) -> None:
        """Measures depth on a few held-out sequences and records."""
        with clock.paused():
            diagnostics.write(step, diagnostics_step(params, sequences))

    # -------------------------------------------------------------------------- train
    train_step = step_lib.make_train_step(
        setup.graphdef, setup.optimizer, setup.schedule, mesh, config.optimizer.accumulate
    )
    evaluation_step = step_lib.make_evaluation_step(setup.graphdef, mesh)
    diagnostics_step = make_diagnostics_step(setup.graphdef, mesh)
    of_process = mesh.size // jax.process_count()
    sequences = step_lib.to_devices(
        first_sequences(run.validation.batches[0], config.diagnostics.sequences, of_process), mesh
    )
    in_flight = None
    stop = StopSignals()
    try:
        # Kernels that the compiler cannot partition ask which mesh they are on.
        with stop, jax.set_mesh(mesh):
            if step and _evaluation_due(config, step) and not evaluated:
                evaluate(state.params)  # The earlier process was told to stop before it could.
            if step == 0 and config.diagnostics.every:
                measure(state.params)
            compiling = True
            while step < config.steps:
                batch = step_lib.to_devices(next(batches), mesh)
                state, metrics = train_step(state, batch)
                step += 1
                if in_flight is not None:
                    finish_step(*in_flight)
                in_flight = step, metrics
                if compiling:
                    finish_step(*in_flight)
                    in_flight, compiling = None, False
                    clock.restart()
                checkpoints.check()

                stopping = stopping_everywhere(stop)
                save = step % config.checkpoint_every == 0 or step == config.steps or stopping
                measuring = _diagnostics_due(config, step)
                if not (save or measuring or _evaluation_due(config, step)):
                    continue
                # A step that is not finite must stop the run before its state is saved.
                if in_flight is not None:
                    finish_step(*in_flight)
                    in_flight = None
                if measuring:
                    measure(state.params)
                if _evaluation_due(config, step) and not stopping:
                    evaluate(state.params)
                    stopping = stopping_everywhere(stop)
                if save or stopping:
                    with clock.paused():
                        checkpoints.save(step, state, batches, run.description)
                if stopping:
                    break
    finally:
        display.close()
        writer.close()
        batches.close()
        checkpoints.close()

    # -------------------------------------------------------------------------- finish
    if step == config.steps and jax.process_index() == 0:
        _show_what_it_learned(config, setup, state.params, workdir)
    display.print(f"step {step} of {config.steps} is saved in {workdir}")
    display.print(f"sample:    python -m train.sample --workdir={shlex.quote(str(workdir))}")
    more = "" if step < config.steps else " --steps=MORE"
    display.print(f"continue:  {command}{more}")
    return 0 if stop.number is None else 128 + stop.number


def _show_what_it_learned(
    config: Config, setup: Setup, params: step_lib.Params, workdir: pathlib.Path
) -> None:
    table = metrics_lib.depth_table(metrics_lib.read_metrics(workdir))
    if table is not None:
        rich.console.Console().print(table)
    if config.sample_tokens:
        tokenizer = load_tokenizer(config.data.tokenizer)
        pieces = generate(
            setup.graphdef,
            jax.device_get(params),
            tokenizer,
            context=config.context,
            tokens=config.sample_tokens,
            temperature=0.6,
        )
        print(f"--- a sample of {config.sample_tokens} tokens at most, temperature 0.6 ---")
        for text in pieces:
            print(text, end="", flush=True)
        print("\n---")


def _evaluation_due(config: Config, step: int) -> bool:
    return step % config.evaluate_every == 0 or step == config.steps


def _diagnostics_due(config: Config, step: int) -> bool:
    every = config.diagnostics.every
    return every > 0 and (step % every == 0 or step == config.steps)


def _handle_non_finite(
    config: Config, step: int, values: dict[str, float], display: metrics_lib.Display
) -> None:
    what = f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']}"
    if config.non_finite == "halt":
        raise NonFiniteError(
            f"{what} is not finite; parameters and moments are those before it, and the newest"
            " checkpoint is intact. --non-finite=skip passes over such steps"
        )
    display.print(f"{what} is not finite; skipped")
    if values["skipped_in_row"] >= config.max_skipped_steps:
        raise NonFiniteError(
            f"{what}: max_skipped_steps={config.max_skipped_steps} steps in a row are not finite;"
            " the newest checkpoint is intact"
        )


def _evaluate(
    run: Run, evaluation_step: Any, params: Any, stop: StopSignals
) -> dict[str, float] | None:
    """Evaluates all held-out batches, or gives up and returns None when told to stop."""
    totals: dict[str, np.ndarray] = {}
    for batch in run.validation.batches:
        # Processes must stay in step with each other, so only a lone one may leave early.
        if stop.number is not None and jax.process_count() == 1:
            return None
        sums = jax.device_get(evaluation_step(params, step_lib.to_devices(batch, run.setup.mesh)))
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.astype(np.float64)
    return metrics_lib.evaluation_metrics(totals, run.validation.bytes, jax.device_get(params))
