"""CUDA compiled at run time by NVRTC, which comes with CuPy's extras; no nvcc."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

from ...devices import arrays
from ...errors import InputError, UnsupportedError
from ...io import cache
from ...target import Target
from .contracts import HEADER, INCLUDE
from .source import Source

OPTIONS = ("--std=c++17", "-lineinfo", "-default-device")

#: Dynamic shared memory that a launch has without asking, in bytes.
PLAIN_SHARED = 48 * 1024

_ERROR = re.compile(r"^(.*?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", re.MULTILINE)


@once
def _nvrtc() -> Any:
    arrays.import_cupy("compiling CUDA kernels")
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # CuPy raises what the libraries raise
        raise UnsupportedError(
            f"NVRTC: needed for CUDA kernels of your own, found: {error}; install the extra "
            "cnn-engine[cuda13] or cnn-engine[cuda12]"
        ) from error
    return nvrtc


@once
def _includes() -> tuple[str, ...]:
    """Returns the folders of the CUDA headers (mma.h, cuda_fp16.h), where there are any."""
    import cupy

    found = []
    root = cupy.cuda.get_cuda_path()
    if root:
        found.append(Path(root) / "include")
    for package in cupy.__path__:
        site = Path(package).parent / "nvidia"
        found += [site / "cu13" / "include", site / "cuda_runtime" / "include"]
    return tuple(str(path) for path in found if (path / "cuda_fp16.h").exists())


def why_not() -> str | None:
    """Returns why nothing can be compiled here, or None."""
    try:
        _nvrtc()
    except UnsupportedError as error:
        return str(error)
    return None


def compiled_for(target: Target) -> tuple[str, bool]:
    """Returns NVRTC's architecture for a target, and whether it gives machine code (else PTX)."""
    known = sorted(_nvrtc().getSupportedArchs())
    number = target.number
    if number in known:
        return target.native_architecture, True
    older = [arch for arch in known if arch < number]
    if not older:
        raise UnsupportedError(
            f"NVRTC: expected a compute capability of at least {known[0] / 10:g}, found {number / 10:g}"
        )
    return f"compute_{older[-1]}", False


def compile(source: Source, target: Target) -> bytes:
    """Returns a file compiled for a GPU, unless the same content was compiled before.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: CuPy or NVRTC are missing, or do not know such a GPU.
    """
    nvrtc = _nvrtc()
    architecture, machine = compiled_for(target)
    options = (
        f"--gpu-architecture={architecture}",
        *OPTIONS,
        f"-I{INCLUDE}",
        f"-I{source.path.parent}",
    )
    options += tuple(f"-I{path}" for path in _includes())
    header = HEADER.read_text(encoding="utf-8")
    name = cache.key(source.text, header, str(nvrtc.getVersion()), *options[: 1 + len(OPTIONS)])
    name += ".cubin" if machine else ".ptx"
    # A file of the user's that is included may have changed.
    alone = not re.search(r'^\s*#\s*include\s*"(?!cnn_engine/)', source.text, re.MULTILINE)
    if alone and (kept := cache.read(name)):
        return kept
    made, log = _made(source.text, str(source.path), {}, options, machine)
    if made is None:
        raise _fault(source, log)
    if alone:
        cache.keep(name, made)
    return made


def compile_program(
    text: str, headers: Mapping[str, str], target: Target, *defines: str,
    began: Callable[[], object] = lambda: None,
) -> bytes:  # fmt: skip
    """Returns a program of this package compiled for a GPU, from the user's cache if it is there.

    Args:
        text: of the program.
        headers: what it includes, name -> text, beside CUDA's own.
        target: the GPU.
        defines: names that are defined.
        began: called where it has to be compiled, before it is.

    Raises:
        UnsupportedError: CuPy or NVRTC are missing, do not know such a GPU, or refuse the program.
    """
    nvrtc = _nvrtc()
    architecture, machine = compiled_for(target)
    options = (f"--gpu-architecture={architecture}", *OPTIONS, *(f"-D{name}" for name in defines))
    parts = [part for item in sorted(headers.items()) for part in item]
    name = cache.key(text, *parts, str(nvrtc.getVersion()), *options)
    name += ".cubin" if machine else ".ptx"
    if kept := cache.read(name):
        return kept
    began()
    options += tuple(f"-I{path}" for path in _includes())
    made, log = _made(text, "program.cu", {**headers, **_STANDARD}, options, machine)
    if made is None:
        raise UnsupportedError(
            f"NVRTC: expected to compile a network's kernels, found: {_last(log)}"
        )
    cache.keep(name, made)
    return made


