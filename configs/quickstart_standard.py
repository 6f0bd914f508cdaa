"""The quickstart model with the standard residual, for comparison.

    python -m train --config=configs/quickstart_standard.py

Everything else, the initial weights and the order of the data included, is the quickstart's.
"""

import dataclasses

from configs import quickstart
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    config = quickstart.get_config()
    model = dataclasses.replace(config.model, residual="standard")
    return dataclasses.replace(config, model=model, workdir="runs/quickstart_standard")
