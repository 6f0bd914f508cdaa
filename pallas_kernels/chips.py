"""What the tile planners must know of a TPU."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation.

    Attributes:
        vmem_bytes: Vector memory of one core.
        matrix_width: Rows and columns of its matrix unit.
        cores: Cores that run one kernel together.
    """

    vmem_bytes: int
    matrix_width: int
    cores: int


UNKNOWN = Chip(vmem_bytes=64 * 2**20, matrix_width=128, cores=1)
"""The least since v5e, for programs that are traced without a TPU in context."""


def current() -> Chip | None:
    """Returns the TPU of the mesh in context, or else of the default device; None if it is none."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:  # The device is not a TPU.
        return None
    return Chip(info.vmem_capacity_bytes, info.mxu_column_size, info.num_cores)
