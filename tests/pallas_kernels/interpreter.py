"""Running the Triton kernels in numpy, with Triton's interpreter.

Import the kernels' modules under `interpreted()`, then hand `launch` to them in place of the
function of that name that compiles for a GPU. For programs that name implementation="triton_gpu",
call `load` when tests are collected, and `use` in each of them.
"""

import contextlib
import importlib
import importlib.util
import os
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest


@contextlib.contextmanager
def interpreted():
    """Kernels that are decorated in here run in the interpreter; skips where triton is missing.

    Triton's own functions count too, so it must not have been imported before.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: uv run --group aot pytest", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401  The interpreter would import it too late.

        _round_as_gpus_do()
        _multiply_bfloat16()
        yield
    finally:
        # Not for the processes that other tests start, which compile kernels.
        del os.environ["TRITON_INTERPRET"]


def _round_as_gpus_do():
    """Rounds float32 to the nearest bfloat16, ties to even: the interpreter truncates."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, dtype, to_dtype, rounding):
        if str(dtype) == "fp32" and str(to_dtype) == "bf16":
            return data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(data, dtype, to_dtype, rounding)

    interpreter._convert_float = convert_float


def _multiply_bfloat16():
    """Lets products take bfloat16, of which the interpreter would multiply the bits."""
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        if str(x.dtype) != "bf16":
            return x
        data = x.data.view(ml_dtypes.bfloat16).astype(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def dot(self, a, b, *arguments):
        return create_dot(self, widened(a), widened(b), *arguments)

    interpreter.InterpreterBuilder.create_dot = dot


class Pointer:
    """What the interpreter wants to know of an array; bfloat16 is kept as its bits."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape = array.shape
        self.dtype = str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.data_ptr() == self.data_ptr()

    def new_empty(self, *_, **__):
        return Pointer(self.array)

    def set_(self, *_):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def element_size(self):
        return self.array.itemsize


def launch(
    kernel,
    *,
    inputs,
    outputs,
    constants,
    grid,
    updated=None,
    unused=(),
    name,
    num_warps,
    compute_capability,
    num_stages=1,
    wrap=jnp.asarray,
):
    """Like `triton_launch.launch`, eagerly, on the CPU; outputs start as NaN."""
    del name, num_warps, compute_capability, num_stages
    written = {key: np.full(shape, np.nan, dtype) for key, (shape, dtype) in outputs.items()}
    changed = {key: tuple(np.array(x) for x in group) for key, group in (updated or {}).items()}
    arguments = {**inputs, **written, **changed, **dict.fromkeys(unused)}
    missing = set(kernel.arg_names) ^ {*arguments, *constants}
    assert not missing, f"parameters and arguments differ: {missing}"
    with np.errstate(over="ignore"):  # A sigmoid may pass through infinity.
        kernel[grid](**{key: _pointers(x) for key, x in arguments.items()}, **constants)
    return {key: jax.tree.map(wrap, x) for key, x in (written | changed).items()}


_ONE_AT_A_TIME = threading.Lock()  # The interpreter keeps where it is in global variables.


def launch_later(kernel, *, inputs, outputs, updated=None, **settings):
    """Like `launch`, in programs that are traced: it runs when they do."""
    leaves, structure = jax.tree.flatten((inputs, updated or {}))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    written = {key: jax.ShapeDtypeStruct(*shape) for key, shape in outputs.items()}
    changed = {
        key: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group)
        for key, group in (updated or {}).items()
    }

    def run(*arrays):
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = np.asarray(array)
        given, overwritten = jax.tree.unflatten(structure, filled)
        # XLA's threads flush subnormal numbers to zero, whose logarithm nobody reads.
        with _ONE_AT_A_TIME, np.errstate(divide="ignore", invalid="ignore"):
            return launch(
                kernel,
                inputs=given,
                outputs=outputs,
                updated=overwritten,
                **settings,
                wrap=np.asarray,
            )

    return jax.pure_callback(run, written | changed, *(leaves[i] for i in places))


KERNELS = ["triton_launch", *(f"{x}.triton_gpu" for x in ("inter_block", "merge", "single_phase"))]


def load():
    """Imports all kernels for the interpreter, if triton is there."""
    if importlib.util.find_spec("triton") is not None:
        with interpreted():
            for name in KERNELS:
                importlib.import_module(f"pallas_kernels.{name}")


def use(monkeypatch, launch=launch_later):
    """Lets implementation="triton_gpu" run here, as on an H200; skips where triton is missing."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: uv run --group aot pytest")
    from pallas_kernels import gpus

    for name in KERNELS:
        monkeypatch.setattr(importlib.import_module(f"pallas_kernels.{name}"), "launch", launch)
    monkeypatch.setattr(gpus, "compute_capability", lambda: 90)


def _pointers(argument):
    if isinstance(argument, tuple):
        return tuple(_pointers(x) for x in argument)
    if isinstance(argument, (jax.Array, np.ndarray)):
        return Pointer(np.asarray(argument))
    return argument
