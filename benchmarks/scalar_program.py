"""Carries out the scalar program of a compiled TPU kernel: which bundles run, and how often.

Step numbers, loop counters, comparisons and branches depend on no data. What does, vectors above
all, is left out, and an unknown value that a branch depends on is an error.

The text is the compiler's, after it has assigned registers: a bundle a line, with its address.
Values have a name of their own, as in `%s11_s0 = sadd.s32 1, %s10_s0`, where s0 is the register.
"""

import bisect
import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Callable

_MASK = 2**32 - 1
_MOST_STOPS = 10**6
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:(%\w+) = )?([a-z][\w.]*) *(.*)", re.DOTALL)
_PREDICATE = re.compile(r" *\((!?)(%p\w+)(?:, (%\w+))?\),?")
_CORE_INDEX = re.compile(r"sld (\[smem:\[#\w+\]\]) */\*[^*]*core id")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    result: str
    name: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    otherwise: str | None


@dataclasses.dataclass(frozen=True)
class _Branch:
    address: int
    target: int


class Program:
    """The bundles of a kernel and the scalar instructions in them."""

    def __init__(self, text: str):
        starts = list(_BUNDLE.finditer(text))
        ends = [start.start() for start in starts[1:]] + [len(text)]
        self.is_empty: list[bool] = []
        self.scalars: dict[int, list[_Instruction]] = {}
        branches: list[_Branch] = []
        last_of_regions: set[int] = set()
        for address, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if int(start[1], 16) != address:
                raise ValueError(f"expected bundle {address:#x} of the schedule, got {start[1]}")
            chunk = text[start.end() : end]
            if "End region" in chunk:
                last_of_regions.add(address)
            body = _COMMENT.sub("", chunk)
            body = body[body.index("{") + 1 : body.rindex("}")]
            self.is_empty.append(not body.strip())
            instructions = [_parse(part) for part in body.split(";;") if part.strip()]
            scalars = [i for i in instructions if i is not None]
            # Within a bundle, what joins the values of different paths comes first.
            scalars.sort(key=lambda i: i.name != "sphi")
            if scalars:
                self.scalars[address] = scalars
            branches += [_Branch(address, _target(i)) for i in scalars if i.name == "sbr.rel"]
        core_index = _CORE_INDEX.search(text)
        self.core_index = core_index[1] if core_index else None
        self.delay_slots = _delay_slots(branches, last_of_regions)
        self.grid = _grid_loop(branches)
        self.loop_heads = {b.target for b in branches if b.target <= b.address}

    def steps(self, core: int) -> list[list[int]]:
        """Carries the scalar program out on one core.

        Returns:
            For each turn of the grid's loop, how often each bundle was passed.
        """
        state = _State({self.core_index: core})
        turns: list[Counter[tuple[int, int]]] = []
        passed: Counter[tuple[int, int]] = Counter()  # What is not in the grid's loop.
        after_grid = self.grid.address + self.delay_slots + 1
        stops = sorted({*self.scalars, self.grid.target, after_grid, len(self.is_empty)})
        first = address = 0
        went_back = False
        for _ in range(_MOST_STOPS):
            address = stops[bisect.bisect_left(stops, address)]
            if address in (self.grid.target, after_grid, len(self.is_empty)):
                passed[first, address] += 1
                first = address
                if address == len(self.is_empty):
                    return [self._spread(turn) for turn in turns]
                passed = Counter()
                if address == self.grid.target:
                    turns.append(passed)
            target = None
            for instruction in self.scalars.get(address, ()):
                if instruction.name != "sbr.rel":
                    state.execute(instruction, went_back, address in self.loop_heads)
                elif state.takes(instruction, address):
                    target = _target(instruction)
            went_back = False
            if target is None:
                address += 1
                continue
            end = address + self.delay_slots + 1
            for delayed in range(address + 1, end):
                for instruction in self.scalars.get(delayed, ()):
                    if instruction.name == "sbr.rel":
                        raise ValueError(f"bundle {delayed:#x}: a branch right after a branch")
                    state.execute(instruction, False, False)
            passed[first, end] += 1
            went_back = target <= address
            first = address = target
        raise ValueError(f"the scalar program does not come to an end near bundle {address:#x}")

    def _spread(self, turn: Counter[tuple[int, int]]) -> list[int]:
        changes = [0] * (len(self.is_empty) + 1)
        for (first, end), times in turn.items():
            changes[first] += times
            changes[end] -= times
        counts, running = [], 0
        for change in changes[:-1]:
            running += change
            counts.append(running)
        return counts


