"""What all command lines share: exit codes, one-line errors, and options that check themselves."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from .errors import CnnEngineError
from .report.units import printable

DONE, CHECK_FAILED, INPUT_AT_FAULT, INTERRUPTED = 0, 1, 2, 130


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are one line, ``error: ...``, and exit with 2; options are not guessed."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print_error(message.removeprefix("argument "))
        sys.exit(INPUT_AT_FAULT)


def print_error(message: object) -> None:
    """Prints one line ``error: ...`` to standard error."""
    print(f"error: {printable(' '.join(str(message).split()))}", file=sys.stderr)


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


def run(main: Callable[[list[str] | None], int], arguments: list[str] | None) -> int:
    """Calls ``main`` and turns the package's errors and Ctrl-C into their exit codes."""
    try:
        code = main(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse's: --help, or an error that is printed already
        return int(stop.code or 0)
    except CnnEngineError as error:
        print_error(error)
        return INPUT_AT_FAULT
    except MemoryError as error:
        print_error(f"out of memory: {error}")
        return INPUT_AT_FAULT
    except BrokenPipeError:  # the reader of a pipe has gone, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
