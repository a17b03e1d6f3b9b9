"""The compiled OpenACC module, or why there is none: asked for here, so that no other work loads libgomp."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from ..errors import UnsupportedError

#: Of libgomp, for NVIDIA GPUs; it is looked for beside the module, then where the system has libraries.
PLUGIN = "libgomp-plugin-nvptx.so.1"

#: The first region on a GPU compiles its PTX; a driver that hangs must not hang us.
PROBE_S = 120


def load() -> ModuleType:
    """Returns ``cnn_engine._openacc``.

    Raises:
        UnsupportedError: this installation was built without it, or it cannot be loaded.
    """
    try:
        from .. import _openacc
    except ImportError as error:
        if importlib.util.find_spec("cnn_engine._openacc") is not None:
            raise UnsupportedError(
                f"device openacc: expected the OpenACC module to load, found: {error}; where it is a libgomp "
                "that another package loaded first (PyTorch has one), use OpenACC before importing that "
                "package, or in a process of its own"
            ) from error
        raise UnsupportedError(
            "device openacc: expected an installation with the OpenACC module, found one built without it; "
            "install again with GCC or nvc++ (see docs/how-to/openacc.md)"
        ) from error
    return _openacc


def unavailable() -> str | None:
    """Returns why no GPU can be used through OpenACC, or None when one can."""
    try:
        module = load()
    except UnsupportedError as error:
        return str(error)
    if not module.offload:
        return (
            "device openacc: expected a build that offloads to a GPU, found one for the host alone "
            f"({module.compiler}); {offload_remedy(module)}, or take --device openacc:host"
        )
    if module.device_count() == 0:
        return f"device openacc: expected a GPU through OpenACC, found none ({why_no_gpu(module)})"
    return None if _ran else _probe()


def offload_remedy(module: ModuleType) -> str:
    """Returns how to make a build without an offload target offload."""
    version = module.compiler.split()[-1].split(".")[0]
    return f"install GCC's offload compiler (Debian: gcc-{version}-offload-nvptx) and build again"


def why_no_gpu(module: ModuleType) -> str:
    """Returns why the OpenACC runtime offers no GPU."""
    if module.offload == "nvptx" and not _loads(PLUGIN, Path(module.__file__).parent):
        return (
            f"{PLUGIN} cannot be loaded: install it (Debian: libgomp-plugin-nvptx1), or put it beside "
            "the module"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 cannot be loaded"
    code = driver.cuInit(0)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        return f"the driver says: {(text.value or b'').decode() or code}"
    return "the driver has a GPU, and the OpenACC runtime does not offer it"


def _loads(library: str, folder: Path) -> bool:
    for path in (str(folder / library), library):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return True
    return False


#: Whether a loop has run on the GPU: to ask again for every engine would take a second each.
_ran = False


def _probe() -> str | None:
    """Runs a loop on the GPU in a process of its own, which the runtime ends when it cannot."""
    global _ran
    package = Path(__file__).parents[1]
    code = "from cnn_engine import _openacc; print('ran there:', _openacc.probe(0))"
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    try:
        found = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, text=True,
            capture_output=True, timeout=PROBE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return (
            f"device openacc: expected a loop to run on the GPU, found none after {PROBE_S} seconds"
        )
    _ran = found.stdout.strip() == "ran there: True"
    if _ran:
        return None
    said = [line.strip() for line in (found.stderr or found.stdout).splitlines() if line.strip()]
    reason = "; ".join(said[-3:]) or f"the process ended with {found.returncode}"
    return f"device openacc: expected a loop to run on the GPU, found: {reason}"
