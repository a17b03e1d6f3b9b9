"""What compilers made of kernel files, kept by content. It may be deleted, and never fails anything."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def key(*parts: str | bytes) -> str:
    """Returns a name for what is made from ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def folder() -> Path:
    """Returns the folder, made where it can be; else one of this process's own."""
    wanted = os.environ.get("CNN_ENGINE_KERNEL_CACHE")
    if wanted:
        path = Path(wanted)
    else:
        import platformdirs

        path = platformdirs.user_cache_path("cnn_engine") / "kernels"
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
    return _own()


_made: list[tempfile.TemporaryDirectory] = []


def _own() -> Path:
    if not _made:
        _made.append(tempfile.TemporaryDirectory(prefix="cnn_engine-"))
    return Path(_made[0].name)


def read(name: str) -> bytes | None:
    """Returns what was kept under ``name``, or None."""
    try:
        return (folder() / name).read_bytes()
    except OSError:
        return None


def keep(name: str, data: bytes) -> bool:
    """Keeps ``data`` under ``name``, where that can be done, whole or not at all.

    Returns:
        Whether it is there for other processes, too.
    """
    with contextlib.suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=folder())
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, folder() / name)
        except OSError:
            os.unlink(temporary)
            raise
        return not (_made and folder() == _own())
    return False
