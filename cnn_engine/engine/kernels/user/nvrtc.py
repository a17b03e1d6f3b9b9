"""CUDA files of a user's own: compiled at run time by NVRTC, which comes with CuPy's extras; no nvcc."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

from ....devices import arrays
from ....errors import InputError, UnsupportedError
from . import cache
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


def architecture(capability: tuple[int, int]) -> tuple[str, bool]:
    """Returns what NVRTC is to compile for, and whether that is machine code (else PTX)."""
    known = sorted(_nvrtc().getSupportedArchs())
    number = 10 * capability[0] + capability[1]
    if number in known:
        return f"sm_{number}{'a' if number >= 90 else ''}", True
    older = [arch for arch in known if arch < number]
    if not older:
        raise UnsupportedError(
            f"NVRTC: expected a compute capability of at least {known[0] / 10:g}, found {number / 10:g}"
        )
    return f"compute_{older[-1]}", False


def compile(source: Source, capability: tuple[int, int]) -> bytes:
    """Returns a file compiled for a GPU of ``capability``, unless the same content was compiled before.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: CuPy or NVRTC are missing, or do not know such a GPU.
    """
    nvrtc = _nvrtc()
    target, machine = architecture(capability)
    options = (f"--gpu-architecture={target}", *OPTIONS, f"-I{INCLUDE}", f"-I{source.path.parent}")
    options += tuple(f"-I{path}" for path in _includes())
    header = HEADER.read_text(encoding="utf-8")
    name = cache.key(source.text, header, str(nvrtc.getVersion()), *options[: 1 + len(OPTIONS)])
    name += ".cubin" if machine else ".ptx"
    # A file of the user's that is included may have changed.
    alone = not re.search(r'^\s*#\s*include\s*"(?!cnn_engine/)', source.text, re.MULTILINE)
    if alone and (kept := cache.read(name)):
        return kept
    program = nvrtc.createProgram(source.text, str(source.path), (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            raise _fault(source, nvrtc.getProgramLog(program)) from None
        made = nvrtc.getCUBIN(program) if machine else nvrtc.getPTX(program).encode()
    finally:
        nvrtc.destroyProgram(program)
    if alone:
        cache.keep(name, made)
    return made


def _fault(source: Source, log: str) -> InputError:
    errors = list(_ERROR.finditer(log))
    if errors:
        path, line, message = errors[0].groups()
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return InputError(f"{path}:{line}: {message}{more}")
    last = next((line for line in reversed(log.splitlines()) if line.strip(" \0")), "no message")
    return InputError(f"{source.path}: expected to compile, found: {last}")


@dataclass(frozen=True)
class Resources:
    """What one kernel needs of a GPU.

    Attributes:
        registers: a thread.
        shared: bytes a block, static ones; dynamic ones come with the launch.
        local: bytes a thread of memory that stands in for registers: spills, and arrays with indices.
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
        code = compile(source, device.properties["compute_capability"])
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
        """Returns what a kernel needs."""
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
