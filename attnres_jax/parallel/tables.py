"""Rows of plain data as a text table."""

from collections.abc import Sequence


def format_table(rows: Sequence[dict[str, object]]) -> str:
    """Formats rows that share their keys: a header, then one line a row, columns aligned right."""
    header = [key.replace("_", " ") for key in rows[0]]
    cells = [header, *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
