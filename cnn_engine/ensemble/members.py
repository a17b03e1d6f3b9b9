"""Networks of an ensemble, and how each consumes a batch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from .. import callables, workload
from ..engine.engine import Engine
from ..engine.outputs import Outputs
from ..errors import InputError, UnsupportedError, expected
from ..graph.form import form_of
from ..graph.network import Network
from ..io.files import atomic_write, describe_os_error
from ..io.model_metadata import preprocess_of
from ..io.preprocess import Preprocess
from ..workload import Workload
from .order import Batch
from .source import CORRUPT, UNKNOWN

MOST_MEMBERS = 1024

#: Keys of ``--member``.
_KEYS = ("network", "model", "weights", "device", "variant", "dtype", "name", "output")


@dataclass(frozen=True)
class Spec:
    """A member as the command line names it.

    Attributes:
        index: its number.
        name: for reports and files.
        network, model: a workload's name, or in its place an ONNX file.
        weights, device, variant, dtype: as for ``run``.
        output: the model's output that is kept; "": the only one.
        preprocess: as ``--preprocess`` has it, for sizes that a model leaves open.
    """

    index: int
    name: str = ""
    network: str = "cifar10"
    model: str | None = None
    weights: str = "default"
    device: str = "auto"
    variant: str = "auto"
    dtype: str = "float32"
    output: str = ""
    preprocess: str | None = None

    @property
    def file_stem(self) -> str:
        return f"member-{self.index}"

    def workload(self) -> Workload:
        if not self.model:
            return workload.get(self.network)
        return workload.of_model(self.model, preprocess=self.preprocess)

    def row(self, network: Any) -> tuple[str, tuple[int, ...]]:
        """Returns the name and the shape, for one image, of the output that is kept.

        Raises:
            InputError: there is no such output, or there are several.
            UnsupportedError: the network takes no images of a known size, or the output has no row of float32
                for each image.
        """
        if isinstance(network, Network):
            return "", (network.classes,)
        form = form_of(network, network.base)
        if not form.is_of_images or form.sizes_of is not None:
            found = ", ".join(f"{v.name} {v.dtype} {list(v.shape)}" for v in network.inputs)
            wanted = "one input, images [N, C, H, W] of a known size (--preprocess says it)"
            raise UnsupportedError(f"{self.model}: expected {wanted}, found {found or 'none'}")
        names = [value.name for value in form.outputs]
        if (not self.output and len(names) != 1) or (self.output and self.output not in names):
            wanted = f"output=NAME beside model={self.model}, of {', '.join(names)}"
            raise expected("--member", wanted, repr(self.output) if self.output else "none")
        value = next(v for v in form.outputs if self.output in ("", v.name))
        if value.name not in form.rows or value.dtype != "float32":
            wanted = f"a row of float32 for each image, of {value.name}"
            found = f"{value.dtype} {list(value.shape)}"
            raise UnsupportedError(f"{self.model}: expected {wanted}, found {found}")
        return value.name, tuple(form.rows[value.name])


def specs(
    members: int | None,
    lists: list[str] | None,
    device: str,
    weights: str,
    preprocess: str | None = None,
) -> list[Spec]:
    """Returns the members of ``--members N`` or of one ``--member KEY=VALUE,...`` each.

    Raises:
        InputError: names the option and what is at fault.
    """
    if not lists:
        count = 1 if members is None else members
        return [Spec(k, f"cifar10-{k}", weights=weights, device=device) for k in range(count)]
    if members is not None and members != len(lists):
        raise expected("--members", f"as many as there are --member ({len(lists)})", members)
    found = []
    for index, text in enumerate(lists):
        given = {"device": device, "weights": weights}
        for word in text.split(","):
            key, equals, value = word.partition("=")
            if not (equals and value and key in _KEYS):
                raise expected("--member", f"KEY=VALUE,... of {', '.join(_KEYS)}", repr(word))
            given[key] = value
        if "network" in given and "model" in given:
            raise expected("--member", "network or model", "both")
        if (named := given.get("network", "")).endswith(".onnx"):
            raise InputError(f"--member: expected model={named} for a file, found network={named}")
        if "model" in given and given["weights"] == weights:
            given["weights"] = "default"  # those of the file
        name = (
            given.pop("name", None)
            or Path(given.get("model", given.get("network", "cifar10"))).stem
        )
        found.append(Spec(index, f"{name}-{index}", **given, preprocess=preprocess))
    return found


class Member(Protocol):
    """Work of a rank on each batch.

    Attributes:
        spec: which member.
        device: where it runs, as ``devices.select`` gives it.
    """

    spec: Spec
    device: Any

    def probe(self, images: Any) -> Any:
        """Does the work of a step on ``images``, and keeps nothing of it: to be timed."""

    def step(self, batch: Batch, images: Any, labels: np.ndarray) -> None:
        """Works on one batch: ``images`` uint8 [N, C, H, W], ``labels`` int32 [N]."""

    def finish(self) -> dict[str, Any]:
        """Writes the member's files, and returns its report."""

    def close(self) -> None:
        """Ends the member, and keeps finished work."""


