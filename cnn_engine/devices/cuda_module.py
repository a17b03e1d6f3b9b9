"""The compiled CUDA module, or why there is none: asked for here, so that CPU work never loads it."""

from __future__ import annotations

import functools
import importlib.util
import re
from types import ModuleType

from ..errors import UnsupportedError
from ..target import Target, gpu_features

#: The oldest compute capability that the kernels can be built for: asynchronous copies, bfloat16.
LEAST_CAPABILITY = (8, 0)


def load() -> ModuleType:
    """Returns ``cnn_engine._cuda``.

    Raises:
        UnsupportedError: this installation was built without the CUDA kernels, or they cannot be loaded.
    """
    try:
        from .. import _cuda
    except ImportError as error:
        if importlib.util.find_spec("cnn_engine._cuda") is not None:
            raise UnsupportedError(
                f"device cuda: expected the CUDA kernels to load, found: {error}; install again (see "
                "docs/how-to/install_gpu.md)"
            ) from error
        raise UnsupportedError(
            "device cuda: expected an installation with the CUDA kernels, found one built without them; "
            "install again with nvcc on PATH (see docs/how-to/install_gpu.md)"
        ) from error
    return _cuda


def unavailable(index: int = 0) -> str | None:
    """Returns why CUDA device ``index`` cannot be used, or None when it can."""
    try:
        _cuda = load()
    except UnsupportedError as error:
        return str(error)
    count, reason = _cuda.device_count()
    if count == 0:
        return (
            f"device cuda: expected an NVIDIA GPU, found none ({_why_none(_cuda, reason)}); "
            "the device cpu needs none"
        )
    if index >= count:
        return f"device cuda:{index}: expected cuda:0 to cuda:{count - 1}, found no such device"
    properties = _cuda.device_properties(index)
    capability = properties["compute_capability"]
    if covers(_cuda.architectures, capability):
        return None
    major, minor = capability
    remedy = f"they need at least {_text(LEAST_CAPABILITY)}"
    if capability >= LEAST_CAPABILITY:
        remedy = f"install again with CNN_ENGINE_CUDA_ARCHITECTURES={major}{minor}"
    return (
        f"device cuda:{index}: expected a compute capability that the kernels were built for "
        f"({_cuda.architectures}), found {_text(capability)} ({properties['name']}); {remedy}"
    )


def _why_none(kernels: ModuleType, reason: str) -> str:
    """Returns why there is no device, without CUDA's name of the error."""
    driver, built = kernels.driver_version(), kernels.runtime_version()
    if driver == 0:
        return "no NVIDIA driver is installed"
    if driver // 1000 < built // 1000:
        return (
            f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, the kernels need "
            f"{built // 1000}.{built % 1000 // 10}: update the driver"
        )
    return reason.partition(": ")[2] or "the driver names no device"


def device_count() -> int:
    """Returns how many CUDA devices there are; 0 without the CUDA kernels."""
    try:
        return load().device_count()[0]
    except UnsupportedError:
        return 0


class Current:
    """Makes a CUDA device the calling thread's current one, for ``with``, also within another.

    Unlike CuPy's and PyTorch's it makes no context on the device that was current before, or on the first
    where none was.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._kernels = load()

    def __enter__(self) -> None:
        self._kernels.push_device(self._index)

    def __exit__(self, *exception: object) -> None:
        self._kernels.pop_device()


def covers(architectures: str, capability: tuple[int, int]) -> bool:
    """Returns whether kernels built for ``architectures`` run on a device of this compute capability.

    Args:
        architectures: see :func:`code_for`.
    """
    return code_for(architectures, capability) is not None


def code_for(architectures: str, capability: tuple[int, int]) -> str | None:
    """Returns the architecture of the code that a device of this compute capability runs, as ``sm_90a``.

    None: of what was compiled, nothing runs there.

    Args:
        architectures: as CMake has them, apart by spaces, such as ``"80-real 90a-real 120-virtual"``. Machine
            code (``real``) runs on its own major version from its own minor version on; PTX (``virtual``) on
            whatever is not older; those that end in ``a`` on their own version alone, in ``f`` on their own
            major version. Words without a number (``native``) are taken to fit.
    """
    best: tuple[tuple[int, int], bool, str] | None = None
    for entry in architectures.split():
        found = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", entry)
        if found is None:
            return f"sm_{capability[0]}{capability[1]}a"
        built = int(found[1]), int(found[2])
        same_major = built[0] == capability[0]
        if found[3] == "a":
            fits = built == capability
        else:
            fits = built <= capability and (same_major or (found[3] == "" and found[4] != "-real"))
        # As the driver does: machine code before PTX, then the newest.
        machine_code = same_major and found[4] != "-virtual"
        if fits and (best is None or (machine_code, built) > (best[1], best[0])):
            best = built, machine_code, f"sm_{found[1]}{found[2]}{found[3]}"
    return best and best[2]


@functools.cache
def target(index: int) -> Target:
    """Returns the capabilities of device ``index``, read once per process; makes a context there."""
    kernels = load()
    properties = kernels.device_properties(index)
    major, minor = capability = properties["compute_capability"]
    architecture = f"sm_{major}{minor}"
    built = {
        folder: code
        for folder, architectures in kernels.folders.items()
        if (code := code_for(architectures, capability))
    }
    return Target(
        properties["name"], "cuda", architecture, gpu_features(f"{architecture}a"), built=built,
        **kernels.device_target(index),
    )  # fmt: skip


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
