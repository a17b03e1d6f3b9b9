"""The errors that the package raises, and what the command line makes of them."""

from __future__ import annotations


class CnnEngineError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(CnnEngineError, ValueError):
    """What the caller gave is at fault: an argument, a file, an array.

    The message is one line that names the argument or file, what was expected and what was found.
    Command lines print it as ``error: <message>`` and exit with 2.
    """


class UnsupportedError(InputError):
    """The device, data type or network lacks what was asked for; nothing is substituted for it."""


class DeviceError(CnnEngineError, RuntimeError):
    """A device call failed: the message names the call, the error, and where it was made."""


def expected(name: str, wanted: object, found: object) -> InputError:
    """Returns the error ``<name>: expected <wanted>, found <found>``, ready to be raised."""
    return InputError(f"{name}: expected {wanted}, found {found}")
