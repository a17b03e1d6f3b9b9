"""Errors that the package raises; the command line maps them to exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

#: What other tools call things, and their names here.
_OTHER_NAMES = {
    "fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32",
    "f32": "float32", "float": "float32", "single": "float32", "gpu": "cuda", "nvidia": "cuda",
    "host": "cpu",
}  # fmt: skip


class CnnEngineError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(CnnEngineError, ValueError):
    """An argument, a file or an array of the caller is at fault.

    The message is one line that names the argument or file, what was expected and what was found.
    Command lines print it as ``error: <message>`` and exit with 2.
    """


class UnsupportedError(InputError):
    """The device, data type or network lacks a requested feature; nothing is substituted."""


class DeviceError(CnnEngineError, RuntimeError):
    """A device call failed: the message names the call, the error, and where it was made."""


def expected(name: str, wanted: object, found: object) -> InputError:
    """Returns the error ``<name>: expected <wanted>, found <found>``, ready to be raised."""
    return InputError(f"{name}: expected {wanted}, found {found}")


def not_one_of(
    name: str, choices: Iterable[str], found: object, others: Mapping[str, str] = _OTHER_NAMES
) -> InputError:
    """Returns the error of a name that is none of ``choices``, with the one that was probably meant."""
    choices = list(choices)
    hint = did_you_mean(found, choices, others)
    return expected(name, f"one of {', '.join(choices)}", f"{found!r}{hint}")


def did_you_mean(
    found: object, choices: Iterable[str], others: Mapping[str, str] = _OTHER_NAMES
) -> str:
    """Returns ``"; did you mean float16?"``, or nothing where no choice is near.

    Args:
        others: what else choices are called -> the choice.
    """
    if not isinstance(found, str):
        return ""
    choices = list(choices)
    word, colon, rest = found.lower().partition(":")
    other = others.get(word)
    if other in choices:
        return f"; did you mean {other}{colon}{rest}?"
    near = difflib.get_close_matches(found.lower(), choices, 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def printable(text: object) -> str:
    """Returns ``text`` on one line: control characters and lone surrogates as escapes.

    Paths, names and messages come from outside; in a report they must neither move the cursor, nor change the
    order of what is read (bidirectional overrides), nor fail to encode.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
