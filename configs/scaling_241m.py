"""Row 241M of the paper's scaling table: 13 layers, 13 heads, width 960. A dense stand-in.

    python -m train.prepare --output=data/prepared --train-tokenizer --vocab-size=32768 ...
    python -m train --config=configs/scaling_241m.py

45.4 billion tokens, of your own text: `python -m train.prepare --help`. For accelerators; the
authors have not trained it.
"""

from configs.scaling import scaling_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return scaling_config("241m", learning_rate=2.80e-3, batch_size=256, tokens=45.4e9)
