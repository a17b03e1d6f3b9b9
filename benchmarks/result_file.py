"""Result files of benchmarks: options that name them, common keys, and how they are written."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import IO, Any

from cnn_engine import cli
from cnn_engine.errors import expected
from cnn_engine.io.files import atomic_write, write_text
from cnn_engine.measure.environment import Stopwatch
from cnn_engine.report import units

#: Option -> what is said of it.
FORMS = {
    "json": "writes what was found",
    "markdown": "writes a page",
    "chart": "writes a chart, as PNG",
}


def parser(name: str, about: str, *forms: str, epilog: str | None = None) -> cli.ArgumentParser:
    """Returns the parser of the benchmark ``name``, with options for result files.

    Args:
        about: what it does: the module's docstring, printed as it is.
        forms: of ``FORMS``.
    """
    made = cli.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    for form in forms:
        made.add_argument(f"--{form}", metavar="PATH", help=FORMS[form])
    return made


def add_shards(parser: ArgumentParser, parts: str, row: str) -> None:
    """Adds ``--shard``, a part of the ``parts``, and ``--merge``, one record of several."""
    parser.add_argument(
        "--shard", type=shard, default=(1, 1), metavar="K/N", help=f"a part of the {parts}"
    )
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE",
        help=f"runs nothing: makes one record of what --json wrote; the first that has a {row} counts",
    )  # fmt: skip


def shard(text: str) -> tuple[int, int]:
    """Returns (K, N) of ``K/N``, the K-th of N parts of the work, the first of which is 1."""
    first, _, count = text.partition("/")
    count = cli.whole_number(1, 1000)(count)
    return cli.whole_number(1, count)(first), count


def schema(name: str) -> str:
    """Returns what names the documents of the benchmark ``name``."""
    return f"cnn_engine.{name}/1"


def command_line(name: str, arguments: list[str] | None) -> str:
    """Returns the command of the benchmark ``name``; ``arguments``: None for the process's."""
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words])


def run_lines(document: dict[str, Any]) -> list[str]:
    """Returns a page's lines on the run that a stamped document is of: its commit and its command."""
    return [
        f"- Commit: {document['environment']['commit'] or 'not known'}",
        f"- Command: `{document['command']}`, {document['started']}, took "
        f"{units.seconds(document['duration_s'])}",
    ]


def read(path: str, option: str, schema: str) -> dict[str, Any]:
    """Returns the document that a benchmark wrote.

    Raises:
        InputError: there is none, or it is another benchmark's; names ``option`` and the file.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise expected(f"{option}: {path}", "what --json writes", error) from None
    known = found.get("schema") if isinstance(found, dict) else type(found).__name__
    if known != schema:
        raise expected(f"{option}: {path}", schema, known)
    return found


class ResultFile:
    """What a benchmark found: ``document``, which may grow, is stamped and written as often as asked.

    Args:
        name: the benchmark's module.
        options: with the paths of :func:`parser`; what cannot be written is refused before any work.
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
            "schema": schema(name), "command": command_line(name, arguments), **content,
        }  # fmt: skip

    def begin(self, commit: str | None) -> None:
        """Lets the document have the commands of all runs that it is of, this one's the first."""
        ran = {"command": self.document.pop("command"), "commit": commit}
        self.document["commands"] = [ran | {"started": self.watch.started}]

    def begin_merge(self, path: str, *about: str) -> None:
        """Lets the document be of other runs alone: what ``about`` names is as the first of them has it."""
        first = read(path, "--merge", self.document["schema"])
        del self.document["command"]
        self.document |= {name: first[name] for name in about} | {"commands": []}

    def take_in(
        self,
        path: str,
        option: str,
        key: Callable[[Mapping[str, Any]], Hashable],
        same: Callable[[Mapping[str, Any]], object] = lambda document: None,
    ) -> dict[str, Any]:
        """Adds the rows of a document that another run wrote, but those that are here already.

        Args:
            option: what named ``path``.
            key: returns what a row is of.
            same: returns what must be the same in both documents.

        Returns:
            The document.

        Raises:
            InputError: it is no document of this benchmark, or of something else.
        """
        known = read(path, option, self.document["schema"])
        if same(known) != same(self.document):
            raise expected(f"{option}: {path}", same(self.document), same(known))
        there = {key(row) for row in self.document["rows"]}
        self.document["rows"] += [row for row in known["rows"] if key(row) not in there]
        commands = [*known["commands"], *self.document["commands"]]
        self.document["commands"] = sorted(commands, key=lambda ran: ran["started"])
        return known

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
