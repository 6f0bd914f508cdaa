"""Pods and clusters described by name, and the published figures of their chips.

A TPU slice is NAME:AxB or NAME:AxBxC, chips along each side of its torus, such as v5p:4x4x4. GPUs
are NAME:COUNT, such as h200:64, eight in a node.

References:
    https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of each version.
    NVIDIA H100 and H200 data sheets, without sparsity.
"""

import dataclasses
import difflib
import importlib.util
import math
import os
import pathlib
import re
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What one chip has, by its maker's figures.

    Attributes:
        sides: Sides of a TPU slice's torus; 0 for GPUs.
        memory: Bytes of HBM.
        flops: bfloat16 operations a second.
        memory_bandwidth: Bytes a second from and to HBM.
        exchange_bandwidth: Bytes a second that a chip takes in over its fastest links.
        examples: Topologies, to show when a name is refused.
    """

    sides: int
    memory: int
    flops: float
    memory_bandwidth: float
    exchange_bandwidth: float
    examples: tuple[str, ...]


_GIB = 2**30
CHIPS = {
    "v4": Chip(
        sides=3,
        memory=32 * _GIB,
        flops=275e12,
        memory_bandwidth=1228e9,
        exchange_bandwidth=300e9,
        examples=("v4:2x2x1", "v4:2x2x4", "v4:4x4x4"),
    ),
    "v5e": Chip(
        sides=2,
        memory=16 * _GIB,
        flops=197e12,
        memory_bandwidth=819e9,
        exchange_bandwidth=200e9,
        examples=("v5e:2x2", "v5e:4x4", "v5e:16x16"),
    ),
    "v5p": Chip(
        sides=3,
        memory=95 * _GIB,
        flops=459e12,
        memory_bandwidth=2765e9,
        exchange_bandwidth=600e9,
        examples=("v5p:2x2x1", "v5p:4x4x4", "v5p:4x4x8"),
    ),
    "v6e": Chip(
        sides=2,
        memory=32 * _GIB,
        flops=918e12,
        memory_bandwidth=1640e9,
        exchange_bandwidth=448e9,
        examples=("v6e:2x2", "v6e:4x4", "v6e:16x16"),
    ),
    "tpu7x": Chip(
        sides=3,
        memory=192 * _GIB,
        flops=2307e12,
        memory_bandwidth=7380e9,
        exchange_bandwidth=1200e9,
        examples=("tpu7x:2x2x1", "tpu7x:4x4x4"),
    ),
    "h100": Chip(
        sides=0,
        memory=80 * 10**9,
        flops=989e12,
        memory_bandwidth=3350e9,
        exchange_bandwidth=450e9,
        examples=("h100:8", "h100:64"),
    ),
    "h200": Chip(
        sides=0,
        memory=141 * 10**9,
        flops=989e12,
        memory_bandwidth=4800e9,
        exchange_bandwidth=450e9,
        examples=("h200:8", "h200:64"),
    ),
}
GPUS_IN_A_NODE = 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """A named slice or cluster.

    Attributes:
        name: As it was given.
        chip: What each of its chips has.
        shape: Chips along each side, or the number of GPUs alone.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        """Whether they are TPUs, else GPUs."""
        return self.chip.sides > 0


def parse_topology(name: str) -> Topology:
    """Reads the name of a topology.

    Raises:
        ValueError: There is no such chip, or the shape does not follow the rule.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name.lower())
    kind = match[1] if match else re.split(r"[:\-_]", name.lower())[0]
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=2, cutoff=0.3) or list(CHIPS)
        examples = [example for one in near for example in CHIPS[one].examples]
        raise ValueError(
            f"topology: there is no chip {kind!r} in {name!r}; near: {', '.join(examples)}; known:"
            f" {', '.join(CHIPS)}. {_RULE}"
        )
    chip = CHIPS[kind]
    near = ", ".join(chip.examples)
    if match is None:
        raise ValueError(
            f"topology: {name!r} has no shape after a colon (a number after a dash, as in the names"
            f" of machine types, counts cores or chips and is none); near: {near}. {_RULE}"
        )
    shape = tuple(int(size) for size in match[2].split("x"))
    if len(shape) != max(chip.sides, 1) or 0 in shape:
        wanted = f"{chip.sides} sides" if chip.sides else "one number"
        raise ValueError(f"topology: {name!r}: {kind} takes {wanted}; near: {near}. {_RULE}")
    if not chip.sides and shape[0] > GPUS_IN_A_NODE and shape[0] % GPUS_IN_A_NODE:
        raise ValueError(
            f"topology: {name!r}: {shape[0]} GPUs do not fill nodes of {GPUS_IN_A_NODE}; take"
            f" {kind}:{-(-shape[0] // GPUS_IN_A_NODE) * GPUS_IN_A_NODE}. {_RULE}"
        )
    return Topology(name.lower(), chip, shape)


_RULE = (
    "TPU slices are NAME:AxB for v5e and v6e and NAME:AxBxC for v4, v5p and tpu7x, chips along each"
    " side; GPUs are NAME:COUNT"
)


def described_devices(topology: Topology) -> list[Any]:
    """Devices that programs can be compiled for, and on which nothing can run.

    Raises:
        ValueError: The compiler is not installed, or knows no such topology.
    """
    module, what = ("libtpu", "TPU") if topology.is_tpu else ("jax_cuda13_plugin", "CUDA")
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"the {what} compiler is not installed; uv run --group aot python -m train.plan ... has"
            " it"
        )
    from jax.experimental import topologies

    if topology.is_tpu:
        # Read when the compiler is loaded: there is no TPU to ask, and others may be compiling.
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3"}
        os.environ |= {"TPU_STDERR_LOG_LEVEL": "3"}
        settings = {"platform": "tpu", "topology_name": topology.name}
    else:
        _find_assembler()
        nodes = -(-topology.chips // GPUS_IN_A_NODE)
        settings = {
            "platform": "cuda",
            "target_config": _gpu(topology),
            "topology": f"1x{nodes}x{topology.chips // nodes}",
        }
    try:
        return list(topologies.get_topology_desc(**settings).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology: the compiler refuses {topology.name}: {str(error).splitlines()[0]}; near:"
            f" {', '.join(topology.chip.examples)}. {_RULE}"
        ) from error


def _find_assembler() -> None:
    """Puts the ptxas of the installed packages, which is new enough, before the system's."""
    package = importlib.util.find_spec("nvidia.cu13")
    for root in package.submodule_search_locations or () if package else ():
        if (folder := pathlib.Path(root) / "bin").is_dir():
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _gpu(topology: Topology) -> str:
    """A Hopper GPU as XLA's GpuTargetConfigProto."""
    name = f"NVIDIA {topology.name.split(':')[0].upper()}"
    return f"""
        gpu_device_info {{
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152 shared_memory_per_core: 233472
          shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
          device_memory_size: {topology.chip.memory}
          memory_bandwidth: {topology.chip.memory_bandwidth:.0f}
          cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{name}"
    """
