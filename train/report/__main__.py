"""`python -m train.report`: this file stays empty so that everything can be imported and tested."""

import sys

from train.report.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
