"""Stamps of files: by them a run that goes on sees which of its inputs have changed."""

from __future__ import annotations

import hashlib
import os

from .labels import idx_labels

#: Bytes of a part that a stamp is of, and parts of a file: of one image its two ends, for there are many.
_STAMPED_BYTES, _STAMPED_PARTS, _STAMPED_OF_AN_IMAGE = 1 << 12, 16, 2


def stamp(kind: str, path: str) -> str:
    """Returns a stamp by which a change of a file is seen: size, time, and a digest of parts of it.

    Raises:
        OSError: it cannot be read.
    """
    parts = _STAMPED_OF_AN_IMAGE if kind == "image" else _STAMPED_PARTS
    stamps = [_stamp(path, parts)]
    if kind == "idx" and (labels := idx_labels(path)) is not None:
        stamps.append(_stamp(labels, parts))
    return " ".join(stamps)


def unread(kind: str, path: str) -> str:
    """Returns the sizes and times of a file's stamp, as :func:`without_digest` does, and reads no byte of it.

    Raises:
        OSError: it is not there.
    """
    paths = [path]
    if kind == "idx" and (labels := idx_labels(path)) is not None:
        paths.append(labels)
    found = map(os.stat, paths)
    return " ".join(f"{there.st_size} {there.st_mtime_ns} -" for there in found)


def without_digest(stamp: str) -> str:
    """Returns the sizes and times of a stamp, without the digest of the file's bytes."""
    words = stamp.split(" ")
    return " ".join("-" if at % 3 == 2 else word for at, word in enumerate(words))


def _stamp(path: str, parts: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # whoever reads all of it will say so
        there = os.stat(path)
        found = "unread"
    else:
        try:
            there = os.fstat(descriptor)
            digest = hashlib.blake2b(digest_size=12)
            last = max(there.st_size - _STAMPED_BYTES, 0)
            for place in sorted({last * part // (parts - 1) for part in range(parts)}):
                digest.update(os.pread(descriptor, _STAMPED_BYTES, place))
            found = digest.hexdigest()
        finally:
            os.close(descriptor)
    return f"{there.st_size} {there.st_mtime_ns} {found}"


def without_time(stamp: str) -> str:
    """Returns the parts of a stamp that a copy of the file has, too."""
    words = stamp.split(" ")
    return " ".join(word for at, word in enumerate(words) if at % 3 != 1)


def difference(before: str, now: str) -> str:
    """Returns the difference of two stamps of a file, in words."""
    names = ("size", "time of change", "content")
    pairs = zip(before.split(" "), now.split(" "), strict=False)
    found = next((at for at, (one, other) in enumerate(pairs) if one != other), -1)
    if found < 0:
        return "file of labels"
    return names[found % 3] + (" of the file of labels" if found >= 3 else "")
