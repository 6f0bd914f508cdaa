"""A GPU that is described, not there: XLA compiles for it, nothing runs."""

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Published figures of an H200, in the form of XLA's GpuTargetConfigProto.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def h200_devices() -> list[jax.Device]:
    """Returns one such GPU."""
    return topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology="1x1x1"
    ).devices


def h200() -> NamedSharding:
    """Returns the sharding of arrays on one such GPU."""
    return NamedSharding(Mesh(np.array(h200_devices()), ("gpu",)), PartitionSpec())
