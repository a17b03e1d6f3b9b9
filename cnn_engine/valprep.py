"""The old name of ``scripts/valprep.py``, which it runs; the next release has no such module."""

from __future__ import annotations

import runpy
import sys
from importlib import metadata
from pathlib import Path

from . import cli
from .errors import UnsupportedError


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the script with ``arguments`` (None: the process's); returns its exit code."""
    script = _script()
    print(
        f"warning: cnn_engine.valprep is now a script: python {script}; the next release drops this name",
        file=sys.stderr,
    )
    return runpy.run_path(str(script))["main"](arguments)


def _script() -> Path:
    """Returns the script's path: in the checkout, or where the wheel has put it."""
    script = Path(__file__).parents[1] / "scripts" / "valprep.py"
    if script.is_file():
        return script
    for file in metadata.files("cnn-engine") or ():
        if file.name == script.name and "cnn_engine" not in file.parts:
            return Path(file.locate()).resolve()
    raise UnsupportedError("valprep: expected scripts/valprep.py of the repository, found none")


if __name__ == "__main__":
    sys.exit(main())
