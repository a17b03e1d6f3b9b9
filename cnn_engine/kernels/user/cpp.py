"""C++ files of a user's own: compiled by the machine's compiler into a library, which ctypes loads."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from functools import cache as once
from pathlib import Path

from ...devices.cpu import CpuDevice
from ...errors import InputError, UnsupportedError
from ...io import cache, sandbox
from ...io.sandbox import Completed, Confinement
from .contracts import INCLUDE
from .source import Source

#: Seconds that the compiler may take.
LIMIT_S = 120

#: Bytes of memory that each of its processes may take, and of each file and output that it writes.
MOST_MEMORY = 4 << 30
MOST_OUTPUT = 64 << 20

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
def _version() -> bytes:
    return run_compiler([compiler(), "--version"]).stdout


def run_compiler(
    command: list[str], seconds: float = LIMIT_S, folder: str = os.devnull
) -> Completed:
    """Runs the compiler on a file that may be anybody's; it writes to ``folder`` alone.

    Raises:
        InputError: it took more time than it may, or wrote more; it was stopped.
        UnsupportedError: it cannot be started.
    """
    confinement = Confinement(
        memory=MOST_MEMORY, cpu_s=int(seconds) + 1, file_bytes=MOST_OUTPUT, processes=True,
        writable=(os.devnull, folder),
    )  # fmt: skip
    # ccache, where it stands for the compiler, writes to a folder of its own.
    environment = {**os.environ, "TMPDIR": folder, "CCACHE_DISABLE": "1", "LC_ALL": "C"}
    try:
        return sandbox.run(command, confinement, seconds, MOST_OUTPUT, env=environment)
    except sandbox.TooLong:
        raise InputError(
            f"{command[-1]}: expected to compile within {seconds:g} s, found more; it was stopped"
        ) from None
    except sandbox.TooMuch:
        raise InputError(
            f"{command[-1]}: expected at most {MOST_OUTPUT >> 20} MiB of the compiler's output, found "
            "more; it was stopped"
        ) from None
    except OSError as error:
        raise UnsupportedError(f"kernel: {command[0]}: {error.strerror}") from None


def compile(source: Source, sanitize: bool = False, seconds: float = LIMIT_S) -> bytes:
    """Returns the library of a file, compiled unless the same content was compiled before.

    Args:
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer.
        seconds: that the compiler may take.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: there is no compiler.
    """
    flags = [*FLAGS, *(SANITIZE if sanitize else ("-Wl,-z,defs",)), f"-I{INCLUDE}"]
    # What is included counts too, so the key is of the preprocessed file. Names of files and numbers of
    # lines (-P leaves them out) are in the reports of sanitizers alone.
    preprocess = ["-E"] if sanitize else ["-E", "-P"]
    whole = run_compiler([compiler(), *flags, *preprocess, str(source.path)], seconds)
    if whole.returncode:
        raise fault(source, whole.stderr)
    name = cache.key(_version(), CpuDevice().model, " ".join(flags), whole.stdout) + ".so"
    if kept := cache.read(name):
        return kept
    with tempfile.TemporaryDirectory(prefix="cnn_engine-") as folder:
        made = Path(folder) / name
        done = run_compiler(
            [compiler(), *flags, "-o", str(made), str(source.path)], seconds, folder
        )
        if done.returncode or not made.exists():
            raise fault(source, done.stderr.replace(f"{folder}/".encode(), b""))
        library = made.read_bytes()
    cache.keep(name, library)
    return library


def fault(source: Source, log: bytes) -> InputError:
    """Returns the first error of a compiler's ``log`` as one line."""
    log = log.decode(errors="replace")
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


_files: dict[bytes, str] = {}


def file_of(library: bytes, sanitized: bool = False) -> str:
    """Returns a path to load ``library`` from, the same for the same bytes, while this process lives.

    It is memory that nobody else can write to or cut off: what is run is what was verified. Sanitizers read
    names of functions from the file once more, so theirs has a place in a private folder.
    """
    digest = hashlib.sha256(library).digest()
    if digest not in _files:
        try:
            if sanitized:
                raise OSError
            descriptor = _memory()
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(library)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            _files[digest] = (
                f"/proc/self/fd/{descriptor}"  # stays open: paths are names of libraries
            )
        except OSError:
            path = cache.private() / f"{digest.hex()}.so"
            path.write_bytes(library)
            _files[digest] = str(path)
    return _files[digest]


def _memory() -> int:
    """Returns memory that can be sealed, and run also where that has to be asked for (Linux 6.3)."""
    name, flags, run = "cnn_engine-kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING, 0x10
    try:
        return os.memfd_create(name, flags | run)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Library:
    """A compiled C++ file: its functions by name.

    Args:
        file: the compiled library, where it was compiled already.
    """

    def __init__(self, source: Source, file: str | None = None) -> None:
        path = file or file_of(compile(source))
        try:
            self._library = ctypes.CDLL(path)
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
    """Returns the environment of a process that loads a library compiled with the sanitizers."""
    found = run_compiler([compiler(), "-print-file-name=libasan.so"]).stdout.decode().strip()
    return {
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=1:allow_user_segv_handler=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=0:halt_on_error=1",
    }
