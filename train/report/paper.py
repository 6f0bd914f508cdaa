"""The numbers that the page quotes from the paper, all from one data file."""

import json
import pathlib
from typing import Any

PATH = pathlib.Path(__file__).with_name("paper.json")


def load_paper() -> dict[str, Any]:
    """Reads paper.json: tables by name, each with its caption, its source and its rows."""
    return json.loads(PATH.read_text(encoding="utf-8"))
