"""Row 436M of the paper's scaling table: 16 layers, 16 heads, width 1168. A dense stand-in.

    python -m train.prepare --output=data/prepared --train-tokenizer --vocab-size=32768 ...
    python -m train --config=configs/scaling_436m.py

87.9 billion tokens, of your own text: `python -m train.prepare --help`. For accelerators; the
authors have not trained it.
"""

from configs.scaling import scaling_config
from train.config import Config


def get_config() -> Config:
    """Returns the run."""
    return scaling_config("436m", learning_rate=2.20e-3, batch_size=384, tokens=87.9e9)
