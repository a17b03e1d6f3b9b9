"""``python -m cnn_engine.ensemble``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
