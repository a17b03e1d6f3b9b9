"""CUDA files of a user's own through nvcc, to see whether they compile where there is no NVRTC and no GPU."""

from __future__ import annotations

import re
import shutil
import tempfile

from ...errors import InputError, UnsupportedError
from ...target import Target
from . import cpp
from .contracts import INCLUDE
from .source import Source

_ERROR = re.compile(r"^(.*?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", re.MULTILINE)


def compile(source: Source, target: Target, reason: str) -> str:
    """Compiles a file for a GPU, keeps nothing, and returns the compiler's version.

    Args:
        reason: why nothing else can be done with the file here, for the error.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: there is no nvcc.
    """
    program = shutil.which("nvcc")
    if program is None:
        raise UnsupportedError(
            f"{reason}; compiling alone takes nvcc on PATH or the extra cnn-engine[cuda13] or "
            "cnn-engine[cuda12], found neither"
        )
    with tempfile.TemporaryDirectory() as folder:
        done = cpp.run_compiler(
            [program, "-std=c++17", f"-arch={target.native_architecture}", "--expt-relaxed-constexpr",
             f"-I{INCLUDE}", "-cubin", "-o", f"{folder}/made.cubin", str(source.path)],
            folder=folder,
        )  # fmt: skip
    if done.returncode:
        text = (done.stdout + done.stderr).decode(errors="replace")
        if found := _ERROR.search(text):
            path, line, message = found.groups()
            raise InputError(f"{path}:{line}: {message}")
        words = " ".join(text.split())[:300] or "no message"
        raise InputError(f"{source.path}: expected to compile, found: {words}")
    return "nvcc"
