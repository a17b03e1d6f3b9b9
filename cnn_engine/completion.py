"""``cnn-engine completion SHELL``: a script that completes commands and options, for bash, zsh and tcsh."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.util import find_spec

from . import cli
from .errors import InputError

SHELLS = ("bash", "zsh", "tcsh")


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine completion",
        description="Prints a script that completes commands and options in a shell. For bash, put it where "
        "completions are: cnn-engine completion bash > ~/.local/share/bash-completion/completions/cnn-engine",
    )
    p.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    return p


def every_command() -> argparse.ArgumentParser:
    """Returns one parser of all commands, each with its own options and commands inside of it."""
    from .__main__ import COMMANDS

    whole = argparse.ArgumentParser(prog="cnn-engine")
    whole.add_argument("--version", action="store_true", help="print the version and exit")
    commands = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        package = find_spec(f"cnn_engine.{name}").submodule_search_locations is not None
        module = f"cnn_engine.{name}.command" if package else f"cnn_engine.{name}"
        own = importlib.import_module(module).parser()
        commands.add_parser(name, help=summary.replace("%", "%%"), parents=[own], add_help=False)
    return whole


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            f"expected the package shtab to make completions, found none ({error}): "
            "pip install 'cnn-engine[completion]'"
        ) from None
    cli.show(shtab.complete(every_command(), options.shell), end="")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
