"""System shared memory: regions of ``/dev/shm`` where clients of this machine leave inputs and find outputs.

A client may cut its region while the server reads it. A plain mapping would end the server by SIGBUS then:
inputs are read through :class:`cnn_engine._cpu.FileMapping`, which finds zeros and says so, or copied by a
system call. Outputs are written by system calls.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field

import numpy as np

from .. import _cpu
from ..locks import ForkSafeLock
from .errors import Refused, invalid, not_found

FOLDER = "/dev/shm"

#: Regions that clients may have at once.
MOST_REGIONS = 1024


@dataclass
class Region:
    """A part of a shared memory object.

    Attributes:
        key: of the object, as ``shm_open`` takes it.
        offset, byte_size: of the region in the object.
        file: the object, open.
        mapping: of the region, from the first request that reads it on.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    file: int
    mapping: _cpu.FileMapping | None = field(default=None, repr=False)

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
        """Unregisters a region, or all of them; an unknown name is no error."""
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
            raise _cut(name, nbytes, done)
        return room

    def map(self, name: str, offset: int, nbytes: int) -> tuple[np.ndarray, _cpu.FileMapping]:
        """Returns ``nbytes`` bytes of a region, uint8 [N], where they lie, and their mapping.

        The mapping's ``was_cut`` is to be looked at once the bytes have been read.

        Raises:
            Refused: the region is not registered, or does not hold them.
        """
        with self._lock:
            region = self._region(name, offset, nbytes)
            there = os.fstat(region.file).st_size - region.offset - offset
            if there < nbytes:
                raise _cut(name, nbytes, max(there, 0))
            if region.mapping is None or region.mapping.was_cut:
                region.mapping = _cpu.FileMapping(region.file, region.offset, region.byte_size)
            mapping = region.mapping
        return np.frombuffer(mapping, np.uint8, nbytes, offset), mapping

    def write(self, name: str, offset: int, data: np.ndarray) -> None:
        """Writes ``data``, uint8 [N], into a region.

        Raises:
            Refused: the region is not registered, or has no room for it.
        """
        with self._lock:
            region = self._region(name, offset, data.nbytes)
            there = os.fstat(region.file).st_size - region.offset - offset
            if there < data.nbytes:
                raise _cut(name, data.nbytes, max(there, 0))
            os.pwritev(region.file, [data], region.offset + offset)

    def _region(self, name: str, offset: int, nbytes: int) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"shared memory region {name}: not registered")
        if offset < 0 or nbytes < 0 or offset + nbytes > region.byte_size:
            wanted = f"at most {region.byte_size} bytes from 0 on"
            raise invalid(f"shared memory region {name}", wanted, f"{nbytes} from {offset} on")
        return region


def _cut(name: str, wanted: int, found: int) -> Refused:
    return invalid(f"shared memory region {name}", f"{wanted} bytes", f"{found}: it was cut")
