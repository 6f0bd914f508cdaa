"""What the launchers of phase 1 are told."""

import dataclasses
from typing import Any, Literal

import jax

Values = tuple[jax.Array, ...] | jax.Array
"""n arrays `[t, d]`, or a bank `[n, t, d]`."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        implementation: Whose kernels.
        eps: Added to the mean square of each source.
        tiling: That of the accelerator's kernels; None chooses it.
        interpret: Passed to `pallas_call`.
    """

    implementation: Literal["mosaic_tpu", "triton_gpu"]
    eps: float
    tiling: Any
    interpret: Any