class InferMember:
    """Runs the engine, and keeps the probabilities of every sample.

    Args:
        samples: in the data set, those of the last epoch are kept.
        folder: for ``member-K.part``, to which each batch's rows are appended as they come, and which
            becomes ``member-K.npy`` at the end; None: nothing is written.
        part: of the steps, those whose number is ``part[0]`` of ``part[1]``: other ranks run the others.
    """

    def __init__(
        self,
        spec: Spec,
        samples: int,
        folder: Path | None,
        threads: int | None = None,
        part: tuple[int, int] = (0, 1),
    ):
        self.spec, self._part = spec, part
        self._engine = Engine(
            spec.workload(), weights=spec.weights, device=spec.device, variant=spec.variant,
            dtype=spec.dtype, threads=threads,
        )  # fmt: skip
        self.device = self._engine.device
        self.shape = self._engine.network.input_shape
        self._output, row = spec.row(self._engine.network)
        self.probabilities = np.full((samples, *row), np.nan, np.float32)
        self._labels = np.full(samples, UNKNOWN, np.int32)
        self._path = None if folder is None else folder / spec.file_stem
        self._file: IO[bytes] | None = None
        if self._path is not None and part[0] == 0:
            with self._writing():
                self._file = open(self._path.with_suffix(".part"), "wb", buffering=0)  # noqa: SIM115

    def probe(self, images: Any) -> np.ndarray:
        """Returns the outputs of one batch, such as probabilities float32 [N, classes], and keeps nothing."""
        found = self._engine.predict(images)
        if isinstance(found, Outputs):
            found = found[self._output]
        return found.get() if hasattr(found, "get") else np.asarray(found)

    def step(self, batch: Batch, images: Any, labels: np.ndarray) -> None:
        if batch.number % self._part[1] != self._part[0]:
            return
        found = self.probe(images)
        bad = (labels == CORRUPT).reshape(-1, *[1] * (found.ndim - 1))
        found = np.where(bad, np.float32("nan"), found)
        self.probabilities[batch.samples] = found
        self._labels[batch.samples] = labels
        if self._file is not None:
            row = np.empty(len(found), _row(found.shape[1:]))
            row["sample"], row["probabilities"] = batch.samples, found
            with self._writing():
                self._file.write(row.tobytes())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = describe_os_error(error)
            raise InputError(f"--output: cannot write {self._path}.part: {reason}") from error

    def finish(self) -> dict[str, Any]:
        return {"labels": self._labels, "probabilities": self.probabilities}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._engine.close()


def _row(shape: tuple[int, ...]) -> np.dtype:
    return np.dtype([("sample", "<i8"), ("probabilities", "<f4", shape)])


