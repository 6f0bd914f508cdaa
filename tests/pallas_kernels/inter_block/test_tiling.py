"""The planner's tiles fit into vector memory, and are the best of those."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chips import UNKNOWN, Chip
from pallas_kernels.inter_block import mosaic_tpu, tiling
from pallas_kernels.inter_block.tiling import Shape, Tiling, choose, window_bytes
from tests.pallas_kernels.programs import launches

KIB, MIB = 2**10, 2**20
KINDS = ("forward", "backward")
MEMORIES = [48 * KIB, 512 * KIB, 2 * MIB, 16 * MIB, 64 * MIB, 128 * MIB]
SHAPES = [
    Shape(*shape, itemsize=itemsize)
    for shape in [
        (1, 1, 1, 1),
        (9, 4, 8192, 1168),
        (9, 12, 8192, 2048),
        (10, 6, 8192, 2304),
        (9, 24, 8192, 7168),
        (16, 24, 129, 100),
        (48, 8, 8192, 2048),
    ]
    for itemsize in (2, 4)
]


def chip(vmem_bytes):
    return dataclasses.replace(UNKNOWN, vmem_bytes=vmem_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_fit_and_more_memory_makes_none_smaller(kind, shape):
    previous = 0
    for vmem_bytes in MEMORIES:
        tile = choose(kind, shape, chip(vmem_bytes))
        fitting = [
            tokens
            for tokens in tiling.TOKENS
            if window_bytes(kind, tokens, shape) <= 0.85 * vmem_bytes
        ]
        assert (tile is None) == (not fitting)
        if tile is None:
            assert previous == 0
            continue
        assert tile.tokens in fitting
        assert previous <= tile.tokens <= max(128, shape.t)
        assert tile.vmem_bytes <= vmem_bytes
        previous = tile.tokens
    assert previous, "128 MiB hold any of these"


@pytest.mark.parametrize("kind", KINDS)
def test_little_memory_makes_tiles_smaller_and_none_makes_none(kind):
    shape = Shape(9, 12, 8192, 2048, itemsize=2)
    tiles = [choose(kind, shape, chip(memory)) for memory in MEMORIES]
    tokens = [tile.tokens if tile else None for tile in tiles]
    assert tokens[:2] == [None, None] and tokens[-1] >= 128
    assert 16 <= (tokens[3] or 16) < tokens[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", ["n", "s", "d", "itemsize"])
def test_larger_shapes_take_more_memory(kind, more):
    shape = Shape(9, 12, 8192, 2048, itemsize=2)
    larger = dataclasses.replace(shape, **{more: 2 * getattr(shape, more)})
    assert window_bytes(kind, 128, larger) > window_bytes(kind, 128, shape)
    assert window_bytes(kind, 256, shape) > window_bytes(kind, 128, shape)


def held_bytes(launch):
    """Windows, each held twice, and scratch, in registers of 4 KiB: 128 lanes of 32 bits."""

    def padded(shape, dtype):
        *leading, rows, lanes = (1, *shape)
        rows_of_register = 32 // dtype.itemsize
        registers = math.ceil(rows / rows_of_register) * math.ceil(lanes / 128)
        return math.prod(leading) * registers * 4 * KIB

    grid = launch.params["grid_mapping"]
    windows = [
        padded([size.block_size for size in block.block_shape], block.array_aval.dtype)
        for block in grid.block_mappings
    ]
    scratch = [v.aval for v in launch.params["jaxpr"].invars[-grid.num_scratch_operands :]]
    return 2 * sum(windows) + sum(padded(x.shape, x.dtype) for x in scratch)


@pytest.mark.parametrize("tokens", [16, 128, 256])
@pytest.mark.parametrize(
    "n, s, d, dtype, carried",
    [
        (1, 1, 1, jnp.float32, False),
        (9, 12, 2048, jnp.bfloat16, False),
        (9, 4, 1168, jnp.float32, True),
        (2, 24, 100, jnp.bfloat16, True),
        (17, 3, 256, jnp.bfloat16, False),
        (5, 8, 7168, jnp.bfloat16, False),
    ],
)
def test_windows_are_counted_as_the_kernels_hold_them(n, s, d, dtype, carried, tokens):
    t, tile = 512, Tiling(tokens, 1024, 1024, 1, MIB, 128)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    values, folded = (array(t, d, dtype=dtype),) * n, array(s, d)
    carry = ((array(t, d),) * s, array(s, t)) if carried else None

    def forward(values, folded, carry):
        dtype = jnp.float32 if carried else None
        return mosaic_tpu.forward(
            values, folded, tiling=tile, eps=1e-6, carry=carry, out_dtype=dtype
        )

    def backward(values, folded, doutputs, dlogits):
        statistics = array_of(folded, s, t), dlogits, array_of(folded, n, t)
        return mosaic_tpu.backward(
            values,
            folded,
            *statistics,
            doutputs,
            statistics[0],
            tiling=tile,
            dlogits_snt=dlogits,
            dvalues=values,
        )

    def array_of(like, *shape):
        return jnp.zeros(shape, like.dtype)

    shape = Shape(n, s, t, d, jnp.dtype(dtype).itemsize, carried)
    (launch,) = launches(forward, values, folded, carry)
    held = held_bytes(launch)
    assert held <= window_bytes("forward", tokens, shape) <= 1.5 * held + MIB
    (launch,) = launches(backward, values, folded, (values[0],) * s, array(s, n, t))
    held = held_bytes(launch)
    assert held <= window_bytes("backward", tokens, shape) <= 1.5 * held + MIB


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": 0}, "tokens: .* got 0"),
        ({"tokens": -128}, "tokens: .* got -128"),
        ({"tokens": 8}, "tokens: .* got 8"),
        ({"tokens": 48}, "tokens: expected 16, 32, 64 or a multiple of 128 .* got 48"),
        ({"tokens": 192}, "tokens: .* got 192"),
        ({"contracted": 0}, "contracted: expected a multiple of 128 columns, got 0"),
        ({"contracted": 200}, "contracted: .* got 200"),
        ({"finished": 64}, "finished: .* got 64"),
        ({"finished": -128}, "finished: .* got -128"),
        ({"unroll": 0}, "unroll: .* got 0"),
        ({"unroll": 17}, "unroll: expected a divisor of 16, the groups of 8 tokens, got 17"),
        ({"unroll": 3}, "unroll: .* got 3"),
        ({"tokens": 16, "unroll": 4}, "unroll: expected a divisor of 2, the groups"),
    ],
    ids=str,
)
def test_an_override_that_no_kernel_can_run_is_refused(changes, message):
    right = {
        "tokens": 128,
        "contracted": 128,
        "finished": 128,
        "unroll": 1,
        "vmem_bytes": MIB,
        "matrix_width": 128,
    }
    Tiling(**right)
    with pytest.raises(ValueError, match=message):
        Tiling(**right | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_launch_may_hold_is_bounded(kind):
    shape = Shape(tiling.MAX_SOURCES, 1, 8192, 128, itemsize=2)
    assert choose(kind, shape, UNKNOWN) is not None
    assert choose(kind, dataclasses.replace(shape, n=tiling.MAX_SOURCES + 1), UNKNOWN) is None


@pytest.mark.parametrize("d", [1, 127, 128, 1168, 2048, 2304, 7168, 100_000])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_whole_registers(kind, d):
    tile = choose(kind, Shape(2, 1, 8192, d, itemsize=2), Chip(2**40, 256, 2))
    assert tile is not None and tile.matrix_width == 256
    assert tile.contracted % 128 == tile.finished % 128 == 0
    # Only what does not fill a register is left for a last, narrower product.
    assert d < 128 or (d // 128 * 128) % tile.contracted == 0
