"""Checkpoints of state, data position and configuration together, and what may change between runs.

Orbax writes them in the background and renames a folder into place when it is complete, so a run
that is killed while saving leaves the checkpoint before intact. A checkpoint that cannot be read
(truncated by a full disk, say) is passed over with a warning, and moved aside so that its step can
be saved again and so that it never counts as one of the newest to keep.
"""

import functools
import logging
import pathlib
import shutil
import sys
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train.config import Config, to_json
from train.revision import checkout
from train.step import TrainState

logger = logging.getLogger(__name__)

MAY_CHANGE = frozenset(
    {
        "workdir",
        "steps",
        "log_every",
        "evaluate_every",
        "evaluation_tokens",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_tokens",
        "non_finite",
        "max_skipped_steps",
        "diagnostics.every",
        "diagnostics.sequences",
        "model.remat",
        "model.reads_per_group",
        "model.attention",
        "model.implementation",
    }
)
"""Settings that a resumed run may change: they alter neither shapes nor what is computed, except
`steps`, which stretches the schedule of a run that is prolonged. So may all of `mesh` and
`pipeline`, which alter the order of sums and so the rounding."""


class MismatchError(ValueError):
    """The checkpoint belongs to another run."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        workdir: Folder of the run.
        keep: Newest checkpoints to keep.
        read_only: Whether to leave the folder as it is.
    """

    def __init__(self, workdir: str | pathlib.Path, keep: int = 1, *, read_only: bool = False):
        self._directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._keep = keep
        self._read_only = read_only
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        if self._read_only:
            options = ocp.CheckpointManagerOptions(
                read_only=True, create=False, save_interval_steps=0
            )
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, cleanup_tmp_directories=True
            )
        handlers: dict[str, Any] = {
            "state": ocp.StandardCheckpointHandler(),
            "batches": ocp.JsonCheckpointHandler(),
            "config": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first."""
        if self._read_only and not self._directory.exists():
            return []
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, step: int, state: TrainState, batches: Any, description: dict[str, Any]) -> None:
        """Starts to save; returns when the state has been copied and may be donated.

        Args:
            step: Batches seen.
            state: The state after them, in layer order.
            batches: What has given exactly so many batches; has `get_state`.
            description: From `describe`.

        Raises:
            CheckpointError: This save or the one before it failed.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            batches=ocp.args.JsonSave(batches.get_state()),
            config=ocp.args.JsonSave(description),
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def check(self) -> None:
        """Raises the error of a save that failed in the background."""
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error

    def close(self) -> None:
        """Waits until the last save is on disk."""
        try:
            self._manager.close()
        except Exception as error:
            raise self._save_error(error) from error

    def _save_error(self, error: Exception) -> CheckpointError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return CheckpointError(
            f"a checkpoint could not be saved in {self._directory}: {reason}; the checkpoints"
            " before it are intact"
        )

    def newest_description(self) -> dict[str, Any] | None:
        """What `describe` gave for the newest checkpoint where that can be read."""
        items = ocp.args.Composite(config=ocp.args.JsonRestore())
        for step in self.steps():
            try:
                return self._manager.restore(step, args=items)["config"]
            except Exception as error:
                logger.debug("no description in checkpoint %d: %s", step, error)
        return None

    def restore(self, template: TrainState, batches: Any | None) -> TrainState | None:
        """Restores the newest checkpoint that can be read, and the position of the data.

        Args:
            template: Shapes and dtypes of the state, which the checkpoint must have, and shardings,
                which need not be those of the run that saved it.
            batches: What to put in place by `set_state`; None leaves the data out.

        Returns:
            The state, or None if there is no checkpoint at all.

        Raises:
            MismatchError: A shape or a dtype differs; nothing is ever cast.
            CheckpointError: There are checkpoints and none can be read.
        """
        _hide_echoes()
        unreadable = []
        for step in self.steps():
            try:
                self._check_leaves(step, template)
                items: dict[str, Any] = {"state": ocp.args.StandardRestore(template)}
                if batches is not None:
                    items["batches"] = ocp.args.JsonRestore()
                restored = self._manager.restore(step, args=ocp.args.Composite(**items))
                if batches is not None:
                    batches.set_state(restored["batches"])
            except MismatchError:
                raise
            except Exception as error:
                unreadable.append(step)
                logger.warning(
                    "checkpoint %d in %s is incomplete and passed over (%s)",
                    step,
                    self._directory,
                    str(error).splitlines()[0] if str(error) else type(error).__name__,
                )
                continue
            self._move_aside(unreadable)
            return restored["state"]
        if unreadable:
            raise CheckpointError(
                f"none of the checkpoints {unreadable} in {self._directory} is readable"
            )
        return None

    def _check_leaves(self, step: int, template: TrainState) -> None:
        # Orbax would cast to the template's dtype without a word: int32 16777217 to a float32.
        saved = self._manager.item_metadata(step)["state"]
        if saved is None:
            raise ValueError("it has no description of its arrays")
        saved_leaves = _leaves(saved.tree)
        now_leaves = _leaves(template)
        for name in sorted(saved_leaves.keys() | now_leaves.keys()):
            saved_leaf, now_leaf = saved_leaves.get(name), now_leaves.get(name)
            if saved_leaf != now_leaf:
                raise MismatchError(
                    f"{name}: {saved_leaf or 'absent'} in checkpoint {step} of {self._directory},"
                    f" {now_leaf or 'absent'} now"
                )

    def _move_aside(self, steps: list[int]) -> None:
        if not steps or self._read_only:
            return
        self._manager.close()
        if jax.process_index() == 0:
            aside = self._directory.parent / "unreadable_checkpoints"
            aside.mkdir(exist_ok=True)
            for step in steps:
                shutil.rmtree(aside / str(step), ignore_errors=True)
                (self._directory / str(step)).rename(aside / str(step))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("moved aside")
        self._manager = self._open()


@functools.cache
def _hide_echoes() -> None:
    """Hides what Orbax's other readers say to a closed event loop when one of them has failed.

    They say it from threads of their own, long after the failure, so the filter stays.
    """
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook


def _leaves(tree: Any) -> dict[str, str]:
    """Describes every leaf by its path, which is alike for named tuples and for their metadata."""

    def name(path: tuple[Any, ...]) -> str:
        return ".".join(
            str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
            for entry in path
        )

    return {
        name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def describe(config: Config, counts: dict[str, int]) -> dict[str, Any]:
    """What makes a run the same run: its settings, and how much text they found.

    The commit is for the record; a run may go on at another.
    """
    return {"settings": to_json(config), "data": counts, "commit": checkout()}


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to continue a run of other settings, also where all shapes agree.

    Args:
        saved: What `describe` gave for the earlier run.
        now: What it gives now.

    Raises:
        MismatchError: Names every setting that differs and may not.
    """
    workdir = now["settings"]["workdir"]
    absent = object()
    for part, way_out in (
        ("settings", "choose another workdir, or go back to those settings"),
        ("data", "the text has changed; choose another workdir, or restore the files"),
    ):
        before, after = _flatten(saved[part]), _flatten(now[part])
        differing = [
            f"{name}: {before.get(name, 'absent')!r} there, {after.get(name, 'absent')!r} now"
            for name in sorted(before.keys() | after.keys())
            if not _may_change(name) and before.get(name, absent) != after.get(name, absent)
        ]
        if differing:
            raise MismatchError(f"{workdir} holds another run ({'; '.join(differing)}): {way_out}")


def _may_change(name: str) -> bool:
    return name in MAY_CHANGE or name.startswith(("mesh.", "pipeline."))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
