"""Kernels under sharding: each device runs them on its own tokens, with the width whole.

The compiler cannot partition a kernel, so it is called inside `jax.shard_map`. Which axis of the
mesh cuts which dimension cannot be seen from inside a traced program, so it goes by their names.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

SEQUENCE_AXIS = "sequence"
"""Mesh axis that cuts the last dimension before the width: time."""
WHOLE_AXES = ("stage", "tensor")
"""Mesh axes along which the tokens are whole."""


def token_axes(shape: tuple[int, ...]) -> PartitionSpec | None:
    """How arrays `[..., d]` of this shape are cut by the mesh in context.

    Args:
        shape: Of an array whose last dimension is the width.

    Returns:
        A spec for the dimensions before the width, or None where nothing has to be cut: no mesh,
        or inside a `jax.shard_map` over it.

    Raises:
        ValueError: A dimension is not a multiple of the devices that it is spread over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    ]
    if math.prod(mesh.shape[name] for name in automatic) == 1:
        return None
    sequence = [name for name in automatic if name == SEQUENCE_AXIS and len(shape) > 2]
    batch = [name for name in automatic if name not in (SEQUENCE_AXIS, *WHOLE_AXES)]
    spec: list[Any] = [None] * (len(shape) - 1)
    for dimension, names in ((0, batch), (len(shape) - 2, sequence)):
        if names and spec:
            devices = math.prod(mesh.shape[name] for name in names)
            if shape[dimension] % devices:
                raise ValueError(
                    f"sources: dimension {dimension} of {list(shape)} is not a multiple of the"
                    f" {devices} devices of mesh axes {names}; pad it, or use another mesh"
                )
            spec[dimension] = tuple(names)
    return PartitionSpec(*spec)


def on_each_device(
    function: Callable, spec: PartitionSpec | None, in_specs: Any, out_specs: Any
) -> Callable:
    """Wraps `function` in a `jax.shard_map`, unless `spec` is None."""
    if spec is None:
        return function
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return lambda *arguments: mapped(*reshard(arguments, in_specs))


def reshard(arrays: Any, specs: Any) -> Any:
    """Cuts arrays as `jax.shard_map` wants them where their types hold how they are cut.

    Args:
        arrays: Any tree of them.
        specs: A tree of specs, each for an array or for all of a subtree.

    Returns:
        The arrays; unchanged where the compiler decides how they are cut.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return arrays

    def reshard_all(spec, part):
        return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), part)

    return jax.tree.map(reshard_all, specs, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec))


def sum_over_tokens(x: Any, spec: PartitionSpec | None) -> Any:
    """Inside `on_each_device`: adds up what each device found on its tokens."""
    # A spec holds the name itself where one axis alone cuts a dimension.
    parts = [(part,) if isinstance(part, str) else part for part in spec or () if part]
    names = tuple(name for part in parts for name in part)
    return jax.lax.psum(x, names) if names else x
