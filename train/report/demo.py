"""Trains the quickstart pair, standard and Block with the same initial weights and data."""

import pathlib

from train import cli

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIGS = ("quickstart_standard", "quickstart")


def train_the_pair() -> tuple[tuple[pathlib.Path, ...], int]:
    """Trains both runs in runs/, as far as they are not trained yet.

    Returns:
        Their folders, and the exit code: 0 when both are complete.
    """
    for name in _CONFIGS:
        print(f"--- {name}: about two minutes on two CPU cores; Ctrl-C stops it, and it continues")
        config = _ROOT / "configs" / f"{name}.py"
        code = cli.main([f"--config={config}", "--diagnostics.every=50", "--sample-tokens=0"])
        if code:
            return (), code
    return tuple(pathlib.Path("runs") / name for name in _CONFIGS), 0
