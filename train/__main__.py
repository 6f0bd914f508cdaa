"""`python -m train`: this file stays empty so that everything can be imported and tested."""

import sys

from train.cli import main
from train.distributed import join

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], join))
