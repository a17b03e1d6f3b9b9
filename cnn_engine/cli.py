"""Shared parts of all command lines: exit codes, one-line errors, options that check themselves."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn, TextIO

from . import interrupts
from .errors import CnnEngineError, InputError, UnsupportedError, did_you_mean, expected, not_one_of
from .io.files import check_writable
from .report.units import printable

#: What a write to standard output fails with: a full disk or quota, a closed or broken file.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)

DONE, CHECK_FAILED, INPUT_AT_FAULT, INTERRUPTED = 0, 1, 2, interrupts.INTERRUPTED


def need(name: str, module: str, distribution: str, purpose: str, install: str) -> ModuleType:
    """Returns a module of a package that few need.

    Args:
        name: the command or the option that needs it, for the message.
        purpose: what for, such as "for Parquet files".
        install: what pip takes: the package, or an extra of this one.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: expected the package {distribution} {purpose}, found none ({error}); "
            f"pip install '{install}'"
        ) from error


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are one line, ``error: ...``, and exit with 2; options are not guessed."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--version", action=_Version, nargs=0, help="print it and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = [word for action in self._actions for word in action.option_strings]
        global _options
        _options = {word for word in known if word.startswith("--")}
        found, left = super().parse_known_args(args, namespace)
        if left:  # argparse's own line names no option that is near
            word = left[0].partition("=")[0]
            hint = did_you_mean(word, _options) if word.startswith("--") else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(str(not_one_of(_name_of(action), map(str, action.choices), value)))

    def print_help(self, file: TextIO | None = None) -> None:
        # argparse's own drops what the write fails with.
        print(self.format_help(), end="", file=file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            "^the following arguments are required: (.*)", r"expected \1, found none", message
        )
        print_error(message.removeprefix("argument "))
        sys.exit(INPUT_AT_FAULT)


def _name_of(action: argparse.Action) -> str:
    return max(action.option_strings, key=len, default=action.metavar or action.dest)


#: The options of the command that runs, and names in Python whose option has another.
_options: set[str] = set()
_OPTION_OF = {"kernels": "--kernel", "duration_s": "--duration", "constants": "--constant"}


def _in_options(message: str) -> str:
    """Returns an error's message with the option in the place of the argument's name in Python.

    ``dtype: expected ...`` is ``--dtype: expected ...`` for who typed ``--dtype``.
    """
    named = re.match(r"([a-z][a-z0-9_]*)(?=(?: [\w:.]+)?: )", message)
    if named is None:
        return message
    option = _OPTION_OF.get(named[1], f"--{named[1].replace('_', '-')}")
    return option + message[named.end() :] if option in _options else message


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from . import __version__

        print(f"cnn_engine {__version__}")
        parser.exit()


def show(text: object, file: TextIO | None = None, end: str = "\n") -> None:
    """Prints a report or a message, to standard output unless ``file`` is given, at once.

    All that commands print for people goes through here or :func:`print_error`: names, paths and messages of
    models, data, compilers and system reach a terminal with control characters as escapes.
    """
    lines = "\n".join(map(printable, str(text).split("\n")))
    print(lines, end=end, file=file or sys.stdout, flush=True)


def print_error(message: object, kind: str = "error") -> None:
    """Prints one line ``error: ...``, or of another kind, to standard error, where that is open."""
    if sys.stderr is not None:  # else print would take standard output
        print(f"{kind}: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a converter for argparse that takes whole numbers from ``lowest`` to ``highest``."""

    def convert(text: str) -> int:
        try:
            number = int(text) if len(text) <= 20 else None
        except ValueError:
            number = None
        if number is None or not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {lowest} to {highest}, found {text!r}"
            )
        return number

    return convert


