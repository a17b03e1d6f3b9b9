"""``cnn-engine download NAME``: a data set into the user's cache; the base of commands that download."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from . import cli
from .errors import did_you_mean
from .io.fetch import Report, Say

#: Data set -> the module that fetches it.
DATA_SETS = {
    "cifar10": "cnn_engine.workloads.cifar10.download",
    "fashion_mnist": "cnn_engine.workloads.fashion_mnist.download",
}

#: What the data sets are called elsewhere: by the network that reads them, or with a hyphen.
OTHER_NAMES = {"ece408": "fashion_mnist", "fashion-mnist": "fashion_mnist", "cifar-10": "cifar10"}


def parser() -> cli.ArgumentParser:
    """Returns the command's parser; words after the name are the data set's own."""
    p = cli.ArgumentParser(
        prog="cnn-engine download",
        description="Fetches a data set into the user's cache, where --data auto looks for it.",
        epilog="cnn-engine download NAME --help lists a data set's options",
    )
    p.add_argument("name", metavar="NAME", help=f"one of {', '.join(DATA_SETS)}")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0].startswith("-"):
        return cli.run(lambda words: parser().parse_args(words) and cli.DONE, words)
    name = OTHER_NAMES.get(words[0], words[0])
    if name not in DATA_SETS:
        hint = did_you_mean(name, DATA_SETS)
        cli.print_error(f"NAME: expected one of {', '.join(DATA_SETS)}, found {name!r}{hint}")
        return cli.INPUT_AT_FAULT
    return importlib.import_module(DATA_SETS[name]).main(words[1:])


def command(
    arguments: Sequence[str] | None,
    *,
    prog: str,
    name: str,
    url: str,
    url_help: str,
    folder: Path,
    holds: str,
    download: Callable[[Path, str, bool, Say, Report], Path],
) -> int:
    """Runs a data set's download command; returns its exit code: 0 done, 2 error, 130 interrupted.

    Args:
        prog: the command, for its help.
        name: the data set's.
        url, url_help: the default of ``--url``, and what is there.
        folder: the default of ``--output``; ``--data auto`` looks there.
        holds: what the folder gets.
        download: takes the folder, the address, ``--force``, and whom to tell; returns where the data is.
    """
    parser = cli.ArgumentParser(prog=prog, description=f"Downloads {name}.")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"the folder that gets {holds} (default: the user's cache, {folder}, "
        "where --data auto looks)",
    )
    parser.add_argument("--url", default=url, help=f"{url_help} (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--quiet", action="store_true", help="print errors only")

    def main(words: Sequence[str] | None) -> int:
        options = parser.parse_args(words)
        # Not `or`: an empty --output must not mean the cache.
        output = folder if options.output is None else options.output
        try:
            target = _with_progress(name, output, options, download)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes the download") from None
        if not options.quiet:
            cli.show(f"{name}: {target}")
        return cli.DONE

    return cli.run(main, arguments)


def _with_progress(
    name: str,
    folder: Path,
    options: argparse.Namespace,
    download: Callable[[Path, str, bool, Say, Report], Path],
) -> Path:
    console = Console(stderr=True, quiet=options.quiet)
    columns = (
        TextColumn(name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = options.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("download", total=None)
        return download(
            folder,
            options.url,
            options.force,
            lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            lambda done, total: progress.update(task, completed=done, total=total),
        )


if __name__ == "__main__":
    sys.exit(main())
