"""Checks that name the rule, the value and the way out. Plain python."""

import difflib
from collections.abc import Sequence


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`, naming the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}{hint}")


def nearest(value: int, largest: int) -> int | None:
    """The largest allowed number up to `largest`, or None if that is below one."""
    return min(value, largest) if largest >= 1 else None
