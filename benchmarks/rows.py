"""Printing measurements: a table for people, one JSON line a row for machines."""

import json

from rich.console import Console
from rich.table import Table


def print_rows(title: str, rows: list[dict], *, as_json: bool) -> None:
    """Prints rows that share their keys; floats to four significant digits in the table."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
