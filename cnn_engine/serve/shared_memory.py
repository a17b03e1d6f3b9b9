"""System shared memory: regions of ``/dev/shm`` where clients of this machine leave inputs and find outputs.

Regions are read and written by system calls and never mapped: a client that cuts its region while the server
reads it gets an error, where a mapping would end the server by SIGBUS.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

import numpy as np

from ..locks import ForkSafeLock
from .errors import invalid, not_found

FOLDER = "/dev/shm"

#: Regions that clients may have at once.
MOST_REGIONS = 1024


@dataclass(frozen=True)
class Region:
    """A part of a shared memory object.

    Attributes:
        key: of the object, as ``shm_open`` takes it.
        offset, byte_size: of the region in the object.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    file: int

    def described(self) -> dict[str, object]:
        """Returns the region as the protocol's status has it."""
        return {
            "name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size,
        }  # fmt: skip


class Regions:
    """Regions that clients have registered.

    Args:
        allowed: whether clients may register any.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}
        self._lock = ForkSafeLock()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a region; a name that is taken is refused.

        Raises:
            Refused: shared memory is off, the object is not there, or is smaller than the region.
        """
        if not self.allowed:
            raise invalid("shared memory", "a server started with --shared-memory", "one without")
        if not name:
            raise invalid("name", "the name of a region", "none")
        if not re.fullmatch(r"/?[^/\0]{1,250}", key) or key.strip("/") in (".", ".."):
            raise invalid("key", "the name of a shared memory object, such as /images", repr(key))
        if offset < 0 or byte_size < 1:
            found = f"offset {offset} and byte_size {byte_size}"
            raise invalid(name, "an offset of at least 0 and at least one byte", found)
        path = os.path.join(FOLDER, key.lstrip("/"))
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise invalid(name, f"a shared memory object {key}", error.strerror) from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size < offset + byte_size:
                wanted = f"{key} of at least {offset + byte_size} bytes"
                raise invalid(name, wanted, f"{found.st_size} bytes")
            with self._lock:
                if name in self._regions:
                    raise invalid(name, "a new name", "a region that is registered")
                if len(self._regions) >= MOST_REGIONS:
                    raise invalid(name, f"at most {MOST_REGIONS} regions", "more")
                self._regions[name] = Region(name, key, offset, byte_size, file)
        except BaseException:
            os.close(file)
            raise

    def unregister(self, name: str = "") -> None:
        """Forgets a region, or all of them; a name that is unknown is nothing to forget."""
        with self._lock:
            for one in [name] if name else list(self._regions):
                region = self._regions.pop(one, None)
                if region is not None:
                    os.close(region.file)

    def status(self, name: str = "") -> list[dict[str, object]]:
        """Returns all regions, or the one that is named, as the protocol has them.

        Raises:
            Refused: it is not registered.
        """
        with self._lock:
            found = [r.described() for r in self._regions.values() if name in ("", r.name)]
        if name and not found:
            raise not_found(f"shared memory region {name}: not registered")
        return found

    def read(self, name: str, offset: int, nbytes: int) -> np.ndarray:
        """Returns a copy of ``nbytes`` bytes of a region as uint8.

        Raises:
            Refused: the region is not registered, or does not hold them.
        """
        room = np.empty(nbytes, np.uint8)
        with self._lock:  # held while it is read: nobody closes the file meanwhile
            region = self._region(name, offset, nbytes)
            done = os.preadv(region.file, [room], region.offset + offset)
        if done != nbytes:
            raise invalid(f"shared memory region {name}", f"{nbytes} bytes", f"{done}: it was cut")
        return room

    def write(self, name: str, offset: int, data: np.ndarray) -> None:
        """Writes ``data``, uint8 [N], into a region.

        Raises:
            Refused: the region is not registered, or has no room for it.
        """
        with self._lock:
            region = self._region(name, offset, data.nbytes)
            if os.fstat(region.file).st_size < region.offset + offset + data.nbytes:
                raise invalid(
                    f"shared memory region {name}", f"{data.nbytes} bytes", "less: it was cut"
                )
            os.pwritev(region.file, [data], region.offset + offset)

    def _region(self, name: str, offset: int, nbytes: int) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"shared memory region {name}: not registered")
        if offset < 0 or nbytes < 0 or offset + nbytes > region.byte_size:
            wanted = f"at most {region.byte_size} bytes from 0 on"
            raise invalid(f"shared memory region {name}", wanted, f"{nbytes} from {offset} on")
        return region
