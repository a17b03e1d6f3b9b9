"""The compiled CUDA module, or why there is none: asked for here, so that CPU work never loads it."""

from __future__ import annotations

from types import ModuleType

from ..errors import UnsupportedError


def load() -> ModuleType:
    """Returns ``cnn_engine._cuda``.

    Raises:
        UnsupportedError: this installation was built without the CUDA kernels.
    """
    try:
        from .. import _cuda
    except ImportError as error:
        raise UnsupportedError(
            "device cuda: expected an installation with the CUDA kernels, found one built without them "
            f"({error}); install again with nvcc on PATH (see the README's GPU set-up)"
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
        return f"device cuda: expected a CUDA device, found none ({reason or 'no device'})"
    if index >= count:
        return f"device cuda:{index}: expected cuda:0 to cuda:{count - 1}, found no such device"
    return None
