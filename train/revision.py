"""Which version of the code is running."""

import pathlib
import subprocess


def checkout() -> str:
    """Returns the commit of this checkout, "-dirty" where files differ; empty without git."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()
