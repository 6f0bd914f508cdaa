"""What a compiled TPU kernel issues in one step of its grid, read from the compiler's own text.

The compiler packs a kernel into bundles, of which a core issues at most one in a cycle, and plans
empty ones where results are not there yet. Loops and conditional code stand in that text once; how
often each part runs follows from the kernel's scalar program. What cannot be followed is an error,
never an estimate.
"""

import dataclasses
import pathlib
import re
from collections import Counter

from benchmarks.scalar_program import Program

PASSES = r"packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization|post-delay-converter"
"""Labels of the compiler's passes that must be dumped: a regular expression."""

_ALLOCATION = re.compile(r"#(allocation\w+) \[[^\n]*?space=vmem, size = (0x[0-9a-f]+)")


@dataclasses.dataclass(frozen=True)
class Step:
    """What one core issues in a full step of the grid, all loops multiplied out.

    Attributes:
        bundles: Bundles that hold an instruction.
        stalls: Empty bundles, in which the core waits for a result that takes longer.
        slots: Slots that each kind of instruction takes, in these bundles and in stalls.
        capacity: Slots of one bundle that each kind may take.
    """

    bundles: int
    stalls: int
    slots: dict[str, int]
    capacity: dict[str, int]

    @property
    def busiest(self) -> tuple[str, float]:
        """The kind of instruction whose slots are fullest, and the share of them that it takes."""
        # An instruction may take its slot for longer than its own bundle, through stalls.
        cycles = self.bundles + self.stalls
        shares = {k: n / (self.capacity[k] * cycles) for k, n in self.slots.items()}
        kind = max(shares, key=shares.__getitem__)
        return kind, shares[kind]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled kernel.

    Attributes:
        step: One full step of the grid.
        cores: Cores of the device that take a part in the grid.
        vmem_bytes: VMEM that is allocated: windows, scratch and spilled registers.
    """

    step: Step
    cores: int
    vmem_bytes: int


def read(folder: pathlib.Path, kernel: str, *, cores: int) -> Schedule:
    """Reads the dump of one kernel.

    Args:
        folder: Where the compiler put it (`--xla_jf_dump_to`), with nothing else of this name.
        kernel: Name of the kernel.
        cores: Cores that the device has.

    Raises:
        ValueError: There is not one such kernel, or its schedule cannot be followed.
    """
    bundles, units, passes = (_only(folder, kernel, label) for label in PASSES.split("|"))
    program = Program(bundles)
    capacity, rows = read_utilization(units)
    if len(rows) != len(program.is_empty):
        raise ValueError(
            f"{kernel}: {len(program.is_empty)} bundles, but the use of units in {len(rows)}"
        )
    by_core = [program.steps(core) for core in range(cores)]
    working = [steps for steps in by_core if steps]
    if not working:
        raise ValueError(f"{kernel}: no core enters the grid's loop")
    counts = full_step(working[0])
    stalls = sum(n for n, empty in zip(counts, program.is_empty, strict=True) if empty)
    slots = {
        kind: sum(n * row[i] for n, row in zip(counts, rows, strict=True) if n)
        for i, kind in enumerate(capacity)
    }
    vmem = dict(_ALLOCATION.findall(passes))
    return Schedule(
        Step(sum(counts) - stalls, stalls, slots, capacity),
        len(working),
        sum(int(size, 16) for size in vmem.values()),
    )


def _only(folder: pathlib.Path, kernel: str, label: str) -> str:
    pattern = re.compile(rf"\d+-{re.escape(kernel)}(\.\d+)?-\d+-{re.escape(label)}\.txt")
    found = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    if len(found) != 1:
        raise ValueError(
            f"{kernel}: expected one dump of the pass {label}, found {len(found)}; other versions"
            " of libtpu may name their passes differently"
        )
    return found[0].read_text()


def read_utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """Reads the slots of each unit: how many a bundle has, and how many each bundle uses."""
    head, _, body = text.partition("== UTILIZATION:\n")
    _, names, numbers = head.strip().split("\n")
    kinds = [name.strip() for name in names.split(",")]
    capacity = dict(zip(kinds, map(int, numbers.split()), strict=True))
    return capacity, [[int(n) for n in line.split()] for line in body.strip().split("\n")]


def full_step(steps: list[list[int]]) -> list[int]:
    """Returns how often each bundle runs in the steps that are like most others.

    The first and last steps of a grid fetch or write back less, or set up sums; a last one may
    hold fewer rows.
    """
    counts, times = Counter(map(tuple, steps)).most_common(1)[0]
    if times < 2:
        raise ValueError(
            f"no two of the grid's {len(steps)} steps are alike; compile it for more tokens"
        )
    return list(counts)