def _parse(text: str) -> _Instruction | None:
    """Reads an instruction; None if it neither computes a scalar nor branches."""
    match = _INSTRUCTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected an instruction, got {text.strip()!r}")
    result, name, rest = match.groups()
    is_scalar = result is not None and re.fullmatch(r"%[sp]\d+_[sp]\d+", result) is not None
    if not is_scalar and name not in ("sst", "sbr.rel"):
        if name.startswith(("sbr", "scall")):
            raise ValueError(f"cannot follow the branch {text.strip()!r}")
        return None
    predicate = _PREDICATE.search(rest)
    if predicate is not None:
        rest = rest.replace(predicate[0], "", 1)
    if name == "sst":  # Its address and value stand side by side.
        rest = re.sub(r"\]\],? *", "]], ", rest, count=1)
    return _Instruction(
        result or "",
        name,
        tuple(part.strip() for part in rest.split(",")),
        predicate[2] if predicate else None,
        predicate is not None and predicate[1] == "!",
        predicate[3] if predicate else None,
    )


def _target(branch: _Instruction) -> int:
    match = re.search(r"target bundleno = (\d+)", ",".join(branch.operands))
    if match is None:
        raise ValueError(f"expected the address that a branch goes to, got {branch.operands}")
    return int(match[1])


def _delay_slots(branches: list[_Branch], last_of_regions: set[int]) -> int:
    """How many bundles after a branch are still issued: a region ends after the last of them."""
    distances = range(1, 16)
    found = [
        n for n in distances if all(branch.address + n in last_of_regions for branch in branches)
    ]
    if len(found) != 1:
        raise ValueError(f"branches end {found} bundles late: expected one number")
    return found[0]


def _grid_loop(branches: list[_Branch]) -> _Branch:
    """The branch back that closes the loop over the grid: the only one in no other loop."""
    loops = [branch for branch in branches if branch.target <= branch.address]
    outermost = [
        loop
        for loop in loops
        if not any(o.target <= loop.target and loop.address < o.address for o in loops)
    ]
    if len(outermost) != 1:
        raise ValueError(
            f"expected one loop around all others, that over the grid, got {len(outermost)}"
        )
    return outermost[0]


class _State:
    """Values of scalars, as far as they are known: 32 bits, or None."""

    def __init__(self, memory: dict[str | None, int | None]):
        self.memory = memory
        self.values: dict[str, int | None] = {}
        self.registers: dict[str, int | None] = {}

    def value(self, operand: str) -> int | None:
        if operand.startswith("%"):
            return self.values.get(operand)
        return int(operand) & _MASK if re.fullmatch(r"-?\d+", operand) else None

    def takes(self, branch: _Instruction, address: int) -> bool:
        if branch.predicate is None:
            return True
        condition = self.value(branch.predicate)
        if condition is None:
            raise ValueError(
                f"bundle {address:#x}: what its branch depends on is not known without data"
            )
        return bool(condition) != branch.negated

    def execute(self, instruction: _Instruction, went_back: bool, is_loop_head: bool) -> None:
        runs = True
        if instruction.predicate is not None:
            condition = self.value(instruction.predicate)
            runs = None if condition is None else bool(condition) != instruction.negated
        if instruction.name == "sst":
            address, value = instruction.operands
            if runs is not False:
                self.memory[address] = self.value(value) if runs else None
            return
        result = instruction.result
        register = result.split("_")[1]
        if runs is False:
            # What another instruction has left in the register now goes by this name.
            kept = instruction.otherwise
            self.values[result] = self.value(kept) if kept else self.registers.get(register)
            return
        value = self._compute(instruction, went_back, is_loop_head) if runs else None
        self.values[result] = self.registers[register] = value

    def _compute(
        self, instruction: _Instruction, went_back: bool, is_loop_head: bool
    ) -> int | None:
        name, operands = instruction.name, instruction.operands
        if name == "sphi":
            if not is_loop_head or len(operands) != 2:
                raise ValueError(f"{instruction.result}: expected two paths into a loop")
            return self.value(operands[went_back])
        if name == "sld":
            # Where a register holds the address, it is one of an argument's.
            return None if "%" in operands[0] else self.memory.get(operands[0])
        return evaluate(name, [self.value(operand) for operand in operands])


def _signed(x: int) -> int:
    return x - 2**32 if x & 2**31 else x


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "smin.u32": min,
    "smax.u32": max,
    "sshll.u32": lambda x, by: x << by,
    "sshrl.u32": lambda x, by: x >> by,
    "sshra.s32": lambda x, by: _signed(x) >> by,
}
_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def evaluate(name: str, values: list[int | None]) -> int | None:
    """Computes a scalar instruction; None where its result depends on what is not known."""
    if name == "scalar_select":
        condition, on_true, on_false = values
        if condition is None:
            return on_true if on_true == on_false else None
        return on_true if condition else on_false
    if name in ("por", "pnand"):
        decided = 1 if name == "por" else 0
        if decided in values:
            return 1
        if None in values:
            return None
        return int(any(values)) if name == "por" else int(not all(values))
    if None in values:
        return None
    known = [value for value in values if value is not None]
    if name in ("smov.u32", "pmov"):
        return known[0]
    if name == "pneg":
        return int(not known[0])
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](*known) & _MASK
    if match := re.fullmatch(r"scmp\.(\w\w)\.([su])32\.totalorder", name):
        x, y = map(_signed, known) if match[2] == "s" else known
        return int(_COMPARISONS[match[1]](x, y))
    return None