#: What NVRTC lacks of the standard library and the package's own kernels use.
_STANDARD = {
    "cstdint": """#pragma once
namespace std {
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
}
""",
    "type_traits": """#pragma once
namespace std {
template <typename, typename>
inline constexpr bool is_same_v = false;
template <typename T>
inline constexpr bool is_same_v<T, T> = true;
}
""",
}


def _made(
    text: str, path: str, headers: Mapping[str, str], options: tuple[str, ...], machine: bool
) -> tuple[bytes | None, str]:
    """Returns machine code or PTX, or None, and what the compiler said."""
    nvrtc = _nvrtc()
    encoded = [value.encode() for value in headers.values()], [name.encode() for name in headers]
    program = nvrtc.createProgram(text, path, *encoded)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            return None, nvrtc.getProgramLog(program)
        return nvrtc.getCUBIN(program) if machine else nvrtc.getPTX(program).encode(), ""
    finally:
        nvrtc.destroyProgram(program)


def _last(log: str) -> str:
    lines = (line for line in reversed(log.splitlines()) if line.strip(" \0"))
    return next(lines, "no message")


def _fault(source: Source, log: str) -> InputError:
    errors = list(_ERROR.finditer(log))
    if errors:
        path, line, message = errors[0].groups()
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return InputError(f"{path}:{line}: {message}{more}")
    return InputError(f"{source.path}: expected to compile, found: {_last(log)}")


@dataclass(frozen=True)
class Resources:
    """GPU resources of one kernel.

    Attributes:
        registers: a thread.
        shared: bytes per block, static ones; dynamic ones come with the launch.
        local: bytes per thread of memory that stands in for registers: spills, and arrays with indices.
        threads: the most that a block may have.
    """

    registers: int
    shared: int
    local: int
    threads: int


class Module:
    """A compiled CUDA file on a device: its kernels by name."""

    def __init__(self, source: Source, device: Any) -> None:
        import cupy
        from cupy_backends.cuda.api import driver

        self.driver = driver
        self._source = source
        code = compile(source, device.target)
        with device.context:
            self._module = cupy.cuda.function.Module()
            try:
                self._module.load(code)
            except driver.CUDADriverError as error:
                raise InputError(
                    f"{source.path}: expected a module that loads, found: {error}"
                ) from None
            for launch in source.launches:
                self.function(launch.function, launch.line)

    def function(self, name: str, line: int) -> Any:
        """Returns the kernel called ``name``; its handle is ``ptr``."""
        try:
            return self._module.get_function(name)
        except self.driver.CUDADriverError:
            raise InputError(
                f'{self._source.path}:{line}: expected extern "C" __global__ void {name}, found none'
            ) from None

    def resources(self, function: Any) -> Resources:
        """Returns the resources of a kernel."""
        get, names = self.driver.funcGetAttribute, self.driver
        return Resources(
            get(names.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
            get(names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr),
            get(names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
            get(names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function.ptr),
        )

    def occupancy(self, function: Any, threads: int, shared: int, device: Any) -> float:
        """Returns the share of a multiprocessor's warps that blocks of this kernel can be."""
        blocks = self.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function.ptr, threads, shared
        )
        attributes = device.context.attributes
        most = attributes["MaxThreadsPerMultiProcessor"] // attributes["WarpSize"]
        return blocks * -(-threads // attributes["WarpSize"]) / most
