"""Downloads CIFAR-10: ``python -m cifar10.download``.

Fetches the official archive of binary records (https://www.cs.toronto.edu/~kriz/cifar.html, which
publishes the checksum), checks it, and unpacks it into the user's cache, where ``--data auto``
looks. An interrupted download resumes. Plain ``urllib`` does: what is needed beyond one request
(resuming, retrying, a checksum) is not in requests or httpx either.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import http.client
import os
import re
import shutil
import ssl
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cnn_engine.errors import InputError, expected
from cnn_engine.files import atomic_write, describe_os_error

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

_ATTEMPTS = 5  # in a row that bring no new byte
_FIRST_PAUSE_S = 1.0  # doubled after each of them
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16

Report = Callable[[int, "int | None"], None]


def download(
    folder: Path,
    url: str = URL,
    md5: str = MD5,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
    report: Report = lambda done, total: None,
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
    if not re.match(r"https?://[^\s/]+(/\S*)?$", url, re.IGNORECASE):
        raise expected("--url", "an http:// or https:// address", repr(url))
    target = folder / FOLDER
    if not force and _is_complete(target):
        say(f"{target} is there already (--force downloads it again)")
        return target
    if not force and os.path.lexists(target):
        raise expected(
            str(target), f"the whole of {', '.join(_BATCHES)}", "less (--force replaces it)"
        )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "cifar-10-binary.tar.gz.part"
        with _locked(part) as file:
            if _md5(file) != md5:  # an earlier run may have been interrupted while it unpacked
                say(f"downloading {url}")
                _fetch(url, file, part, say, report)
                if (found := _md5(file)) != md5:
                    _discard(part)
                    raise expected(url, f"an archive with MD5 {md5}", f"{found}; it was deleted")
            say(f"unpacking into {target}")
            file.seek(0)
            _unpack(file, url, target)
            _discard(part)
    return target


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into an error about ``path``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {describe_os_error(error)}") from error


def _is_complete(target: Path) -> bool:
    with suppress(OSError):
        return all((target / name).stat().st_size == _BATCH_BYTES for name in _BATCHES)
    return False


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """Opens ``part`` for reading and appending, and keeps a second download from doing the same."""
    with open(part, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{part}: another download is writing it") from error
        yield file


def _validator_file(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _discard(part: Path) -> None:
    _validator_file(part).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def _fetch(
    url: str, file: IO[bytes], part: Path, say: Callable[[str], None], report: Report
) -> None:
    """Makes ``file`` the whole of ``url``, resuming as often as new bytes come."""
    failures = 0
    furthest = 0
    while True:
        try:
            _request(url, file, part, report)
            return
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            if error.code not in (408, 425, 429) and error.code < 500:
                raise expected(url, "the archive", reason) from error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            cause = getattr(error, "reason", error)
            reason = " ".join(str(cause).split()) or type(cause).__name__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise expected(url, "a valid certificate", reason) from error
        with _writing(part):
            size = file.seek(0, os.SEEK_END)
        # A server that restarts from zero and always breaks off early brings nothing new.
        failures = 1 if size > furthest else failures + 1
        furthest = max(furthest, size)
        if failures >= _ATTEMPTS:
            raise InputError(
                f"{url}: expected the archive, found {reason} ({_ATTEMPTS} times); "
                "the same command resumes the download"
            )
        pause = _FIRST_PAUSE_S * 2 ** (failures - 1)
        say(f"the download broke off ({reason}); trying again in {pause:g} s")
        time.sleep(pause)


def _request(url: str, file: IO[bytes], part: Path, report: Report) -> None:
    """Asks for the rest of ``url`` and appends it; raises an OSError when the connection breaks."""
    with _writing(part):
        size = file.seek(0, os.SEEK_END)
    validator = _read_validator(part, url)
    headers = {"User-Agent": "cnn_engine"}
    # Without a validator the two ends might come from two versions of the file: start over.
    if size and validator:
        headers |= {"Range": f"bytes={size}-", "If-Range": validator}
    try:
        request = urllib.request.Request(url, headers=headers)
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or "Range" not in headers:
            raise
        error.close()
        _truncate(file, part)
        raise ConnectionError("the server could not resume") from error
    except (ValueError, http.client.InvalidURL) as error:
        raise expected("--url", "an http:// or https:// address", repr(url)) from error
    with response:
        total = _whole_number(response.headers.get("Content-Length"))
        if response.status == 206:
            found = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip()
            )
            if "Range" not in headers or not found or int(found[1]) != size:
                _truncate(file, part)
                raise ConnectionError("the server resumed at another place")
            total = int(found[2]) if found[2] != "*" else None
        else:
            _truncate(file, part)
            size = 0
            _write_validator(part, url, response.headers)
        if total is not None and total > _MAX_ARCHIVE_BYTES:
            raise expected(url, f"at most {_MAX_ARCHIVE_BYTES} bytes", total)
        report(size, total)
        while data := response.read(_CHUNK_BYTES):
            size += len(data)
            if size > _MAX_ARCHIVE_BYTES:
                raise expected(url, f"at most {_MAX_ARCHIVE_BYTES} bytes", "more")
            with _writing(part):
                file.write(data)
            report(size, total)
    # http.client does not tell a connection that closed early from the end when asked by chunks.
    if total is not None and size < total:
        raise ConnectionError(f"{size} of {total} bytes")


def _truncate(file: IO[bytes], part: Path) -> None:
    with _writing(part):
        file.seek(0)
        file.truncate()


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def _read_validator(part: Path, url: str) -> str | None:
    """Returns what names the version of ``url`` that ``part`` is a part of, or None."""
    with suppress(OSError, ValueError):
        address, _, validator = _validator_file(part).read_text("utf-8").partition("\n")
        if address == url and re.fullmatch(r"[\x20-\x7e]+", validator):
            return validator
    return None


def _write_validator(part: Path, url: str, headers: http.client.HTTPMessage) -> None:
    tag = headers.get("ETag", "")
    # A weak tag may not be used with If-Range (RFC 9110, section 13.1.5).
    validator = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")
    with atomic_write(_validator_file(part)) as file:
        file.write(f"{url}\n{validator}")


def _md5(file: IO[bytes]) -> str:
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)  # the checksum that the authors publish
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise InputError(message)  # so that every error is the same one line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 2 error, 130 interrupted."""
    try:
        parser = _Parser(prog="python -m cifar10.download", description="Downloads CIFAR-10.")
        parser.add_argument(
            "--output",
            type=Path,
            metavar="DIR",
            help=f"the folder that gets {FOLDER}/ (default: the user's cache, {cache_folder()}, "
            "where --data auto looks)",
        )
        parser.add_argument("--url", default=URL, help="the archive (default: %(default)s)")
        parser.add_argument("--force", action="store_true", help="replace what is there")
        parser.add_argument("--quiet", action="store_true", help="print errors only")
        options = parser.parse_args(arguments)
        # Not `or`: an empty --output must not mean the cache.
        folder = cache_folder() if options.output is None else options.output
        target = _run(folder, options.url, options.force, options.quiet)
        if not options.quiet:
            print(f"CIFAR-10: {target}")
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command resumes the download", file=sys.stderr)
        return 130


def _run(folder: Path, url: str, force: bool, quiet: bool) -> Path:
    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("CIFAR-10"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("download", total=None)
        return download(
            folder,
            url,
            MD5,
            force,
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            report=lambda done, total: progress.update(task, completed=done, total=total),
        )


if __name__ == "__main__":
    sys.exit(main())
