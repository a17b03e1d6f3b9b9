"""Downloads CIFAR-10: ``cnn-engine download cifar10``.

Fetches the official archive of binary records (https://www.cs.toronto.edu/~kriz/cifar.html, which
publishes the checksum), checks it, and unpacks it into the user's cache, where ``--data auto``
looks. An interrupted download resumes.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from cnn_engine.download import command
from cnn_engine.errors import InputError, expected
from cnn_engine.io import fetch

from .dataset import FOLDER, RECORD_BYTES, cache_folder

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_BATCH_BYTES = 10_000 * RECORD_BYTES
_DOCUMENTS = ("batches.meta.txt", "readme.html")
_DOCUMENT_BYTES = 1 << 20
_MAX_ARCHIVE_BYTES = 1 << 30  # the archive has 170 MB
_MAX_UNPACKED_BYTES = 1 << 28  # its members have 184 MB
_MAX_MEMBERS = 16


def download(
    folder: Path,
    url: str = URL,
    md5: str = MD5,
    force: bool = False,
    say: fetch.Say = lambda line: None,
    report: fetch.Report = lambda done, total: None,
) -> Path:
    """Fetches, checks and unpacks the archive; returns the folder of ``*.bin`` files.

    Args:
        folder: where ``cifar-10-batches-bin`` is made, and where an unfinished archive waits.
        url: an ``http://`` or ``https://`` address of the archive.
        md5: the archive's checksum, in hexadecimal.
        force: download again, and replace the folder, even where it is complete.
        say: called with a line of text for the user now and then.
        report: called with the bytes there are and the bytes there will be (None: not known).

    Raises:
        InputError: the archive cannot be fetched, is not the expected one, or cannot be unpacked.
    """
    fetch.check_url(url)
    target = folder / FOLDER
    if not force and _is_complete(target):
        say(f"{target} is there already (--force downloads it again)")
        return target
    if not force and os.path.lexists(target):
        raise expected(
            str(target), f"the whole of {', '.join(_BATCHES)}", "less (--force replaces it)"
        )
    with fetch.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "cifar-10-binary.tar.gz.part"
        with fetch.fetched(url, md5, part, _MAX_ARCHIVE_BYTES, "archive", say, report) as file:
            say(f"unpacking into {target}")
            with fetch.writing(folder):
                _unpack(file, url, target)
    return target


def _is_complete(target: Path) -> bool:
    with suppress(OSError):
        return all((target / name).stat().st_size == _BATCH_BYTES for name in _BATCHES)
    return False


class _Limited:
    """A stream that ends in an error after ``left`` bytes, so that a small archive stays small."""

    def __init__(self, file: IO[bytes], left: int, url: str) -> None:
        self._file, self._left, self._url = file, left, url

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise expected(self._url, f"at most {_MAX_UNPACKED_BYTES} bytes unpacked", "more")
        return data


def _unpack(file: IO[bytes], url: str, target: Path) -> None:
    """Unpacks the expected members of the archive, and puts them at ``target`` as a whole.

    Nothing is taken from a member but its bytes: files get names from a fixed list, so no path,
    link, owner or mode of the archive reaches the disk.
    """
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{FOLDER}."))
    try:
        try:
            with gzip.open(file) as stream:
                limited = _Limited(stream, _MAX_UNPACKED_BYTES, url)
                # "r|" reads forwards in small blocks, so that no header can ask for much memory.
                with tarfile.open(fileobj=limited, mode="r|") as archive:
                    _unpack_members(archive, url, temporary)
        except Exception as error:  # gzip and tarfile have a dozen kinds for broken bytes
            # An OSError with a number is the disk's; gzip's and tarfile's own have none.
            if isinstance(error, InputError) or getattr(error, "errno", None):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise expected(url, "an archive that unpacks", reason) from error
        if missing := [name for name in _BATCHES if not (temporary / name).exists()]:
            raise expected(url, f"an archive with {', '.join(_BATCHES)}", f"no {missing[0]}")
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes folders private; give the usual mode
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack_members(archive: tarfile.TarFile, url: str, folder: Path) -> None:
    for number, member in enumerate(archive):
        if number >= _MAX_MEMBERS:
            raise expected(url, f"at most {_MAX_MEMBERS} members", "more")
        if member.isdir() and member.name.removeprefix("./") == FOLDER:
            continue
        parent, _, name = member.name.removeprefix("./").rpartition("/")
        if parent != FOLDER or name not in _BATCHES + _DOCUMENTS:
            raise expected(url, f"an archive of {FOLDER}/*.bin", f"a member {member.name[:80]!r}")
        if not member.isreg() or member.issparse():
            raise expected(f"{url}: {name}", "a plain file", "a link, folder or device")
        if (folder / name).exists():
            raise expected(f"{url}: {name}", "one member of that name", "two")
        if name in _BATCHES and member.size != _BATCH_BYTES:
            raise expected(f"{url}: {name}", f"{_BATCH_BYTES} bytes", member.size)
        if name in _DOCUMENTS and member.size > _DOCUMENT_BYTES:
            raise expected(f"{url}: {name}", f"at most {_DOCUMENT_BYTES} bytes", member.size)
        source = archive.extractfile(member)
        assert source is not None  # a plain file, as was seen above
        with open(folder / name, "xb") as output:
            shutil.copyfileobj(source, output)
            output.flush()
            os.fsync(output.fileno())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _replace(source: Path, target: Path) -> None:
    """Renames ``source`` to ``target``; what was there goes once the new folder is in place."""
    old = None
    if os.path.lexists(target):
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{FOLDER}.old.")) / FOLDER
        os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        if old:
            os.rename(old, target)
        raise
    finally:
        if old:
            shutil.rmtree(old.parent, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 2 error, 130 interrupted."""
    return command(
        arguments,
        prog="cnn-engine download cifar10",
        name="CIFAR-10",
        url=URL,
        url_help="the archive",
        folder=cache_folder(),
        holds=f"{FOLDER}/",
        download=lambda folder, url, force, say, report: download(
            folder, url, MD5, force, say, report
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
