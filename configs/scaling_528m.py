"""Row 528M of the paper's scaling table: 17 layers, 17 heads, width 1264. A dense stand-in.

    python -m train.prepare --output=data/prepared --train-tokenizer --vocab-size=32768 ...
    python -m train --config=configs/scaling_528m.py

119 billion tokens, of your own text: `python -m train.prepare --help`. For accelerators; the
authors have not trained it.
"""

from configs.scaling import scaling_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return scaling_config("528m", learning_rate=2.02e-3, batch_size=432, tokens=119.0e9)
