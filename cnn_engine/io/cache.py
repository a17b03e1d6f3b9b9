"""The user's cache of compiled kernels and tuning results, and which of its files are trusted.

What is read here is run, so nothing counts that another user could have written. The folder and the file
must belong to the effective user and be writable by nobody else, for root too. The file must be a regular
one, opened without following links and of bounded size. Compiled code starts with a digest of its content. A
file that fails any of this is as good as absent: its content is made anew and replaces it.

The cache may be deleted at any time, and no state of it is an error. Without a trusted folder that can be
written, a private temporary folder of this process stands in.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from .. import environment_variables
from ..errors import printable

#: What files with a digest begin with; a digest in hexadecimal and a newline follow.
_HEAD = b"cnn_engine cache 1\n"
_HEAD_BYTES = len(_HEAD) + 2 * hashlib.sha256().digest_size + 1

#: Bytes of a file that are read.
MOST_BYTES = 256 << 20

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


class Untrusted(OSError):
    """A file or folder that others could have written."""


def key(*parts: str | bytes) -> str:
    """Returns a file name for something made from ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def wanted() -> Path:
    """Returns the folder that is used where it can be: ``$CNN_ENGINE_KERNEL_CACHE``, or the user's cache."""
    if path := environment_variables.get("CNN_ENGINE_KERNEL_CACHE"):
        return Path(path)
    import platformdirs

    return platformdirs.user_cache_path("cnn_engine") / "kernels"


def read(name: str) -> bytes | None:
    """Returns the content that :func:`keep` stored, or None where there is none or it is damaged."""
    try:
        content = read_plain(name)
    except OSError:
        return None
    data = content[_HEAD_BYTES:]
    return data if content[:_HEAD_BYTES] == _head(data) else None


def keep(name: str, data: bytes) -> bool:
    """Stores ``data`` under ``name`` with its digest, whole or not at all.

    Returns:
        Whether other processes will find it.
    """
    return keep_plain(name, _head(data) + data)


def _head(data: bytes) -> bytes:
    return _HEAD + hashlib.sha256(data).hexdigest().encode() + b"\n"


def read_plain(name: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a trusted file, without a digest: for data that the caller checks.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is not trusted; says why.
    """
    with _folder() as (_, folder):
        # Without O_NONBLOCK, opening a fifo would wait for a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Untrusted(errno.EPERM, "expected a regular file")
        _check_owner(found)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes")
    return content


def keep_plain(name: str, content: bytes) -> bool:
    """Stores ``content`` under ``name`` as it is; otherwise as :func:`keep`."""
    with contextlib.suppress(OSError), _folder() as (path, folder):
        temporary = f".{name}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
        return path == wanted()
    return False


def folder() -> Path:
    """Returns the folder that is used now, for messages; files in it are read and written by name."""
    with _folder() as (path, _):
        return path


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """Yields the folder's path and its descriptor, by which alone its files are opened."""
    path = wanted()
    try:
        descriptor = _open_folder(path)
    except OSError as error:
        if isinstance(error, Untrusted):
            _say_once(
                f"cache: {printable(path)} is not used: {error.strerror}; a temporary folder stands in"
            )
        path = private()
        descriptor = _open_folder(path)
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    """Opens a trusted, writable folder, made where it is missing.

    Raises:
        Untrusted: others could write to it.
        OSError: it cannot be made, opened or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
    except OSError as error:
        if path.is_symlink():
            raise Untrusted(errno.ELOOP, "it is a link; name the folder itself") from error
        raise
    try:
        _check_owner(os.fstat(descriptor))
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=descriptor):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(found: os.stat_result) -> None:
    """Raises Untrusted where another user owns a file or folder, or may write to it."""
    user = os.geteuid()
    if found.st_uid != user:
        raise Untrusted(errno.EPERM, f"it belongs to user {found.st_uid}, and this is user {user}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise Untrusted(errno.EPERM, f"others may write to it (mode {mode:04o}); chmod go-w it")


_made: list[tempfile.TemporaryDirectory] = []
_said: set[str] = set()


def private() -> Path:
    """Returns a temporary folder of this process, which nobody else can write to."""
    if not _made:
        _made.append(tempfile.TemporaryDirectory(prefix="cnn_engine-"))
    return Path(_made[0].name)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
