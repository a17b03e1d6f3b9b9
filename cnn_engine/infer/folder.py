"""The output folder: who may write in it, what it was planned for, and which shards are done.

::

    DIR/shard-000000.parquet ...   the rows; complete, or not there
    DIR/_manifest.json             what is there, made of the files whenever a command ends
    DIR/_run/run.json              settings, plan and software; its name appears when planning is complete
    DIR/_run/pieces, shards        the plan (Arrow files)
    DIR/_run/ledger/*.jsonl        a line for every shard that was written, and by whom
    DIR/_run/temporary/            files that are being written
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import InputError, expected
from ..io.files import atomic_write, describe_os_error, make_folder
from . import output, shards
from .output import OutputError, Record
from .shards import Shard, Totals
from .sources import Source

SCHEMA = 1
_DOCUMENT = {
    "settings": dict,
    "inputs": list,
    "shard_bytes": int | None,
    "plan": dict,
    "environment": dict,
}
MANIFEST = "_manifest.json"

#: Files of shards that are looked into at a time when a command goes on with what another left.
READERS = 8


class Folder:
    """An output folder, locked for as long as it is open.

    Several commands of one array (``--shard-index I --shard-count N``) share a folder, each with its own
    part of the shards; any other second command is refused.

    Args:
        path: of the folder; created where it is missing.
        index, count: which part of an array this is; 0 and 1 for all shards.

    Raises:
        InputError: the folder cannot be used, or another command is at work in it.
    """

    def __init__(self, path: str, index: int = 0, count: int = 1) -> None:
        self.path = make_folder(path, "--output")
        self.run = make_folder(self.path / "_run", "--output")
        self.part = f"{index}-of-{count}"
        self.index, self.count = index, count
        make_folder(self.run / "ledger", "--output")
        self._locks: list[int] = []
        self._ledger: int | None = None
        try:
            self._lock("lock", fcntl.LOCK_EX if count == 1 else fcntl.LOCK_SH)
            if count > 1:
                self._lock(f"lock-{self.part}", fcntl.LOCK_EX)
            self.temporary = make_folder(self.run / "temporary" / self.part, "--output")
            self.clean()
        except BaseException:
            self.close()
            raise

    def _lock(self, name: str, kind: int) -> None:
        path = self.run / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._locks.append(descriptor)
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(path)
            raise expected(
                "--output", f"a folder that no other command writes, for {self.path}", holder
            ) from None
        except OSError as error:
            raise InputError(f"--output: cannot lock {path}: {describe_os_error(error)}") from error
        if kind == fcntl.LOCK_EX:
            with suppress(OSError):  # for the message of whoever comes second
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)

    def clean(self) -> None:
        """Removes what workers that were killed left half-written."""
        for path in self.temporary.iterdir():
            with suppress(OSError):
                path.unlink()
        if self.count == 1:  # and what a command that was killed did, also one of an array
            for place in (self.run / "temporary").iterdir():
                if place != self.temporary:
                    shutil.rmtree(place, ignore_errors=True)
        for path in (*self.path.glob(f".{MANIFEST}.*"), *self.run.glob(".run.json.*")):
            if self.count == 1:
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Gives the folder free."""
        for descriptor in reversed(self._locks):
            os.close(descriptor)
        self._locks = []
        if self._ledger is not None:
            os.close(self._ledger)
            self._ledger = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the plan ----

    def document(self) -> dict[str, Any] | None:
        """Returns what the folder was planned for; None where it was not yet.

        Raises:
            InputError: the document cannot be read.
        """
        path = self.run / "run.json"
        try:
            found = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise expected(str(path), "the JSON document of a run", error) from error
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema != SCHEMA:
            raise expected(str(path), f"a document of schema {SCHEMA}", schema)
        for name, kind in _DOCUMENT.items():
            if not isinstance(found.get(name), kind):
                raise expected(str(path), f"what the run's {name} are", found.get(name))
        return found

    def plan(
        self,
        settings: dict[str, Any],
        environment: dict[str, Any],
        inputs: list[str],
        sources: Callable[[], Iterable[Source]],
        shard_bytes: int | None,
    ) -> dict[str, Any]:
        """Returns the folder's document: what is there, or what is planned now.

        Raises:
            InputError: the folder was planned for other settings or inputs, or a source is at fault.
            OutputError: it cannot be written.
        """
        with self._turn():  # the first of an array plans, the others wait
            found = self.document()
            if found is not None:
                _check_same(self.path, found, settings, inputs, shard_bytes)
                return found
            if any(self.path.glob("shard-*.parquet")):
                raise expected(
                    "--output", f"no shards in a folder without a plan, for {self.path}", "some"
                )
            place = self.run / "planning"
            shutil.rmtree(place, ignore_errors=True)
            try:
                place.mkdir()
                totals: Totals = shards.write(sources(), place, shard_bytes, settings["batch"])
                for name in ("pieces", "shards"):
                    os.replace(place / name, self.run / name)
                output.sync_folder(self.run)
                document = {
                    "schema": SCHEMA,
                    "settings": settings,
                    "inputs": inputs,
                    "shard_bytes": shard_bytes,
                    "plan": vars(totals),
                    "environment": environment,
                }
                _write_json(self.run / "run.json", document)
                output.sync_folder(self.run)
                output.sync_folder(self.path)
            except OSError as error:
                raise OutputError(f"cannot write {self.run}: {describe_os_error(error)}") from error
            finally:
                shutil.rmtree(place, ignore_errors=True)
            return document

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lets the commands of an array do what is of all, one after the other."""
        try:
            path = self.run / "lock-turn"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {describe_os_error(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def shards(self) -> list[Shard]:
        """Returns all shards of the plan."""
        return shards.read(self.run)

    def mine(self, every: list[Shard]) -> list[Shard]:
        """Returns the shards that are this command's: every ``count``-th."""
        return every[self.index :: self.count]

    # ---- what is done ----

    def shard_path(self, shard: Shard) -> Path:
        """Returns where a shard's rows are, or are to be."""
        return self.path / f"{shard.name}.parquet"

    def done(self, every: list[Shard], run: str, remove: bool = True) -> dict[int, Record]:
        """Returns what is done, by the files that are there; broken files are removed if ``remove``.

        A file that has the size that the ledger has for it is taken as it is; others are looked into.

        Raises:
            OutputError: a broken file cannot be removed.
        """
        known = self._recorded(run)
        there = {entry.name: _size(entry) for entry in os.scandir(self.path)
                 if entry.name.endswith(".parquet")}  # fmt: skip
        found: dict[int, Record] = {}
        look: list[Shard] = []
        for shard in every:
            size = there.get(f"{shard.name}.parquet")
            record = known.get(shard.index)
            if size is not None and record is not None and record.bytes == size:
                found[shard.index] = record
            elif size is not None:
                look.append(shard)
        with ThreadPoolExecutor(READERS) as pool:
            records = pool.map(lambda s: output.inspect(self.shard_path(s), s.name, run), look)
            for shard, record in zip(look, records, strict=True):
                if record is not None:
                    found[shard.index] = record
                elif remove:
                    self.remove(shard)
        return found

    def remove(self, shard: Shard) -> None:
        """Removes a shard's file, which is broken.

        Raises:
            OutputError: it cannot be removed.
        """
        try:
            self.shard_path(shard).unlink(missing_ok=True)
            output.sync_folder(self.path)
        except OSError as error:
            reason = describe_os_error(error)
            raise OutputError(f"cannot remove {self.shard_path(shard)}: {reason}") from error

    def _recorded(self, run: str) -> dict[int, Record]:
        found: dict[int, Record] = {}
        for path in sorted((self.run / "ledger").glob("*.jsonl")):
            with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
                        row = json.loads(line)
                        if row["run"] == run:
                            found[row["shard"]] = Record(row["rows"], row["errors"], row["bytes"])
        return found

    def record(self, run: str, shard: Shard, record: Record, by: str) -> None:
        """Notes that a shard is done: a line, which is lost without harm if the machine stops now.

        Raises:
            OutputError: it cannot be written.
        """
        row = {"run": run, "shard": shard.index, **vars(record), "by": by}
        try:
            if self._ledger is None:
                path = self.run / "ledger" / f"{self.part}.jsonl"
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._ledger = os.open(path, flags, 0o666)
                if os.fstat(self._ledger).st_size:  # the last line may have been cut off
                    os.write(self._ledger, b"\n")
            os.write(self._ledger, (json.dumps(row) + "\n").encode())
        except OSError as error:
            raise OutputError(
                f"cannot write {self.run / 'ledger'}: {describe_os_error(error)}"
            ) from error

    def write_manifest(
        self, document: dict[str, Any], every: list[Shard], run: str
    ) -> dict[str, Any]:
        """Writes the manifest of what is there, whoever wrote it; returns it.

        Raises:
            InputError: it cannot be written.
        """
        with self._turn():  # of an array, the last to write has seen all
            done = self.done(every, run, remove=False)
            manifest = self._manifest(document, every, done)
            _write_json(self.path / MANIFEST, manifest)
        return manifest

    @staticmethod
    def _manifest(
        document: dict[str, Any], every: list[Shard], done: dict[int, Record]
    ) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "complete": len(done) == len(every),
            "images": sum(record.rows for record in done.values()),
            "errors": sum(record.errors for record in done.values()),
            "shards": len(every),
            "shards_done": len(done),
            "settings": document["settings"],
            "inputs": document["inputs"],
            "plan": document["plan"],
            "environment": document["environment"],
            "files": [
                {"name": f"{shard.name}.parquet", **vars(done[shard.index])}
                for shard in every
                if shard.index in done
            ],
        }


