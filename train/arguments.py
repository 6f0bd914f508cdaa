"""Reading settings from a command line, with refusals of one line."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

import tyro


def read_arguments(settings: Any, arguments: Sequence[str] | None, **options: Any) -> Any:
    """Reads a dataclass with tyro.

    Args:
        settings: The dataclass.
        arguments: Words of the command line; None means those of this process.
        **options: Passed on to `tyro.cli`.

    Raises:
        ValueError: A setting is unknown or has a value of another type; the message is one line,
            with the nearest name.
        SystemExit: Help was asked for, and printed.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(settings, args=arguments, **options)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(_message(box.getvalue())) from None


def _message(box: str) -> str:
    """Takes what is wrong, and the names that tyro offers, out of the frame that it draws."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if set(line) <= set("─╭╮╰╯")] or [len(lines)]
    what = " ".join(lines[1 : rules[0]]) or " ".join(lines)
    # The command line keeps a Config in `run`, and some parts begin their messages with their name.
    what = re.sub(r"^Error parsing (run\.|run: )?", "", what)
    what = re.sub(r"^(\w+): (?=\1[.:])", "", what)
    if "Perhaps you meant:" not in lines:
        return what
    offered = lines[lines.index("Perhaps you meant:") :]
    # A line is "--name VALUE", or "-n, --name VALUE" where there is a short form.
    option = re.compile(r"(?:-\w, )?(--\w[\w.-]*)")
    names = [match[1] for line in offered if (match := option.match(line))]
    return f"{what}; did you mean {' or '.join(dict.fromkeys(names))}?"
