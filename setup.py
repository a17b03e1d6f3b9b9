"""Hands the compiled modules to CMake, and says which folders are packages; the rest is in pyproject.toml.

Options are environment variables, so that they reach the build through pip:
``CNN_ENGINE_CUDA`` (``auto``, ``on``, ``off``), ``CNN_ENGINE_CUDA_ARCHITECTURES`` (``90a``, ``all``),
``CNN_ENGINE_OPENACC`` (``auto``, ``on``, ``off``), ``CNN_ENGINE_OPENACC_SHAPE`` (such as ``0:4:32``),
``CNN_ENGINE_COMMIT`` (where there is no git to ask), and ``CMAKE_ARGS`` for anything else.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

#: Folders at the top of a checkout that are installed under the package's own name.
WORKLOADS = {f"cnn_engine.workloads.{name}": name for name in ("cifar10", "fashion_mnist")}


class CMakeBuild(build_ext):
    """Runs CMake once; it puts every compiled module into the package's folder of the build."""

    def run(self) -> None:
        output = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "cnn_engine"
        # One folder for each Python, kept, so that a second build compiles what has changed alone; pip would
        # have a temporary one.
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
            f"-DCNN_ENGINE_OUTPUT={output}", f"-DPython_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        for option, default in (
            ("CNN_ENGINE_CUDA", "auto"),
            ("CNN_ENGINE_CUDA_ARCHITECTURES", "default"),
            ("CNN_ENGINE_OPENACC", "auto"),
            ("CNN_ENGINE_OPENACC_SHAPE", ""),
            ("CNN_ENGINE_COMMIT", ""),
        ):
            configure.append(f"-D{option}={os.environ.get(option, default)}")
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if "CMAKE_GENERATOR" not in os.environ:
            # Named, since the kept folder remembers that of the last build's environment, which is gone.
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"]
        subprocess.run(configure, check=True)
        _build(["cmake", "--build", str(build), "--parallel"])

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "cnn_engine"
        return [str(path) for path in folder.glob("_[co]*.so")]


def _build(command: list[str]) -> None:
    """Runs ``command``; its progress also goes to the user's terminal, which pip keeps quiet for minutes."""
    terminal = None
    with suppress(OSError):
        terminal = open("/dev/tty", "w", encoding="utf-8")  # noqa: SIM115 - closed below
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print(line, end="", flush=True)
        if terminal and (step := re.match(r"\[(\d+)/(\d+)\]", line)):
            terminal.write(f"\rcnn_engine: compiling {step[1]} of {step[2]}\x1b[K")
            terminal.flush()
    if terminal:
        terminal.write("\r\x1b[K")
        terminal.close()
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)


setup(
    packages=[*find_packages(include=["cnn_engine", "cnn_engine.*"]), *WORKLOADS],
    package_dir=WORKLOADS,
    ext_modules=[Extension("cnn_engine._cpu", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
