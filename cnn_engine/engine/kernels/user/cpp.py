"""C++ files of a user's own: compiled by the machine's compiler into a library, which ctypes loads."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache as once
from pathlib import Path

from ....devices.cpu import CpuDevice
from ....errors import InputError, UnsupportedError
from . import cache
from .contracts import INCLUDE
from .source import Source

#: Seconds that the compiler may take.
LIMIT_S = 120

FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-pthread", "-fPIC", "-shared", "-Wall", "-g1",
    "-fdiagnostics-color=never", "-fmax-errors=5",
)  # fmt: skip

SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)

_ERROR = re.compile(r"^(.*?):(\d+):(?:(\d+):)? (?:fatal )?error: (.*)$", re.MULTILINE)
_LINK = re.compile(r"undefined reference to [`'](.*?)'")


@once
def compiler() -> str:
    """Returns the machine's C++ compiler.

    Raises:
        UnsupportedError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise UnsupportedError(
        "kernel: expected a C++ compiler for kernels on the CPU (g++, c++, clang++ or $CXX), found none"
    )


@once
def _version() -> str:
    return _run([compiler(), "--version"]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{command[-1]}: expected to compile within {LIMIT_S} s, found more"
        ) from None
    except OSError as error:
        raise UnsupportedError(f"kernel: {command[0]}: {error.strerror}") from None


def compile(source: Source, sanitize: bool = False) -> Path:
    """Returns the library of a file, compiled unless the same content was compiled before.

    Args:
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: there is no compiler.
    """
    flags = [*FLAGS, *(SANITIZE if sanitize else ("-Wl,-z,defs",)), f"-I{INCLUDE}"]
    # What is included counts too, so the key is of the preprocessed file.
    whole = _run([compiler(), *flags, "-E", str(source.path)])
    if whole.returncode:
        raise fault(source, whole.stderr)
    name = cache.key(_version(), CpuDevice().model, " ".join(flags), whole.stdout) + ".so"
    path = cache.folder() / name
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=cache.folder()) as folder:
        made = Path(folder) / name
        done = _run([compiler(), *flags, "-o", str(made), str(source.path)])
        if done.returncode or not made.exists():
            raise fault(source, done.stderr)
        made.replace(path)
    return path


def fault(source: Source, log: str) -> InputError:
    """Returns the first error of a compiler's ``log`` as one line."""
    errors = list(_ERROR.finditer(log))
    if errors:
        path, line, column, message = errors[0].groups()
        place = f"{path}:{line}" + (f":{column}" if column else "")
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return InputError(f"{place}: {message}{more}")
    if match := _LINK.search(log):
        return InputError(
            f"{source.path}: expected all functions to be defined, found no {match[1]}"
        )
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no message")
    return InputError(f"{source.path}: expected to compile, found: {last}")


class Library:
    """A compiled C++ file: its functions by name."""

    def __init__(self, source: Source, sanitize: bool = False) -> None:
        path = compile(source, sanitize)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise InputError(
                f"{source.path}: expected a library that loads, found: {error}"
            ) from None
        self._source = source
        for launch in source.launches:
            self.function(launch.function, launch.line)

    def function(self, name: str, line: int):
        """Returns the function called ``name``, a new object each time."""
        try:
            return self._library[name]
        except AttributeError:
            raise InputError(
                f'{self._source.path}:{line}: expected a function extern "C" {name} in the file, found none'
            ) from None


def sanitizer_environment() -> dict[str, str]:
    """Returns what a process needs to load a library that was compiled with the sanitizers."""
    found = _run([compiler(), "-print-file-name=libasan.so"]).stdout.strip()
    return {
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=1:allow_user_segv_handler=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=0:halt_on_error=1",
    }
