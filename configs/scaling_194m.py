"""Row 194M of the paper's scaling table: 12 layers, 12 heads, width 896. A dense stand-in.

    python -m train.prepare --output=data/prepared --train-tokenizer --vocab-size=32768 ...
    python -m train --config=configs/scaling_194m.py

38.7 billion tokens, of your own text: `python -m train.prepare --help`. For accelerators; the
authors have not trained it.
"""

from configs.scaling import scaling_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return scaling_config("194m", learning_rate=2.99e-3, batch_size=192, tokens=38.7e9)