def read_part(path: str | os.PathLike[str], shape: int | tuple[int, ...]) -> np.ndarray:
    """Reads ``member-K.part``, the finished part of a run that failed.

    Args:
        shape: of the output for one image: how many classes, or any other.

    Returns:
        rows of ``sample`` (int64) and ``probabilities`` (float32 [*shape]): whole ones.
    """
    content = Path(path).read_bytes()
    dtype = _row((shape,) if isinstance(shape, int) else shape)
    return np.frombuffer(content, dtype, len(content) // dtype.itemsize)


def keep(folder: Path, spec: Spec, probabilities: np.ndarray) -> None:
    """Writes ``member-K.npy``, and removes ``member-K.part``."""
    path = folder / f"{spec.file_stem}.npy"
    with atomic_write(path, "wb") as file:
        np.save(file, probabilities)
    path.with_suffix(".part").unlink(missing_ok=True)


def others(folder: Path, members: int) -> list[Path]:
    """Returns the files that a run of more members than these left in ``folder``."""
    found = ((re.fullmatch(r"member-([0-9]+)\..+", path.name), path) for path in folder.iterdir())
    return sorted(path for match, path in found if match and int(match[1]) >= members)


def forget(folder: Path, members: int) -> None:
    """Removes the probabilities of a run of more members than these: they are no part of this one's."""
    for path in others(folder, members):
        if path.suffix in (".npy", ".part"):
            path.unlink(missing_ok=True)


# ---- several members' probabilities as one ----

COMBINATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda rows: rows.mean(0, dtype=np.float64),
    "median": lambda rows: np.median(rows, 0),
    "product": lambda rows: np.exp(np.log(np.maximum(rows, 1e-30)).mean(0, dtype=np.float64)),
    "vote": lambda rows: np.eye(rows.shape[2])[rows.argmax(2)].mean(0),
}


def combination(text: str, members: int, rank: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that ``--combine`` names: of members' outputs [M, N, ...] to [N, ...].

    It is one of :data:`COMBINATIONS`, weights of a mean with commas between, or what
    ``module:callable[,key=value...]`` returns.

    Args:
        rank: dimensions of an output for one image: 1 of classes.

    Raises:
        InputError: there is none, it is a vote on what are no classes, or weights are more or fewer than
            members.
    """
    if text == "vote" and rank != 1:
        raise expected("--combine vote", "members that give a row of classes", "others")
    if text in COMBINATIONS:
        return COMBINATIONS[text]
    if ":" in text:
        make, arguments, _ = callables.resolve("--combine", text)
        return make(**arguments)
    try:
        weights = np.array([float(word) for word in text.split(",")])
    except ValueError:
        weights = np.zeros(0)
    if len(weights) != members or not np.isfinite(weights).all() or not weights.sum() > 0:
        kinds = ", ".join(COMBINATIONS)
        raise expected(
            "--combine",
            f"{kinds}, module:callable, or {members} weights, one per member",
            repr(text),
        )
    return lambda rows: np.tensordot(weights / weights.sum(), rows, 1)


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any] | None:
    """Returns ``{correct, total, top1}`` over samples with a label that were run; None: there are none.

    Outputs that are no rows of classes have none.
    """
    if probabilities.ndim != 2:
        return None
    known = (labels >= 0) & ~np.isnan(probabilities).any(1)
    total = int(known.sum())
    if not total:
        return None
    correct = int((probabilities[known].argmax(1) == labels[known]).sum())
    return {"correct": correct, "total": total, "top1": correct / total}


def check_shapes(found: list[Spec]) -> tuple[list[Workload], tuple[int, ...]]:
    """Returns the members' workloads, and the shape of their outputs for one image.

    Raises:
        InputError: the members read images, or give outputs, of different shapes.
    """
    workloads = [spec.workload() for spec in found]
    rows = [spec.row(one.network)[1] for spec, one in zip(found, workloads, strict=True)]
    shown = [row[0] if len(row) == 1 else list(row) for row in rows]
    what = "classes" if all(len(row) == 1 for row in rows) else "shape of outputs"
    shapes = [one.network.input_shape for one in workloads]
    for name, values in (("input_shape", shapes), (what, shown)):
        if len({*map(str, values)}) > 1:
            raise UnsupportedError(f"--member: expected the same {name} of all, found {values}")
    return workloads, rows[0]


def shared_preprocess(text: str | None, workloads: list[Workload]) -> Preprocess | None:
    """Returns how the members' images are prepared: as ``--preprocess`` says, else their files; None: not.

    Raises:
        InputError: the files say different things.
    """
    if text is not None:
        return Preprocess.parse(text)
    said = {str(found): found for one in workloads if (found := preprocess_of(one.network))}
    if len(said) > 1:
        raise expected("--preprocess", "settings for all members, whose files differ", "none")
    return next(iter(said.values()), None)


def reads_floats(workloads: list[Workload]) -> bool:
    """Whether a member takes floats only, and no pixels."""
    models = [one.network for one in workloads if not isinstance(one.network, Network)]
    return any(model.base.inputs[0].dtype != "uint8" for model in models)
