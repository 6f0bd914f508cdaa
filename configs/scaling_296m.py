"""Row 296M of the paper's scaling table: 14 layers, 14 heads, width 1024. A dense stand-in.

    python -m train.prepare --output=data/prepared --train-tokenizer --vocab-size=32768 ...
    python -m train --config=configs/scaling_296m.py

62.1 billion tokens, of your own text: `python -m train.prepare --help`. For accelerators; the
authors have not trained it.
"""

from configs.scaling import scaling_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return scaling_config("296m", learning_rate=2.50e-3, batch_size=320, tokens=62.1e9)