def _size(entry: os.DirEntry) -> int:
    """Returns a file's size; -1 for what is no file, such as a link to nothing."""
    try:
        return entry.stat().st_size if entry.is_file() else -1
    except OSError:
        return -1


def _read_holder(path: Path) -> str:
    with suppress(OSError):
        if text := path.read_text("utf-8", errors="replace").strip():
            return f"{text} at work in it"
    return "another command at work in it"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")


def _check_same(
    path: Path,
    found: dict[str, Any],
    settings: dict[str, Any],
    inputs: list[str],
    shard_bytes: int | None,
) -> None:
    """Refuses to mix rows of two models or settings in one folder."""
    there = found["settings"]
    for key in sorted({*there, *settings}):
        if there.get(key) != settings.get(key):
            raise expected(
                f"--output: {path}: {key}",
                f"{there.get(key)}, as the folder was begun with",
                settings.get(key),
            )
    if found["inputs"] != inputs:
        raise expected(
            f"--output: {path}: INPUT",
            f"{' '.join(found['inputs'])}, as the folder was begun with",
            " ".join(inputs),
        )
    if shard_bytes is not None and shard_bytes != found["shard_bytes"]:
        raise expected(
            f"--output: {path}: --shard-size",
            f"{found['shard_bytes'] or 'none'}, as the folder was begun with",
            shard_bytes,
        )
