"""Training runs, one python file each: `python -m train --config=configs/NAME.py`."""
