"""Fetching files over HTTP: resumed where they broke off, checked, and never by two at once.

Plain ``urllib`` does: what is needed beyond one request (resuming, retrying, a checksum) is not in
requests or httpx either.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import InputError, expected
from .files import atomic_write, describe_os_error

_ATTEMPTS = 5  # in a row that bring no new byte
_FIRST_PAUSE_S = 1.0  # doubled after each of them
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16

#: Called with the bytes there are and the bytes there will be (None: not known).
Report = Callable[[int, "int | None"], None]
#: Called with a line of text for the user now and then.
Say = Callable[[str], None]


def check_url(url: str) -> None:
    """Raises an InputError unless ``url`` is an ``http://`` or ``https://`` address."""
    if not re.match(r"https?://[^\s/]+(/\S*)?$", url, re.IGNORECASE):
        raise expected("--url", "an http:// or https:// address", repr(url))


@contextmanager
def fetched(
    url: str, md5: str, part: Path, most_bytes: int, what: str, say: Say, report: Report
) -> Iterator[IO[bytes]]:
    """Yields the whole of ``url`` as an open file, fetched into ``part`` and checked.

    An unfinished ``part`` stays, to be resumed by the next call. A finished one is deleted when the
    block ends well (the block may also have renamed it).

    Args:
        url: an ``http://`` or ``https://`` address.
        md5: the checksum that the file must have, in hexadecimal.
        part: where it is written; its folder exists.
        most_bytes: no more than that is taken from the server.
        what: what errors call the file, such as ``archive``.

    Raises:
        InputError: it cannot be fetched or written, or is not the expected one.
    """
    with writing(part), _locked(part) as file:
        if md5_of(file) != md5:  # an earlier run may have been interrupted after the last byte
            say(f"downloading {url}")
            _fetch(url, file, part, most_bytes, what, say, report)
            if (found := md5_of(file)) != md5:
                _discard(part)
                raise expected(url, f"the {what} with MD5 {md5}", f"{found}; it was deleted")
        file.seek(0)
        yield file
        _discard(part)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of the disk into an error about ``path``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {describe_os_error(error)}") from error


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
    url: str, file: IO[bytes], part: Path, most_bytes: int, what: str, say: Say, report: Report
) -> None:
    """Makes ``file`` the whole of ``url``, resuming as often as new bytes come."""
    failures = 0
    furthest = 0
    while True:
        try:
            _request(url, file, part, most_bytes, report)
            return
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            if error.code not in (408, 425, 429) and error.code < 500:
                raise expected(url, f"the {what}", reason) from error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            cause = getattr(error, "reason", error)
            reason = " ".join(str(cause).split()) or type(cause).__name__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise expected(url, "a valid certificate", reason) from error
        with writing(part):
            size = file.seek(0, os.SEEK_END)
        # A server that restarts from zero and always breaks off early brings nothing new.
        failures = 1 if size > furthest else failures + 1
        furthest = max(furthest, size)
        if failures >= _ATTEMPTS:
            raise InputError(
                f"{url}: expected the {what}, found {reason} ({_ATTEMPTS} times); "
                "the same command resumes the download"
            )
        pause = _FIRST_PAUSE_S * 2 ** (failures - 1)
        say(f"the download broke off ({reason}); trying again in {pause:g} s")
        time.sleep(pause)


def _request(url: str, file: IO[bytes], part: Path, most_bytes: int, report: Report) -> None:
    """Asks for the rest of ``url`` and appends it; raises an OSError when the connection breaks."""
    with writing(part):
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
        if total is not None and total > most_bytes:
            raise expected(url, f"at most {most_bytes} bytes", total)
        report(size, total)
        while data := response.read(_CHUNK_BYTES):
            size += len(data)
            if size > most_bytes:
                raise expected(url, f"at most {most_bytes} bytes", "more")
            with writing(part):
                file.write(data)
            report(size, total)
    # http.client does not tell a connection that closed early from the end when asked by chunks.
    if total is not None and size < total:
        raise ConnectionError(f"{size} of {total} bytes")


def _truncate(file: IO[bytes], part: Path) -> None:
    with writing(part):
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


def md5_of(file: IO[bytes]) -> str:
    """Returns the MD5 of all of ``file``, in hexadecimal."""
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)  # the checksum that authors publish
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()
