"""``python -m cnn_engine.kernel``."""

import sys

from .command import main

sys.exit(main())
