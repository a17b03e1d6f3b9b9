"""``module:callable[,key=value...]`` on a command line: which function, with which arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import did_you_mean, expected


def resolve(option: str, spec: str) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """Returns the callable that ``spec`` names, its arguments, and a short name.

    A module may be installed, or a file of the current folder, from now on.

    Raises:
        InputError: there is no such module or callable, or it does not take the arguments; names ``option``.
    """
    where = f"{option}: {spec}"
    target, *words = spec.split(",")
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise expected(option, "module:callable[,key=value...]", repr(spec))
    arguments = dict(_argument(where, word) for word in words)
    # `python -m` looks there by itself, the installed command `cnn-engine` does not.
    if not {"", folder := os.getcwd()} & set(sys.path):
        sys.path.append(folder)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way
        hint = _hint(error, module_name.partition(".")[0])
        raise expected(
            where, f"a module {module_name} that can be imported", f"{error}{hint}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [name for name in dir(found) if name[0] != "_"], {})
            raise expected(where, f"{part!r} in {module_name}", f"none of that name{near}")
        found = getattr(found, part)
    if not callable(found):
        raise expected(where, "something to call", f"an object of type {type(found).__name__}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise expected(where, f"arguments that {attribute} takes", error) from error
    except ValueError:
        pass  # a callable without a signature: the call itself will tell
    given = ",".join(words)
    return found, arguments, f"{attribute}({given})" if given else attribute


#: Package -> what installs it, where it is not there.
_INSTALLED_BY = {
    "torchvision": "'cnn-engine[torch]'",
    "torch": "'cnn-engine[torch]'",
    "timm": "timm",
}


def _hint(error: BaseException, package: str) -> str:
    """Returns what installs ``package``, where that is what is missing."""
    if getattr(error, "name", None) != package or package not in _INSTALLED_BY:
        return ""
    return f" (pip install {_INSTALLED_BY[package]})"


def _argument(where: str, word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not (key.isidentifier() and equals):
        raise expected(where, "key=value after the callable", repr(word))
    try:
        return key, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return key, text
