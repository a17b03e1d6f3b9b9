"""The output folder: its lock, the run that it belongs to, and its finished shards.

::

    DIR/shard-000000.parquet ...   the rows; complete, or not there
    DIR/shard-000000.NAME.npy ...  those of a large output; complete where the shard's Parquet file is there
    DIR/_manifest.json             what is there, made of the files whenever a command ends
    DIR/_run/run.json              settings, plan and software; its name appears when planning is complete
    DIR/_run/pieces, shards        the plan (Arrow files)
    DIR/_run/ledger/*.jsonl        a line for every shard that was written, and by whom
    DIR/_run/temporary/            files that are being written
"""

from __future__ import annotations

import fcntl
import hashlib
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
from ..io.files import atomic_write, describe_os_error, make_folder, read_json
from . import output, shards, stamps
from .formats import Source
from .output import OutputError, Record
from .shards import Shard, Totals

SCHEMA = 1
_DOCUMENT = {
    "settings": dict,
    "inputs": list,
    "shard_bytes": int | None,
    "plan": dict,
    "files": dict,
    "environment": dict,
    "checksum": str,
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
        """Removes files that killed workers left half-written."""
        for path in _entries(self.temporary):
            with suppress(OSError):
                path.unlink()
        if self.count == 1:  # and what a command that was killed did, also one of an array
            for place in _entries(self.run / "temporary"):
                if place != self.temporary:
                    shutil.rmtree(place, ignore_errors=True)
        for path in (*self.path.glob(f".{MANIFEST}.*"), *self.run.glob(".run.json.*")):
            if self.count == 1:
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Releases the folder's lock."""
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
        """Returns the document of the folder's plan; None where there is no plan yet.

        Raises:
            InputError: the document cannot be read.
        """
        path = self.run / "run.json"
        if not os.path.lexists(path):
            return None
        found = read_json(path, "the JSON document of a run")
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema != SCHEMA:
            raise expected(str(path), f"a document of schema {SCHEMA}", schema)
        for name, kind in _DOCUMENT.items():
            if not isinstance(found.get(name), kind):
                raise expected(str(path), f"what the run's {name} are", found.get(name))
        if found["checksum"] != _checksum(found):
            raise expected(
                str(path), "the document as it was written", "it changed; choose another folder"
            )
        return found

    def plan(
        self,
        settings: dict[str, Any],
        environment: dict[str, Any],
        inputs: list[str],
        found_sources: Callable[[], Iterable[Source]],
        shard_bytes: int | None,
    ) -> dict[str, Any]:
        """Returns the folder's document: the one that is there, or a new plan.

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
                totals: Totals = shards.write(
                    found_sources(), place, shard_bytes, settings["batch"]
                )
                files = {name: _hash(place / name) for name in _PLAN}
                for name in _PLAN:
                    os.replace(place / name, self.run / name)
                output.sync_folder(self.run)
                document = {
                    "schema": SCHEMA,
                    "settings": settings,
                    "inputs": inputs,
                    "shard_bytes": shard_bytes,
                    "plan": vars(totals),
                    "files": files,
                    "environment": environment,
                }
                document["checksum"] = _checksum(document)
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

    def shards(self, document: dict[str, Any]) -> list[Shard]:
        """Returns all shards of the plan that ``document`` is of.

        Raises:
            InputError: a part of the plan is not there, or is not as it was written.
        """
        for name in _PLAN:
            path = self.run / name
            try:
                found = "it changed" if _hash(path) != document["files"].get(name) else None
            except OSError as error:
                none = isinstance(error, FileNotFoundError)
                found = "none" if none else describe_os_error(error)
            if found is not None:
                raise expected(str(path), "a part of the run's plan", found)
        return shards.read(self.run)

    def mine(self, every: list[Shard]) -> list[Shard]:
        """Returns the shards that are this command's: every ``count``-th."""
        return every[self.index :: self.count]

    def check_inputs(self, every: list[Shard], done: dict[int, Record], run: str) -> None:
        """Checks that files are as they were when they were planned.

        One of a shard that could not be done may have been mended since; one that is gone is left to whoever
        reads it.

        Args:
            done: the shards that are.

        Raises:
            InputError: a file changed.
            OutputError: what was mended cannot be noted.
        """
        mended, aside = self._noted(run)
        changed: dict[str, tuple[str, str]] = {}
        free: dict[str, str] = {}
        for shard, path, before, now in self._changes(every, mended, stamps.stamp):
            changed[path] = (before, now)
            if shard.index in aside and shard.index not in done:
                free[path] = now
        for path, (before, now) in changed.items():
            if path not in free:
                raise self._another(path, before, now)
        for path, now in free.items():
            self._note({"run": run, "input": path, "stamp": now})

    def check_unchanged(self, every: list[Shard], done: dict[int, Record], run: str) -> None:
        """Checks that the files of shards that are done did not change meanwhile, by sizes and times.

        Raises:
            InputError: a file changed, so that rows may be of either.
        """
        mended, _ = self._noted(run)
        known = {path: stamps.without_digest(stamp) for path, stamp in mended.items()}
        for shard, path, before, now in self._changes(every, known, stamps.unread):
            if shard.index in done:
                raise self._another(path, before, now)

    def _noted(self, run: str) -> tuple[dict[str, str], set[int]]:
        """Returns the stamps of inputs that were mended, and the shards that were set aside."""
        mended, aside = {}, set()
        for row in self._ledger_rows(run):
            if isinstance(row.get("input"), str) and isinstance(row.get("stamp"), str):
                mended[row["input"]] = row["stamp"]
            elif row.get("set_aside") and type(row.get("shard")) is int:
                aside.add(row["shard"])
        return mended, aside

    def _changes(
        self, every: list[Shard], mended: dict[str, str], of: Callable[[str, str], str]
    ) -> Iterator[tuple[Shard, str, str, str]]:
        """Yields the shards of this command with an input that changed, its path, and both stamps."""
        mine = {shard.index for shard in self.mine(every)}
        path, now = None, None
        for shard, pieces in shards.pieces_by_shard(self.run, every):
            for piece in pieces if shard.index in mine else ():
                if piece.path != path:
                    path, now = piece.path, None
                    with suppress(OSError):
                        now = of(piece.kind, path)
                before = mended.get(path)
                if before is None and piece.stamp:
                    before = (
                        piece.stamp if of is stamps.stamp else stamps.without_digest(piece.stamp)
                    )
                if before and now not in (None, before):
                    yield shard, path, before, now

    def _another(self, path: str, before: str, now: str) -> InputError:
        found = f"another {stamps.difference(before, now)}; choose another --output"
        return expected(path, f"it as when {self.path} was begun", found)

    # ---- what is done ----

    def shard_path(self, shard: Shard) -> Path:
        """Returns where a shard's rows are, or are to be."""
        return self.path / f"{shard.name}.parquet"

    def done(
        self,
        every: list[Shard],
        run: str,
        remove: bool = True,
        known: dict[int, Record] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[int, Record]:
        """Returns the shards that are done, by the footers of their files.

        Args:
            remove: broken files, reported to ``note``; else they are skipped.
            known: what this command has found or written itself: of a file of that size, as it is.

        Raises:
            InputError: there is a whole file of another run, and nothing was removed.
            OutputError: a broken file cannot be removed.
        """
        known = known or {}
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
            records = list(
                pool.map(lambda s: output.inspect(self.shard_path(s), s.name, run), look)
            )
        found.update(
            {s.index: record for s, record in zip(look, records, strict=True) if record is not None}
        )
        broken = [shard for shard in look if shard.index not in found] if remove else []
        for shard in broken:
            if output.is_of_others(self.shard_path(shard), shard.name, run):
                wanted = f"files of this run alone, for {self.path}"
                other = f"{shard.name}.parquet of another; choose another folder, or move that away"
                raise expected("--output", wanted, other)
        for shard in broken:
            note(f"{shard.name}: broken, and done again")
            self.remove(shard)
        return found

    def remove(self, shard: Shard) -> None:
        """Removes a shard's files, one of which is broken.

        Raises:
            OutputError: it cannot be removed.
        """
        try:
            self.shard_path(shard).unlink(missing_ok=True)
            for path in self.path.glob(f"{shard.name}.*.npy"):
                path.unlink(missing_ok=True)
            output.sync_folder(self.path)
        except OSError as error:
            reason = describe_os_error(error)
            raise OutputError(f"cannot remove {self.shard_path(shard)}: {reason}") from error

    def _ledger_rows(self, run: str) -> Iterator[dict[str, Any]]:
        """Yields what was noted of a run; a line that was cut off or damaged is passed over."""
        for path in sorted((self.run / "ledger").glob("*.jsonl")):
            with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    with suppress(ValueError, RecursionError):
                        row = json.loads(line)
                        if isinstance(row, dict) and row.get("run") == run:
                            yield row

    def record(self, run: str, shard: Shard, record: Record | None, by: str) -> None:
        """Records that a shard is done, or, for None, that it was set aside.

        A line is lost without harm if the machine stops now: of what is done, files tell.

        Raises:
            OutputError: it cannot be written.
        """
        facts = {"set_aside": True} if record is None else vars(record)
        self._note({"run": run, "shard": shard.index, **facts, "by": by})

    def _note(self, row: dict[str, Any]) -> None:
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
        self, document: dict[str, Any], every: list[Shard], run: str, known: dict[int, Record]
    ) -> dict[str, Any]:
        """Writes the manifest of all finished shards, whoever wrote them; returns it.

        Args:
            known: see :meth:`done`.

        Raises:
            InputError: it cannot be written.
        """
        with self._turn():  # of an array, the last to write has seen all
            done = self.done(every, run, remove=False, known=known)
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
            "label_texts": sum(record.label_texts for record in done.values()),
            "labels_lost": sum(record.labels_lost for record in done.values()),
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


#: The files of a plan.
_PLAN = ("pieces", "shards")


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _checksum(document: dict[str, Any]) -> str:
    """Returns a hash of all that a document says beside it."""
    words = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def _entries(folder: Path) -> list[Path]:
    """Returns what is in a folder: nothing where somebody took it away."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


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
