"""Served models: those of a folder, loaded, replaced and unloaded while the server runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from .. import workload
from ..errors import CnnEngineError, did_you_mean, expected
from ..locks import ForkSafeLock
from .errors import Refused, not_found, refusal
from .model import ServedModel
from .replicas import SAVED, Settings

log = logging.getLogger(__name__)

SUFFIXES = (".onnx", SAVED)

READY, UNAVAILABLE, LOADING = "READY", "UNAVAILABLE", "LOADING"


class Repository:
    """The models of folders and files, by name.

    A folder holds ``NAME.onnx`` and saved engines ``NAME.safetensors``, or as Triton has it
    ``NAME/VERSION/model.onnx``, of which the highest version is served.

    Args:
        paths: folders, files, and names of networks such as ``cifar10``.
        settings: how all are run.

    Raises:
        InputError: a path is neither, or two models have one name.
    """

    def __init__(self, paths: Iterable[str], settings: Settings) -> None:
        self._settings = settings
        self._paths = list(paths)
        self._models: dict[str, ServedModel] = {}
        self._reasons: dict[str, str] = {}
        self._loading: set[str] = set()
        self._begun = False  # until all have been tried once
        self._lock = ForkSafeLock()  # of the three above
        self._changing = ForkSafeLock()  # one model is loaded at a time
        self.find()  # a wrong path is told before anything is loaded

    def find(self) -> dict[str, tuple[str, Path | str]]:
        """Returns name -> version and source of every model that the folders have now."""
        found: dict[str, tuple[str, Path | str]] = {}
        for path in self._paths:
            for name, version, source in _sources(path):
                if name in found and found[name][1] != source:
                    raise expected(
                        "MODELS", f"one model called {name}", f"{found[name][1]} and {source}"
                    )
                found[name] = version, source
        return found

    def load_all(self) -> None:
        """Loads every model that there is; one that cannot be loaded is unavailable, with the reason."""
        for name in self.find():
            try:
                self.load(name)
            except Refused as error:
                log.warning("%s", error)
        self._begun = True

    def load(self, name: str) -> None:
        """Loads a model, or the newest version or file of one that is served, which answers meanwhile.

        Raises:
            Refused: there is none, or it cannot be loaded: one that was served stays.
        """
        with self._changing:
            try:
                found = self.find()
            except CnnEngineError as error:
                raise refusal(error) from error
            if name not in found:
                raise not_found(f"model {name}: not found{did_you_mean(name, found)}")
            version, source = found[name]
            with self._lock:
                self._loading.add(name)
            try:
                made = ServedModel(name, version, source, self._settings)
            except (CnnEngineError, OSError, MemoryError) as error:
                with self._lock:
                    self._reasons[name] = str(error)
                raise Refused(HTTPStatus.BAD_REQUEST, f"model {name}: {error}") from error
            finally:
                with self._lock:
                    self._loading.discard(name)
            with self._lock:
                before = self._models.get(name)
                self._models[name] = made
                self._reasons.pop(name, None)
            log.info("model %s, version %s: ready", name, version)
            if before is not None:
                before.close()

    def unload(self, name: str) -> None:
        """Stops serving a model; requests that wait are answered first.

        Raises:
            Refused: it is not served.
        """
        with self._changing:
            with self._lock:
                model = self._models.pop(name, None)
                self._reasons[name] = "unloaded"
            if model is None:
                raise not_found(f"model {name}: not served")
            model.close()

    def get(self, name: str, version: str = "") -> ServedModel:
        """Returns a model that is ready.

        Raises:
            Refused: there is none of the name, it is not ready, or of another version.
        """
        model = self._models.get(name)
        if model is None:
            with self._lock:
                reason = self._reasons.get(name)
                if name in self._loading:
                    reason = "is being loaded"
                served = list(self._models)
            if reason is not None:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"model {name}: not ready: {reason}")
            raise not_found(
                f"model {name}: expected one of {', '.join(served) or 'none'}{did_you_mean(name, served)}"
            )
        if version not in ("", model.version):
            raise not_found(f"model {name}: expected version {model.version}, found {version}")
        return model

    def ready(self) -> bool:
        """Whether every model that was loaded or is being loaded answers requests."""
        with self._lock:
            unavailable = [n for n, reason in self._reasons.items() if reason != "unloaded"]
            return self._begun and not self._loading and self._models.keys() >= set(unavailable)

    def models(self) -> list[ServedModel]:
        """Returns the models that are served."""
        with self._lock:
            return list(self._models.values())

    def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Returns all models with their states, as the protocol has them.

        Args:
            ready: those that answer requests alone.
        """
        found = self.find()
        with self._lock:
            rows = []
            for name in sorted({*found, *self._models}):
                model = self._models.get(name)
                state = (
                    READY
                    if model is not None
                    else LOADING
                    if name in self._loading
                    else UNAVAILABLE
                )
                version = model.version if model is not None else found[name][0]
                reason = "" if model is not None else self._reasons.get(name, "")
                rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return [row for row in rows if row["state"] == READY or not ready]

    def close(self) -> None:
        """Unloads all models."""
        with self._changing:
            with self._lock:
                models, self._models = list(self._models.values()), {}
            for model in models:
                model.close()


def _sources(path: str) -> Iterable[tuple[str, str, Path | str]]:
    """Yields name, version and source of the models that a path names."""
    found = Path(path)
    if path in workload.names():  # a folder of that name is ./NAME
        yield path, "1", path
    elif found.is_dir():
        for entry in sorted(found.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.suffix in SUFFIXES and entry.is_file():
                yield entry.stem, "1", entry
            elif entry.is_dir() and (newest := _newest(entry)) is not None:
                yield entry.name, *newest
    elif found.suffix in SUFFIXES and found.is_file():
        yield found.stem, "1", found
    else:
        wanted = "a folder of models, an .onnx file, a saved engine, or a network's name"
        raise expected("MODELS", wanted, f"{path!r}{did_you_mean(path, workload.names())}")


def _newest(folder: Path) -> tuple[str, Path] | None:
    """Returns the highest version of a model and its file."""
    versions = [
        (int(entry.name), file)
        for entry in folder.iterdir()
        if re.fullmatch("[1-9][0-9]{0,8}", entry.name)
        for file in (entry / f"model{suffix}" for suffix in SUFFIXES)
        if file.is_file()
    ]
    if not versions:
        return None
    version, file = max(versions)
    return str(version), file
