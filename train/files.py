"""Finds the files that documents come from."""

import difflib
import glob
import os
import pathlib
import sysconfig
from collections.abc import Iterable

_NOT_TEXT_FOR_TRAINING = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",  # Tables of characters, which are a tenth of the bytes and hardly code.
    "pydoc_data",
}


class DataError(ValueError):
    """Data or a data setting that cannot be used; the message is one line for the user."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Gives "; did you mean X?" for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def standard_library() -> list[tuple[str, str]]:
    """Lists (name, path) of the .py files of the running interpreter's standard library."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, subfolders, files in os.walk(root):
        # config-* and _sysconfigdata* differ between machines with the same Python.
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in _NOT_TEXT_FOR_TRAINING and not name.startswith("config-")
        )
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, root), path))
    if not found:
        raise DataError(
            f"the standard library in {root} has no .py files; choose text with --data.source=text "
            "--data.paths FILES"
        )
    return found


def find_files(patterns: Iterable[str]) -> list[tuple[str, str]]:
    """Lists (name, path) of the files that paths and globs (`**` too) match, each file once.

    The name is the path from the last folder before the first wildcard.

    Raises:
        DataError: A pattern matches no file, or a path is not a file.
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.lexists(expanded) or not any(letter in expanded for letter in "*?["):
            root, paths = os.path.dirname(expanded), [expanded]
        else:
            fixed = expanded[: min(expanded.find(c) for c in "*?[" if c in expanded)]
            root = os.path.dirname(fixed)
            paths = sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
            if not paths:
                raise DataError(f'data.paths: "{pattern}" matches no file')
        for path in paths:
            if os.path.isdir(path):
                raise DataError(
                    f'data.paths: "{path}" is a folder; name its files, as in '
                    f'"{os.path.join(path, "**", "*.txt")}"'
                )
            if not os.path.isfile(path):
                parent = pathlib.Path(path).parent
                siblings = os.listdir(parent) if parent.is_dir() else []
                hint = did_you_mean(os.path.basename(path), siblings)
                raise DataError(f'data.paths: there is no file "{path}"{hint}')
            found.setdefault(os.path.realpath(path), (os.path.relpath(path, root or "."), path))
    return list(found.values())
