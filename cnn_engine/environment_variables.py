"""The environment variables of this project, in one table: the program's, its build's and its tests'.

``cnn-engine --help`` and the reference page print the table. The program reads its own through :func:`get`.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    """One variable.

    Attributes:
        values: what it may be set to.
        default: what holds where it is not set.
        meaning: one sentence.
    """

    values: str
    default: str
    meaning: str


#: The values of a variable that is no setting of a user's.
INTERNAL = "set by the program alone"

#: Read while the program runs.
PROGRAM: dict[str, Variable] = {
    "CNN_ENGINE_CPU_ISA": Variable(
        "baseline, avx2 or avx512",
        "the widest that the CPU has",
        "The instruction set of the CPU kernels. One that the CPU lacks is an error.",
    ),
    "CNN_ENGINE_DATA": Variable(
        "a folder or file",
        "the user's cache, then synthetic images",
        "Where --data auto looks for the network's images. A path that is not there is an error.",
    ),
    "CNN_ENGINE_KERNEL_CACHE": Variable(
        "a folder",
        "cnn_engine/kernels in the user's cache",
        "Keeps kernels compiled at run time and the choices of --tune.",
    ),
    "CNN_ENGINE_SANDBOX": Variable(
        INTERNAL,
        "not set",
        "Tells a process that judges a kernel which layers confine it.",
    ),
}

#: Read by the build: set them before ``pip install``.
BUILD: dict[str, Variable] = {
    "CNN_ENGINE_COMMIT": Variable(
        "a commit's name", "asked of git", "The commit that results name as theirs."
    ),
    "CNN_ENGINE_CUDA": Variable(
        "auto, on or off",
        "auto",
        "Builds the CUDA kernels: where nvcc is found, always (else an error), or never.",
    ),
    "CNN_ENGINE_CUDA_ARCHITECTURES": Variable(
        "such as 80, 89 or 90a; all",
        "the GPUs of this machine; without one, PTX for 8.0",
        "The compute capabilities to build machine code for.",
    ),
    "CNN_ENGINE_OPENACC": Variable(
        "auto, on or off",
        "auto",
        "Builds the OpenACC module: where a compiler has it, always (else an error), or never.",
    ),
    "CNN_ENGINE_OPENACC_SHAPE": Variable(
        "gangs:workers:vector, such as 0:4:32",
        "left to the compiler",
        "The clauses of the OpenACC convolutions; 0 leaves one to the compiler.",
    ),
}

#: Read by the tests and benchmarks.
TESTS: dict[str, Variable] = {
    "CNN_ENGINE_EMULATOR_FLAGS": Variable(
        "flags", "none", "Further flags of the emulated CUDA kernels, such as -fsanitize=address."
    ),
    "CNN_ENGINE_FUZZ": Variable(
        "a count", "40", "How many damaged result files test_damaged_results.py makes of each kind."
    ),
    "CNN_ENGINE_LOWERINGS": Variable(
        "a count", "40", "How many random networks of each kind test_lowering.py rewrites."
    ),
    "CNN_ENGINE_LOWERING_SEED": Variable("a number", "0", "The first seed of those networks."),
    "CNN_ENGINE_OPENACC_GPU": Variable("1", "not set", "Runs the OpenACC tests on a GPU too."),
    "CNN_ENGINE_REQUIRE_BROWSER": Variable(
        "1", "not set", "Makes a missing browser an error, where its tests would skip."
    ),
    "CNN_ENGINE_TEST_ARTIFACTS": Variable(
        "a folder", "not kept", "Keeps the browser tests' screenshots."
    ),
    "CNN_ENGINE_TEST_DATA": Variable(
        "a folder", "../shared/data", "Real images and weights; tests that need them skip without."
    ),
    "CNN_ENGINE_TEST_REPEATS": Variable(
        "a count", "200", "How often tests that look for races repeat a pass."
    ),
    "CNN_ENGINE_TEST_REPORTS": Variable(
        "a folder", "made by the tests", "Opens your own pages and traces in the browser tests."
    ),
    "CNN_ENGINE_WINDOW_CASES": Variable(
        "a count", "40", "How many random convolutions test_window_bounds.py tries."
    ),
}

#: Names of others that matter here; each is read as its owner documents it.
OTHERS: dict[str, Variable] = {
    "CMAKE_ARGS": Variable("options", "none", "Further options of the build's CMake."),
    "CMAKE_CXX_COMPILER_LAUNCHER": Variable(
        "such as ccache", "none", "Makes a second build of the same code take seconds."
    ),
    "CUDACXX, CUDA_PATH, CUDA_HOME": Variable(
        "paths", "nvcc on PATH, /usr/local/cuda, /opt/cuda", "Where the build looks for nvcc."
    ),
    "CUDA_VISIBLE_DEVICES": Variable(
        "indices", "all GPUs", "The GPUs that the program sees; infer starts a worker on each."
    ),
    "CXX": Variable("a compiler", "g++, c++ or clang++", "Compiles kernels of your own in C++."),
    "RAY_worker_niceness": Variable(
        "a niceness", "0", "Priority of infer's workers on Ray instances that it starts."
    ),
    "SLURM_NTASKS": Variable(
        "a count", "1", "The ranks that ensemble --dry-run assumes without --ranks."
    ),
}


def get(name: str) -> str | None:
    """Returns the value of one of the program's variables, or None where it is not set or empty.

    Raises:
        KeyError: the table has no such variable.
    """
    PROGRAM[name]
    return os.environ.get(name) or None
