"""``python -m cnn_engine.compare``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
