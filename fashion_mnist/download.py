"""Downloads Fashion-MNIST: ``cnn-engine download fashion_mnist``.

Fetches the four files that the authors publish with their checksums
(https://github.com/zalandoresearch/fashion-mnist) into the user's cache, where ``--data auto`` looks.
They stay compressed. An interrupted download resumes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cnn_engine.download import command
from cnn_engine.errors import expected
from cnn_engine.io import fetch

from .dataset import cache_folder

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # has no https
FILES = {
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
}

_MAX_FILE_BYTES = 1 << 28  # the largest has 26 MB


def download(
    folder: Path,
    url: str = URL,
    files: dict[str, str] = FILES,
    force: bool = False,
    say: fetch.Say = lambda line: None,
    report: fetch.Report = lambda done, total: None,
) -> Path:
    """Fetches and checks the files that are not there yet; returns their folder.

    Args:
        folder: where they go, each as a whole, and where an unfinished one waits.
        url: an ``http://`` or ``https://`` address that the files' names are added to.
        files: name -> MD5, in hexadecimal.
        force: download again, and replace what is there.
        say: called with a line of text for the user now and then.
        report: called with the bytes there are and the bytes there will be of a file (None: not known).

    Raises:
        InputError: a file cannot be fetched or written, or is not the expected one.
    """
    fetch.check_url(url)
    with fetch.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        missing = {
            name: md5 for name, md5 in files.items() if force or not _is_there(folder / name, md5)
        }
        for name, md5 in missing.items():
            part = folder / f"{name}.part"
            address = f"{url.rstrip('/')}/{name}"
            with fetch.fetched(address, md5, part, _MAX_FILE_BYTES, "file", say, report) as file:
                os.fsync(file.fileno())
                os.replace(part, folder / name)
    if not missing:
        say(f"{folder} is complete already (--force downloads it again)")
    return folder


def _is_there(path: Path, md5: str) -> bool:
    """Whether ``path`` is the file; raises an InputError where it is another, which is left alone."""
    if not os.path.lexists(path):
        return False
    found = "no regular file"
    if path.is_file():
        with suppress(OSError), open(path, "rb") as file:
            found = f"MD5 {fetch.md5_of(file)}"
    if found != f"MD5 {md5}":
        raise expected(str(path), f"MD5 {md5}", f"{found} (--force replaces it)")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 2 error, 130 interrupted."""
    return command(
        arguments,
        prog="cnn-engine download fashion_mnist",
        name="Fashion-MNIST",
        url=URL,
        url_help="the folder of the files",
        folder=cache_folder(),
        holds=", ".join(FILES),
        download=lambda folder, url, force, say, report: download(
            folder, url, FILES, force, say, report
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