def number_of_images(text: str) -> int:
    """Converts for argparse a number of images that may be as large as 1e18, such as ``1e9``."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 1 <= number <= 1e18:
        raise argparse.ArgumentTypeError(f"expected a number of images such as 1e9, found {text!r}")
    return int(number)


def number(lowest: float, highest: float) -> Callable[[str], float]:
    """Returns a converter for argparse that takes numbers above ``lowest``, up to ``highest``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not lowest < value <= highest:
            raise argparse.ArgumentTypeError(
                f"expected a number above {lowest:g}, up to {highest:g}, found {text!r}"
            )
        return value

    return convert


def check_outputs(
    paths: Mapping[str, str | os.PathLike[str] | None], inputs: Iterable[str] = ()
) -> None:
    """Refuses outputs that cannot be written, before any work is done.

    Args:
        paths: option -> its path, ``-`` for standard output, or None where it is not given.
        inputs: files that are read, which no output may replace.

    Raises:
        InputError: a path cannot be written, is named twice or is an input, or several are ``-``.
    """
    given = {option: os.fspath(path) for option, path in paths.items() if path is not None}
    if list(given.values()).count("-") > 1:
        raise InputError("standard output: expected one option with -, found several")
    taken = {os.path.realpath(path): path for path in inputs if path != "-"}
    for option, path in given.items():
        if path == "-":
            continue
        check_writable(path, option)
        place = os.path.realpath(path)
        if place in taken:
            raise expected(option, "a path of its own", f"{path}, which is {taken[place]}")
        taken[place] = option


def run(main: Callable[[list[str] | None], int], arguments: list[str] | None) -> int:
    """Calls ``main`` and turns the package's errors and signals into their exit codes.

    SIGTERM is answered as Ctrl-C is, so that what was measured is kept, and exits with 143.
    """
    terminated: list[int] = []
    try:
        with interrupts.raised() as terminated:
            code = _exit_code(main, arguments)
    except KeyboardInterrupt:  # once more, while the first was answered
        code = INTERRUPTED
    if code != INTERRUPTED:
        return code
    exec("")  # else Python ends by the signal in place of the code, where it came in an exec()
    code = interrupts.TERMINATED if terminated else code
    interrupts.leave_soon(code)
    return code


def command(body: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Makes a command's ``main`` of its body: called with arguments (None: the process's), by :func:`run`."""

    @wraps(body)
    def main(arguments: list[str] | None = None) -> int:
        return run(body, arguments)

    return main


def _exit_code(main: Callable[[list[str] | None], int], arguments: list[str] | None) -> int:
    if sys.stdout is None:  # closed: Python would take what is printed and drop it
        sys.stdout = _Closed()
    try:
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse's: --help, or an error that is printed already
            code = int(stop.code or 0)
        sys.stdout.flush()
        return code
    except CnnEngineError as error:
        print_error(_in_options(str(error)))
        return INPUT_AT_FAULT
    except MemoryError as error:
        print_error(f"out of memory: {error}")
        return INPUT_AT_FAULT
    except BrokenPipeError:  # the reader of a pipe has gone, such as `| head`
        _drop_output()
        return DONE
    except OSError as error:
        if not is_of_output(error):
            raise
        _drop_output()
        print_error(f"standard output: expected to write to it, found: {error.strerror or error}")
        return INPUT_AT_FAULT
    except KeyboardInterrupt as stop:
        if sys.stderr is not None:
            show(": ".join(["interrupted", *map(str, stop.args)]), sys.stderr)
        return INTERRUPTED


def is_of_output(error: OSError) -> bool:
    """Whether it is standard output that failed.

    Files are written by :mod:`cnn_engine.io.files`, whose errors are InputErrors.
    """
    if isinstance(error, BrokenPipeError):
        return True
    return error.filename is None and error.errno in _OUTPUT_ERRORS


class _Closed(io.TextIOBase):
    """Standard output that was closed before the program began: what is printed is an error."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _drop_output() -> None:
    """Lets what standard output still holds go nowhere, so that the interpreter's own flush is quiet."""
    if not isinstance(sys.stdout, _Closed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
