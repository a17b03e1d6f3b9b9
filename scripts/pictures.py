"""Makes the pictures of the first page from a real run on this machine: ``python scripts/pictures.py``.

It times the CIFAR-10 network layer by layer on one thread, and writes ``docs/assets/layers.png``. The
machine, the median and the settings are in the picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RUN = "--device cpu --threads 1 --variant blocked --batch 64 --images 1024 --iterations 40 --quiet --plot"


def main() -> int:
    """Runs the command whose picture the first page shows; returns its exit code."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    from cnn_engine import run

    return run.main([*RUN.split(), str(ROOT / "docs" / "assets" / "layers.png")])


if __name__ == "__main__":
    sys.exit(main())
