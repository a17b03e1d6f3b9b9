"""Problem packs: an assignment in a folder, which ``kernel new`` hands out and ``kernel grade`` marks.

A folder has ``pack.toml`` and the statement ``statement.md``. Students start from the plain loop, unless it
has ``starter.cpp`` and ``starter.cu``. ``docs/reference/problem_packs.md`` has the format.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError, expected, not_one_of
from ...io.files import read_text, write_text
from ...kernels.user import CONTRACTS
from ...kernels.user.source import COMPUTES
from .. import templates

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent

MOST_BYTES = 1 << 20

#: As a baseline: the plain loop that ``kernel new`` prints.
PLAIN = "plain"

KEYS = ("title", "operator", "network", "model", "batch", "baseline", "computes", "points")


@dataclass(frozen=True)
class Pack:
    """An assignment.

    Attributes:
        name: as users call it, such as ``course/tiled-conv``, or its folder.
        folder: where its files are.
        title: a line.
        operator: what students write.
        network: whose nodes of the operator are timed; None: those of :attr:`model`.
        model: an ONNX file in the folder, or None.
        batch: images of a call.
        baseline: what a speedup is against: :data:`PLAIN`, the name of a kernel of the engine's, or of files
            in the folder, without their endings.
        computes: what products may be rounded to.
        correct: points of a kernel that is right.
        speedups: (times as fast as the baseline, further points), rising.
    """

    name: str
    folder: Path
    title: str
    operator: str
    network: str | None
    model: Path | None
    batch: int
    baseline: str
    computes: tuple[str, ...]
    correct: float
    speedups: tuple[tuple[float, float], ...]

    @property
    def statement(self) -> str:
        """The text that students read."""
        return read_text(str(self.folder / "statement.md"), MOST_BYTES)

    @property
    def most(self) -> float:
        """Points that can be had."""
        return self.correct + sum(points for _, points in self.speedups)

    def subject(self, device: str, room: Path) -> str:
        """Returns the baseline as :class:`~cnn_engine.kernel.rank.Entry` takes it, for a kind of device.

        Args:
            room: a folder for the plain loop, where that is the baseline.
        """
        file = f"{self.baseline}.{templates.ENDINGS[device]}"
        if self.baseline == PLAIN:
            write_text(str(room / file), templates.text(self.operator, device, file))
            return str(room / file)
        if (self.folder / file).is_file():
            return str(self.folder / file)
        return f"engine:{self.baseline}"

    def points(self, speedup: float) -> float:
        """Returns the points of a kernel that is right and so many times as fast as the baseline."""
        return self.correct + sum(points for times, points in self.speedups if speedup >= times)

    def starter(self, device: str, file: str) -> str:
        """Returns the file that students start from, with the statement at its head.

        Args:
            device: ``cuda`` or ``cpu``.
            file: the name that it will have.
        """
        own = self.folder / f"starter.{templates.ENDINGS[device]}"
        body = (
            read_text(str(own), MOST_BYTES)
            if own.is_file()
            else templates.text(self.operator, device, file)
        )
        lines = (f"// {line}".rstrip() for line in self.statement.strip().splitlines())
        return "\n".join(lines) + f"\n//\n// {self._marks()}\n\n{body}"

    def _marks(self) -> str:
        parts = [f"{self.correct:g} points for a right kernel"]
        parts += [
            f"{points:g} for {times:g} times the baseline's speed"
            for times, points in self.speedups
        ]
        return ", ".join(parts) + "."


def names() -> list[str]:
    """Returns the packs that the package has."""
    return sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("pack.toml"))


def find(name: str, option: str = "--pack") -> Pack:
    """Returns a pack of the package's, or of a folder.

    Raises:
        InputError: there is none, or its files are at fault.
    """
    folder = FOLDER / name if name in names() else Path(name)
    if not (folder / "pack.toml").is_file():
        raise not_one_of(option, [*names(), "a folder with pack.toml"], name)
    path = str(folder / "pack.toml")
    try:
        found = tomllib.loads(read_text(path, MOST_BYTES))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise expected(path, "TOML", error) from None
    return _Reader(path, found).pack(name, folder)


class _Reader:
    """Checks what a ``pack.toml`` says."""

    def __init__(self, path: str, found: Mapping[str, Any]) -> None:
        self._path, self._found = path, found

    def _fault(self, key: str, wanted: object, found: object) -> InputError:
        return expected(f"{self._path}: {key}", wanted, repr(found)[:80])

    def _text(self, key: str, default: str | None = None) -> str:
        found = self._found.get(key, default)
        if not isinstance(found, str) or not found:
            raise self._fault(key, "a text", found)
        return found

    def _number(self, key: str, found: Any, lowest: float) -> float:
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not found >= lowest:
            raise self._fault(key, f"a number of at least {lowest:g}", found)
        return found

    def pack(self, name: str, folder: Path) -> Pack:
        """Returns the pack.

        Raises:
            InputError: a key is unknown, missing or of the wrong kind.
        """
        for key in self._found:
            if key not in KEYS:
                raise not_one_of(self._path, KEYS, key)
        operator = self._text("operator")
        if operator not in CONTRACTS:
            raise not_one_of(f"{self._path}: operator", CONTRACTS, operator)
        network, model = self._found.get("network"), self._found.get("model")
        if (network is None) == (model is None):
            raise self._fault("network", "a network, or a model in its place", network)
        if model is not None and Path(self._text("model")).name != model:
            raise self._fault("model", "a file in the pack's folder", model)
        batch = self._number("batch", self._found.get("batch", 1), 1)
        if batch != int(batch):
            raise self._fault("batch", "a whole number", batch)
        computes = self._found.get("computes", ["float32"])
        if not isinstance(computes, list) or not all(c in COMPUTES for c in computes):
            raise self._fault("computes", f"a list of {', '.join(COMPUTES)}", computes)
        correct, speedups = self._points()
        return Pack(
            name, folder, self._text("title"), operator, network and self._text("network"),
            model and folder / model, int(batch), self._text("baseline", PLAIN), tuple(computes),
            correct, speedups,
        )  # fmt: skip

    def _points(self) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Returns the points of a right kernel, and those of speedups."""
        found = self._found.get("points", {})
        if not isinstance(found, dict) or not found.keys() <= {"correct", "speedups"}:
            raise self._fault("points", "correct, and speedups", found)
        rows = found.get("speedups", [])
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and row.keys() == {"times", "points"} for row in rows
        ):
            raise self._fault("points: speedups", "tables of times and points", rows)
        speedups = [
            (self._number("times", r["times"], 0), self._number("points", r["points"], 0))
            for r in rows
        ]
        return self._number("correct", found.get("correct", 100), 0), tuple(sorted(speedups))
