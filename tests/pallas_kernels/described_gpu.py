"""A GPU that is described, not there: XLA compiles for it, nothing runs."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.topology import described_devices, parse_topology


def h200_devices() -> list[jax.Device]:
    """Returns one such GPU."""
    return described_devices(parse_topology("h200:1"))


def h200() -> NamedSharding:
    """Returns the sharding of arrays on one such GPU."""
    return NamedSharding(Mesh(np.array(h200_devices()), ("gpu",)), PartitionSpec())
