"""Where every array lies: one table from axis letters to mesh axes, and one of the letters."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "b": ("data", "fsdp"),
    "t": ("sequence",),
    "p": ("stage",),
    "d": ("fsdp",),
    "h": ("tensor",),
    "g": ("tensor",),
    "f": ("tensor",),
    "v": ("tensor",),
}
"""Mesh axes of each axis letter of parameters and of token ids; other letters are not split."""

_LETTERS = {
    "embedding_table": "vd",
    "head_kernel": "dv",
    "query_kernel": "ldhk",
    "key_kernel": "ldgk",
    "value_kernel": "ldgk",
    "output_kernel": "lhkd",
    "gate_kernel": "ldf",
    "up_kernel": "ldf",
    "down_kernel": "lfd",
    "gain": "ld",
    "query": "ld",
}
_SINGLE = ("final_read", "final_norm")  # Modules with one vector, not one for each layer.


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names in a key path of a parameter, such as ("attention", "query_kernel")."""
    keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    return tuple(key for key in keys if isinstance(key, str) and key != "value")


def axis_letters(path: tuple[Any, ...]) -> str:
    """Axis letters of a parameter of `TransformerLM` in pipeline layout.

    There, "l" stands behind "c" and "p": the chunks of a stage, the stages, and the layers of a
    chunk; see `attnres_jax.parallel.layout`.

    Raises:
        KeyError: The model has no such parameter.
    """
    names = names_of(path)
    if names[-1] not in _LETTERS:
        raise KeyError(
            f"parameter {'.'.join(names)}: no axis letters are known for it; parameters are"
            f" {', '.join(_LETTERS)}"
        )
    letters = _LETTERS[names[-1]]
    return letters.removeprefix("l") if names[0] in _SINGLE else letters.replace("l", "cpl")


def partition_spec(
    letters: str, *, name: str, rules: dict[str, tuple[str, ...]] = RULES
) -> PartitionSpec:
    """Looks up the mesh axes of each axis letter.

    Args:
        letters: One letter an axis.
        name: What is sharded, for the error.
        rules: Mesh axes of each letter.

    Raises:
        ValueError: Two axes of the array would be split over one mesh axis.
    """
    owner: dict[str, str] = {}
    for letter in letters:
        for axis in rules.get(letter, ()):
            if axis in owner:
                raise ValueError(
                    f"{name} [{', '.join(letters)}]: axes {owner[axis]} and {letter} are both split"
                    f" over mesh axis {axis!r}; an array can be split over it once"
                )
            owner[axis] = letter
    return PartitionSpec(*(rules.get(letter, ()) or None for letter in letters))


def parameter_specs(params: Any) -> Any:
    """`PartitionSpec` of every parameter in pipeline layout; a pytree like `params`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: partition_spec(axis_letters(path), name=f"parameter {_dotted(path)}"),
        params,
    )


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """Shardings of parameters in pipeline layout, once every split is known to come out even.

    Args:
        params: Arrays, or their shapes from `jax.eval_shape`.
        mesh: From `make_mesh`.

    Returns:
        A pytree of `NamedSharding` like `params`.

    Raises:
        ValueError: An axis of a parameter is not a multiple of the devices that split it.
    """

    def sharding(path, leaf):
        letters = axis_letters(path)
        spec = partition_spec(letters, name=f"parameter {_dotted(path)}")
        check_divisible(f"parameter {_dotted(path)}", letters, leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)


def check_divisible(name: str, letters: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Raises ValueError, naming array and axis, unless all devices get equal shares of it."""
    for letter, size in zip(letters, shape, strict=True):
        axes = RULES.get(letter, ())
        devices = 1
        for axis in axes:
            devices *= mesh.shape[axis]
        if size % devices:
            over = " and ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{name}: axis {letter} has {size} entries, which {over} of the mesh cannot split"
                f" evenly; make it a multiple of {devices}, or the mesh smaller there"
            )


def sharded_init(init: Callable[[], Any], mesh: Mesh) -> tuple[Any, Any]:
    """Creates parameters where they belong: no device ever holds them all.

    Args:
        init: Returns parameters in pipeline layout. It is traced for their shapes first.
        mesh: From `make_mesh`.

    Returns:
        The parameters, and their shardings.

    Raises:
        ValueError: See `parameter_shardings`; raised before anything is compiled.
    """
    shardings = parameter_shardings(jax.eval_shape(init), mesh)
    return jax.jit(init, out_shardings=shardings)(), shardings


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(names_of(path))
