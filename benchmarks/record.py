"""The frame of a benchmark's record: the options that name its files, what begins it, how it is written."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import IO, Any

from cnn_engine import cli
from cnn_engine.io.files import atomic_write, write_text
from cnn_engine.measure.environment import Stopwatch

#: Option -> what is said of it.
FORMS = {
    "json": "writes what was found",
    "markdown": "writes a page",
    "chart": "writes a chart, as PNG",
}


def add_options(parser: ArgumentParser, *forms: str) -> None:
    """Adds the options of some of ``FORMS``."""
    for form in forms:
        parser.add_argument(f"--{form}", metavar="PATH", help=FORMS[form])


def command_line(name: str, arguments: list[str] | None) -> str:
    """Returns the command of the benchmark ``name``; ``arguments``: None for the process's."""
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words])


class Record:
    """What a benchmark found: ``document``, which may grow, is stamped and written as often as asked.

    Args:
        name: the benchmark's module.
        options: with the paths of ``add_options``; what cannot be written is refused before any work.
        arguments: of the command; None for the process's.
        content: what the document holds beside its schema and command.
    """

    def __init__(
        self, name: str, options: Namespace, arguments: list[str] | None, **content: Any
    ) -> None:
        self._paths = {form: getattr(options, form, None) for form in FORMS}
        cli.check_outputs({f"--{form}": path for form, path in self._paths.items()})
        self.watch = Stopwatch()
        self.document: dict[str, Any] = {
            "schema": f"cnn_engine.{name}/1", "command": command_line(name, arguments), **content,
        }  # fmt: skip

    def stamped(self) -> dict[str, Any]:
        """Returns the document with when it began and how long it has taken."""
        return self.document | self.watch.stamp()

    def write(
        self,
        markdown: Callable[[dict[str, Any]], str] | None = None,
        draw: Callable[[dict[str, Any], IO[bytes]], None] | None = None,
    ) -> None:
        """Writes the files that were asked for, each whole or not at all.

        Args:
            markdown: makes the page of the stamped document.
            draw: draws it into an open file.
        """
        document, paths = self.stamped(), self._paths
        if paths["json"]:
            write_text(paths["json"], json.dumps(document, indent=1) + "\n")
        if paths["markdown"] and markdown:
            write_text(paths["markdown"], markdown(document))
        if paths["chart"] and draw:
            with atomic_write(paths["chart"], "wb") as file:
                draw(document, file)
