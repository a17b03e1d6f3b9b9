"""Hands the compiled modules to CMake; all else about the project is in pyproject.toml.

Options are environment variables, so that they reach the build through pip:
``CNN_ENGINE_CUDA`` (``auto``, ``on``, ``off``), ``CNN_ENGINE_CUDA_ARCHITECTURES`` (such as ``90a``),
``CNN_ENGINE_COMMIT`` (where there is no git to ask), and ``CMAKE_ARGS`` for anything else.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake once; it puts every compiled module into the package's folder of the build."""

    def run(self) -> None:
        output = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "cnn_engine"
        build = Path(self.build_temp).resolve()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
            f"-DCNN_ENGINE_OUTPUT={output}", f"-DPython_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        for option in ("CNN_ENGINE_CUDA", "CNN_ENGINE_CUDA_ARCHITECTURES", "CNN_ENGINE_COMMIT"):
            if option in os.environ:
                configure.append(f"-D{option}={os.environ[option]}")
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if "CMAKE_GENERATOR" not in os.environ:
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel"], check=True)

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "cnn_engine"
        return [str(path) for path in folder.glob("_c*.so")]


setup(ext_modules=[Extension("cnn_engine._cpu", sources=[])], cmdclass={"build_ext": CMakeBuild})
