"""The device mesh: five axes, those that communicate least outside.

    stage      pipeline stages: a ring of block representations
    data       replicas that split the batch
    fsdp       the same, with the parameters split as well between steps
    sequence   splits time
    tensor     splits heads, feed-forward width and vocabulary; outside sub-layers, time

A block representation `[b, t, d]` is split over data and fsdp (b), sequence and tensor (t): depth
attention is token by token, so reads need no communication however tokens are spread.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("stage", "data", "fsdp", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp")
SLICE_AXES = ("stage", "data", "fsdp")
"""Axes that may leave a slice, those that communicate least first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; their product is the number of devices.

    Raises:
        ValueError: A size below one.
    """

    stage: int = 1
    """Pipeline stages (P)."""
    data: int | None = None
    """Replicas that split the batch; None takes the devices that the other axes leave."""
    fsdp: int = 1
    """Devices that split the batch, and between steps the parameters and their optimizer state."""
    sequence: int = 1
    """Devices that split every sequence over time."""
    tensor: int = 1
    """Devices that split heads, feed-forward width and vocabulary."""

    def __post_init__(self):
        """Checks each size by itself."""
        for name in AXES:
            size = getattr(self, name)
            if name == "data" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"mesh.{name}: expected a whole number of at least 1, got {size!r}"
                )

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Devices along each axis, outer to inner, for this many devices.

        Raises:
            ValueError: The sizes do not multiply to the number of devices.
        """
        others = math.prod(getattr(self, name) for name in AXES if name != "data")
        data = max(1, num_devices // others) if self.data is None else self.data
        if others * data != num_devices:
            sizes = " x ".join(f"{name}={getattr(self, name)}" for name in AXES if name != "data")
            given = "" if self.data is None else f" x data={self.data}"
            product = others * (1 if self.data is None else self.data)
            way = (
                f"set data={num_devices // others}"
                if num_devices % others == 0
                else f"the axes besides data must divide {num_devices}"
            )
            raise ValueError(
                f"mesh: {sizes}{given} is {product}, but there are {num_devices} devices; {way}"
            )
        return {name: data if name == "data" else getattr(self, name) for name in AXES}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays out the devices so that inner axes have the fastest links.

    Args:
        config: Sizes of the axes.
        devices: All devices of all processes by default; or those of a described topology.

    Raises:
        ValueError: The sizes do not fit the devices, or not the slices that they are on.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.sizes(len(devices))
    # Automatic axes: inside the pipeline all are manual, outside the compiler places the sums.
    return Mesh(device_grid(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(sizes: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Arranges devices in the shape of the mesh.

    Where the devices are on several slices, which only a slower network joins, stage is split over
    them first, then data, then fsdp; the other axes do not leave a slice.

    Raises:
        ValueError: These axes cannot be split over the slices.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        )
    over_slices, rest = dict.fromkeys(sizes, 1), slices
    for name in SLICE_AXES:
        over_slices[name] = math.gcd(sizes[name], rest)
        rest //= over_slices[name]
    if rest > 1:
        given = " times ".join(f"{name}={sizes[name]}" for name in SLICE_AXES)
        raise ValueError(
            f"mesh: {given} cannot be split over the {slices} slices that the devices are on; make"
            f" one of these axes a multiple of {slices}"
        )
    within = tuple(size // over_slices[name] for name, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(
        within, tuple(over_slices.values()), devices, allow_split_physical_axes=True
    )
