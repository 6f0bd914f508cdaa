"""What the launchers of phase 2, and of single reads, are told."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        implementation: Whose kernels.
        eps: Added to the mean square of what the query reads.
        norm_eps: Added to the mean square of the read.
        tiling: That of the accelerator's kernels; None chooses it.
        interpret: Passed to `pallas_call`.
    """

    implementation: Literal["mosaic_tpu", "triton_gpu"]
    eps: float
    norm_eps: float
    tiling: Any
    interpret: Any
