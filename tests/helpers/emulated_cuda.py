"""CUDA kernels on the host: csrc/cuda's own files, rewritten where C++ is not CUDA, and compiled by g++.

``tests/native/emulator`` has what they are compiled with, and says what it finds.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import fake_cuda
import pybind11
import pytest

from cnn_engine import _cpu

TOP = Path(__file__).parents[2]
EMULATOR = TOP / "tests/native/emulator"

#: Files that are compiled, beside the module that binds their functions.
SOURCES = (
    "common/copy_nd.cu", "common/gather.cu", "common/quantized_pointwise.cu", "sm75/linear_mma.cu",
    "sm75/quantized_conv2d.cu",
)  # fmt: skip
SOURCES_80 = "sm80/conv2d_nhwc.cu", "sm80/conv2d_nhwc_float16.cu"
SOURCES_90 = ("sm90/quantized_conv2d_wgmma.cu",)

#: csrc/bindings is compiled with hidden symbols, as a wheel's modules are: see CMakeLists.txt.
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Werror",
    "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-maybe-uninitialized",
)  # fmt: skip


#: What ptx.h has, and how an instruction begins: behind a guard's registers, labels and comparisons.
_KNOWN = (EMULATOR / "ptx.h").read_text()
_OPCODE = re.compile(r"\s*(?!\.|setp\b|selp\b|@|again:)([\w.:]+)")


def _closing(text: str, at: int) -> int:
    """Returns where the parenthesis at ``at`` is closed; strings may hold others."""
    depth, quoted = 0, False
    while True:
        if text[at] == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted and text[at] in "()":
            depth += 1 if text[at] == "(" else -1
            if depth == 0:
                return at
        at += 1


def _instruction(statement: str) -> str:
    """Returns the call that stands for what follows ``asm``: the instruction's name, and its operands."""
    text = ";".join(re.findall(r'"([^"]*)"', statement))
    opcode = next(filter(None, map(_OPCODE.match, re.split(r"[;{}]|\\n", text))), None)
    operands, at = [], 0
    while found := re.compile(r'"[+=]*[a-z]+"\s*(?=\()').search(statement, at):
        at = _closing(statement, found.end())
        operands.append(statement[found.end() + 1 : at])
    name = re.sub(r"\W+", "_", opcode[1]) if opcode is not None else ""
    if not name or not re.search(rf"\b{name}\b", _KNOWN):
        return '::emulator::Block::current->fail("expected an instruction that ptx.h has")'
    return f"::emulator::ptx::{name}({', '.join(operands)})"


def rewritten(text: str) -> str:
    """Returns CUDA's text as C++: instructions, shared variables and launches as the emulator has them."""
    parts, at = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile\s*)?(?=\()", text):
        end = _closing(text, found.end())
        parts += text[at : found.start()], _instruction(text[found.end() + 1 : end])
        at = end + 1
    text = "".join([*parts, text[at:]])
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(::emulator::shared_memory);", text,
    )  # fmt: skip
    text = re.sub(
        r"__shared__ ((?:__align__\(\d+\) )?[\w:<>, ]+? (\w+)((?:\[[^;]*\])*);)",
        r"static \1 ::emulator::poison_once(\2);", text,
    )  # fmt: skip
    return re.sub(
        r"([\w:]+(?:<[\w:, ()]+>)?)<<<(.*?)>>>\(",
        r"::emulator::run({\2}, \1, ",
        text,
        flags=re.DOTALL,
    )


def _rewrite(to: Path) -> None:
    for file in (TOP / "csrc/cuda").rglob("*.c*"):
        copy = to / file.relative_to(TOP / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(rewritten(file.read_text()))


def _compile(architecture: int, options: tuple[str, ...], to: Path) -> None:
    compiler = [shutil.which("ccache"), "g++"] if shutil.which("ccache") else ["g++"]
    _rewrite(to)
    includes = [EMULATOR, to, TOP / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    flags = [
        *FLAGS, *options, f"-D__CUDA_ARCH__={architecture}0",
        *(["-D__CUDA_ARCH_FEAT_SM90_ALL"] if architecture == 90 else []),
        f"-DCNN_ENGINE_MODULE=emulated_{architecture}", *(f"-I{folder}" for folder in includes),
    ]  # fmt: skip
    sources = SOURCES
    if architecture >= 80:
        sources += SOURCES_80
    if architecture >= 90:
        sources += SOURCES_90
    files = [EMULATOR / "module.cpp", *(to / "cuda" / name for name in sources)]

    def compiled(file: Path) -> str:
        target = str(to / f"{file.stem}.o")
        source = "-include", "cuda_runtime.h", "-x", "c++", "-c", str(file)
        _run(*compiler, *flags, *source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as two:
        objects = list(two.map(compiled, files))
    made = to / "module.so.part"
    _run("g++", "-shared", *options, *objects, "-o", str(made))
    made.rename(to / "module.so")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")


@cache
def module(architecture: int = 80) -> Any:
    """Returns csrc/cuda's functions as compiled for ``architecture``, such as 80; build/ keeps them."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs g++")
    options = tuple(os.environ.get("CNN_ENGINE_EMULATOR_FLAGS", "").split())
    files = [*TOP.glob("csrc/*/*.h"), *(TOP / "csrc/cuda").rglob("*.c*"), *EMULATOR.rglob("*.*")]
    parts = [sys.version, str(options), str(_cpu.__file__), Path(__file__).read_text()]
    parts += [file.read_text() for file in sorted([*files, TOP / "csrc/ops/operators.def"])]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    to = TOP / "build" / f"emulated-{architecture}"
    to.mkdir(parents=True, exist_ok=True)
    with open(to / "key", "a+") as stamp:  # processes of one test run compile once
        fcntl.flock(stamp, fcntl.LOCK_EX)
        stamp.seek(0)
        if stamp.read() != key:
            stamp.truncate(0)
            _compile(architecture, options, to)
            stamp.write(key)
    spec = importlib.util.spec_from_file_location(f"emulated_{architecture}", to / "module.so")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


#: Functions that a fake GPU takes from here; others are the CPU's.
INTEGERS = (
    "copy_nd", "gather", "quantized_conv2d_packed", "quantized_conv2d_pack",
    "quantized_conv2d_workspace", "quantized_conv2d", "quantize_linear", "dequantize_linear", "lookup",
    "quantized_add", "quantized_mul", "quantized_mean", "quantized_max_pool2d",
)  # fmt: skip
INTEGERS_90 = tuple(f"quantized_conv2d_wgmma{what}" for what in ("_takes", "_packed", "_pack", ""))


def install(monkeypatch: Any, architecture: int) -> None:
    """Makes every device ``cuda...`` a fake whose kernels of integers are emulated ones."""
    fake_cuda.install(monkeypatch, tensor_cores=architecture >= 80)
    found = module(architecture)
    more = INTEGERS_90 if architecture >= 90 else ()
    for name in (*INTEGERS, *more):
        function = staticmethod(getattr(found, name))
        monkeypatch.setattr(fake_cuda.FakeKernels, name, function, raising=False)
