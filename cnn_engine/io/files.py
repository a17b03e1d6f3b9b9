"""Writing outputs whole or not at all, and saying why a file cannot be read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, expected


def describe_os_error(error: OSError) -> str:
    """Returns the reason of ``error`` without the path, which the caller names itself."""
    return error.strerror or str(error)


def status(path: Path) -> os.stat_result:
    """Returns the system's status of ``path``.

    Raises:
        InputError: there is nothing, or it may not be looked at.
    """
    try:
        return path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: expected a file or folder, found: {reason}") from error


def read_bytes(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a regular file.

    Raises:
        InputError: it cannot be read, is no regular file (a device may never end, and a pipe may never
            begin), or has more than ``most_bytes``.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise expected(str(path), "a file", "a device, a pipe or a socket")
            content = file.read(most_bytes + 1)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error
    if len(content) > most_bytes:
        raise expected(str(path), f"at most {most_bytes:,} bytes", "more")
    return content


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """Returns the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        InputError: as :func:`read_bytes`, or it is no such text.
    """
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise expected(str(path), "text in UTF-8", error) from error


#: Bytes of a JSON document that are read: far more than a result with all of its samples takes. What Python
#: makes of it may be twenty times as large.
MOST_JSON_BYTES = 64 << 20


def read_json(path: str | os.PathLike[str], wanted: str) -> Any:
    """Returns the content of a JSON file.

    Args:
        wanted: what it is expected to be, for the message.

    Raises:
        InputError: as :func:`read_bytes`, with :data:`MOST_JSON_BYTES`, or it is no JSON.
    """
    return parse_json(read_bytes(path, MOST_JSON_BYTES), str(path), wanted)


def parse_json(content: bytes | str, name: str, wanted: str) -> Any:
    """Returns the content of a JSON document; ``name`` and ``wanted`` are for the message.

    Raises:
        InputError: it is no JSON, is nested too deeply, or has an integer of thousands of digits.
    """
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise expected(name, wanted, f"something else ({error})") from error


#: How a file is made that nobody else has.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _beside(path: Path) -> Path:
    """Returns a new name beside ``path``, known before there is a file: an interruption leaves none."""
    return path.parent / f".{path.name}.{os.urandom(4).hex()}"


def check_writable(path: str | os.PathLike[str], option: str) -> Path:
    """Checks, before any work is done, that ``path`` can be created.

    Raises:
        InputError: its folder is missing or not writable, or ``path`` is a folder.
    """
    path = Path(path)
    # Renaming onto a device or a pipe would destroy it. Path.exists fails of a name that is too long.
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if path.is_dir() else "a special file"
        raise InputError(f"{option}: expected a file to write, found {kind} at {path}")
    folder = path.parent
    if not os.path.isdir(folder):
        raise InputError(f"{option}: expected an existing folder, found none at {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option}: expected a writable folder, found {folder} without permission")
    probe = _beside(path)
    try:  # access() does not see a read-only mount or a kernel file system; creating a file does
        os.close(os.open(probe, _NEW, 0o600))
    except OSError as error:
        raise InputError(
            f"{option}: cannot write in {folder}: {describe_os_error(error)}"
        ) from error
    finally:
        with suppress(OSError):
            os.unlink(probe)
    return path


def make_folder(path: str | os.PathLike[str], option: str) -> Path:
    """Creates ``path`` and its parents where they are missing.

    Raises:
        InputError: it cannot be created, or has no name, as where a variable of a script is not set.
    """
    if not os.fspath(path):
        raise InputError(f"{option}: expected a folder, found no name")
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{option}: expected a folder, found a file at {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{option}: cannot create {path}: {reason}") from error
    return path


def lock_folder(path: Path, option: str) -> int:
    """Keeps other commands from ``path`` for as long as the descriptor that is returned is open.

    The system gives the lock free when this process ends, however it does.

    Raises:
        InputError: another command has it, or it cannot be locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            wanted = f"a folder that no other command writes, for {path}"
            raise expected(option, wanted, "another command at work in it") from None
        raise InputError(f"{option}: cannot lock {path}: {describe_os_error(error)}") from error
    return descriptor


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file next to ``path``, and renames it to ``path`` when the block ends well.

    ``mode`` is ``"w"`` (UTF-8 text) or ``"wb"``. When the block raises, ``path`` is left as it was.

    Raises:
        InputError: the file cannot be created, written or renamed.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        descriptor = os.open(temporary, _NEW, 0o666)
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {describe_os_error(error)}") from error
    finally:
        with suppress(OSError):  # it has its own name where all went well
            os.unlink(temporary)


def write_text(path: str | os.PathLike[str], document: str) -> None:
    """Writes ``document`` to ``path``, whole or not at all; ``"-"`` is standard output.

    Raises:
        InputError: it cannot be written.
    """
    if path == "-":
        sys.stdout.write(document)
    else:
        with atomic_write(path) as file:
            file.write(document)
