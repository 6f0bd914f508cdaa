"""Chooses between XLA and the kernels of the accelerator that the program is for."""

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax

Implementation = Literal["xla", "mosaic_tpu", "triton_gpu"]
"""What computes an operation: XLA, Pallas kernels for TPUs, or Triton kernels for GPUs."""

NAMES = ("xla", "mosaic_tpu", "triton_gpu")
_BEST: dict[str, Implementation] = {"tpu": "mosaic_tpu", "gpu": "triton_gpu", "cuda": "triton_gpu"}
_logger = logging.getLogger("attnres_jax")


def choose_implementation(
    implementation: Implementation | None, reason_against: Callable[[str], str | None]
) -> Implementation:
    """Returns what will compute an operation.

    Args:
        implementation: A name, or None for the best one that can.
        reason_against: Says why the named kernels cannot compute it here, or None if they can.

    Returns:
        The name itself; for None, the kernels of the accelerator, or "xla" with one log line that
        says why not.

    Raises:
        ValueError: The name does not exist, or its kernels cannot compute this.
    """
    if implementation == "xla":
        return "xla"
    if implementation is None:
        best = _BEST.get(_platform())
        if best is None:
            return "xla"
        reason = _reason_without_mesh() or reason_against(best)
        if reason is not None:
            _log_once(f"depth attention runs through XLA, not {best}: {reason}")
            return "xla"
        return best
    if implementation not in NAMES:
        raise ValueError(
            f"implementation: expected one of {', '.join(NAMES)}, or None for the best that the"
            f" accelerator has; got {implementation!r}"
        )
    reason = reason_against(implementation)
    if reason is not None:
        raise ValueError(
            f'implementation="{implementation}": {reason}; implementation="xla" has no such limit,'
            " and None takes whichever can"
        )
    return implementation


def _platform() -> str:
    """The kind of device that the program in trace is for."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.platform if described is not None else jax.default_backend()


def _reason_without_mesh() -> str | None:
    if jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1:
        return (
            "the compiler cannot partition kernels, and of this process's devices no mesh is in"
            " context; enter jax.set_mesh(mesh)"
        )
    return None


@functools.cache
def _log_once(message: str) -> None:
    _logger.warning(message)
