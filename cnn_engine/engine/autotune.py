"""``--tune``: measures the best few kernels of each node on this device, and caches the choice.

Without it the first kernel of the table that can run a node runs it, in the form that its cost model says:
always the same. With it the table's first :data:`CANDIDATES`, forms among them, take turns in whole passes;
each node gets the one that was fastest there, and a pass with all of them must be faster than one without.
Results differ from those without by rounding, as kernels sum in different orders; they stay the same from
pass to pass, and from run to run while the file in the user's cache fits.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _cpu, kernels
from ..graph.graph import Graph, Node
from ..io import cache
from ..kernels import Kernel
from ..locks import ForkSafeLock

if TYPE_CHECKING:
    from ..lower.lowering import Program

#: Of a node at most so many kernels and forms are measured, those that ought to be fastest.
CANDIDATES = 4

#: Variants that show what a way of writing a kernel costs; a user names them.
COMPARED = frozenset({"if", "pad"})

#: Passes of each candidate, after one that does not count; its time is their median.
PASSES = 7

#: A kernel other than the first must be faster by this to be taken: less is noise.
LEAST_GAIN = 0.02

SCHEMA = "cnn_engine.tuned/1"

#: Bytes of a file that are read; one with 10,000 nodes has five million.
MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class Found:
    """Measurements of one kind of node.

    Attributes:
        kernel, form: of the fastest.
        seconds: of its call.
        first_s: of the call of the kernel that runs such nodes without tuning.
    """

    kernel: str
    form: str
    seconds: float
    first_s: float


@dataclass(frozen=True)
class Tuned:
    """A node that another kernel runs than without tuning, or another form of it."""

    node: str
    kernel: Kernel
    instead_of: Kernel
    found: Found


def describe(found: Sequence[Tuned]) -> list[dict[str, Any]]:
    """Returns the results of tuning as JSON."""
    return [
        {"node": one.node, "kernel": one.kernel.name, "form": one.kernel.form,
         "instead_of": one.instead_of.name, "seconds": one.found.seconds,
         "seconds_instead": one.found.first_s}
        for one in found
    ]  # fmt: skip


def summary(found: Sequence[Tuned]) -> str:
    """Returns a sentence: the nodes that run another kernel than without tuning, and the gain of each."""
    if not found:
        return "tuning: every node runs the kernel that it runs without"
    nodes = ", ".join(
        f"{one.node} {' '.join(filter(None, (one.kernel.name, one.kernel.form)))} "
        f"{_us(one.found.seconds)} ({one.instead_of.name} {_us(one.found.first_s)})"
        for one in found
    )
    gain = sum(one.found.first_s - one.found.seconds for one in found)
    return f"tuning: {len(found)} nodes gain {_us(gain)} per pass: {nodes}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


class Chosen:
    """Kernels that an earlier tuning chose, in place of a :class:`Tuner`."""

    def __init__(self, of_node: Mapping[str, Kernel]) -> None:
        self._of_node = of_node

    def kernels(self, program: Program, graph: Graph, batch: int, pixels: bool) -> Mapping:
        return self._of_node


class Tuner:
    """Chooses kernels by measuring them, each kind of node once: see the module.

    Args:
        dtype: what the engine computes in.

    Attributes:
        notes: a line for everything that a user ought to know, such as why a file was not used.
    """

    def __init__(self, device: Any, dtype: str) -> None:
        self.notes: list[str] = []
        self._device = device
        self._about = {
            "device": device.model, "driver": _driver(device), "engine": _version(), "dtype": dtype,
        }  # fmt: skip
        self._file = (
            "tuned-" + re.sub(r"\W+", "-", f"{device.kind} {device.model} {dtype}") + ".json"
        )
        self._known: dict[str, Found] | None = None
        self._tuned: dict[tuple, list[Tuned]] = {}
        self._lock = ForkSafeLock()

    def kernels(self, program: Program, graph: Graph, batch: int, pixels: bool) -> Mapping:
        """Returns node -> kernel for the nodes of ``graph`` that are to run another than without tuning."""
        return {t.node: t.kernel for t in self.tuned(program, graph, batch, pixels)}

    def tuned(self, program: Program, graph: Graph, batch: int, pixels: bool) -> list[Tuned]:
        """Returns the layout with measured kernels; measures those that are not known yet."""
        with self._lock:
            key = batch, pixels, program.placement.threads
            if key not in self._tuned:
                self._tuned[key] = self._find(program, graph, batch, pixels)
            return self._tuned[key]

    def _find(self, program: Program, graph: Graph, batch: int, pixels: bool) -> list[Tuned]:
        if self._known is None:
            self._known = self._read()
        rows = {node.name: candidates(node, graph, program) for node in graph.nodes}
        rows = {name: found for name, found in rows.items() if len(found) > 1}
        kinds = {
            node.name: kind_of(node, graph, program) for node in graph.nodes if node.name in rows
        }
        missing = {
            name for name, kind in kinds.items()
            if kind not in self._known or _named(self._known[kind], rows[name]) is None
        }  # fmt: skip
        if missing:
            begin = perf_counter()
            own = program.on(self._device)  # plans of other streams wait for no one
            found = measure(own, batch, pixels, {name: rows[name] for name in missing}, kinds)
            self._known |= found
            self.notes.append(
                f"tuning: {len(found)} kinds of nodes at batch {batch} measured in "
                f"{perf_counter() - begin:.1f} s"
            )
            self._keep(found)
        tuned = []
        for name, kind in kinds.items():
            kernel = _named(self._known[kind], rows[name])
            if kernel is not None and kernel is not rows[name][0]:
                tuned.append(Tuned(name, kernel, rows[name][0], self._known[kind]))
        return tuned

    # ---- the file ----

    def _read(self) -> dict[str, Found]:
        """Returns what earlier runs found that fits; what does not is left aside, and a note says why."""
        try:
            content = cache.read_plain(self._file, MOST_BYTES)
            return parsed(content.decode("utf-8"), self._about)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or str(error)
            said, path = " ".join(why.split())[:200], cache.folder() / self._file
            self.notes.append(f"tuning: {path} is not used, as it does not fit: {said}")
            return {}

    def _keep(self, found: Mapping[str, Found]) -> None:
        """Adds to the file; other processes may have done so meanwhile."""
        noted = len(self.notes)
        nodes = self._read() | dict(found)
        del self.notes[noted:]  # said when it was read first
        entries = {kind: vars(one) for kind, one in nodes.items()}
        document = {"schema": SCHEMA, **self._about, "digest": _digest(entries), "nodes": entries}
        if not cache.keep_plain(self._file, json.dumps(document, indent=1).encode()):
            self.notes.append(
                f"tuning: nothing is kept for the next run: {cache.folder()} cannot be written or is "
                "this process's own"
            )


def parsed(text: str, about: Mapping[str, Any]) -> dict[str, Found]:
    """Returns a file's measurements by kind of node.

    Raises:
        ValueError: it is of something else than ``about`` says, or damaged; says what was found.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    for name, wanted in {"schema": SCHEMA, **about}.items():
        if document.get(name) != wanted:
            raise ValueError(f"{name}: expected {wanted}, found {str(document.get(name))[:80]}")
    nodes = document.get("nodes")
    if not isinstance(nodes, dict):
        raise ValueError("nodes: expected an object")
    found = {}
    for kind, entry in nodes.items():
        if not isinstance(entry, dict) or entry.keys() != Found.__annotations__.keys():
            raise ValueError(f"{kind[:80]}: expected {', '.join(Found.__annotations__)}")
        names, times = (entry["kernel"], entry["form"]), (entry["seconds"], entry["first_s"])
        if not all(isinstance(name, str) for name in names) or not all(
            type(time) in (int, float) and 0 <= time < math.inf for time in times
        ):
            raise ValueError(f"{kind[:80]}: expected names and seconds")
        found[kind] = Found(**entry)
    if document.get("digest") != _digest(nodes):
        raise ValueError("digest: expected that of its nodes, found another: it was changed")
    return found


def _digest(nodes: Mapping[str, Any]) -> str:
    return cache.key(json.dumps(nodes, sort_keys=True))


def _driver(device: Any) -> str:
    """What the times of a device depend on beside its model."""
    if device.kind == "cuda":
        return str(device.kernels.driver_version())
    return _cpu.selected_instruction_set()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("cnn_engine")
    except PackageNotFoundError:
        number = ""
    return f"{number} {_cpu.commit or ''}".strip()


def _named(found: Found, rows: Iterable[Kernel]) -> Kernel | None:
    """Returns the one of ``rows`` that ``found`` names, or None."""
    wanted = found.kernel, found.form
    return next((row for row in rows if (row.name, row.form) == wanted), None)


# ---- candidates ----


def candidates(node: Node, graph: Graph, program: Program) -> list[Kernel]:
    """Returns the kernels that may run a node where it runs now, the untuned choice first.

    Kernels that stand for other nodes (a padded copy and a convolution, say) are not among them, nor are
    those that are meant for comparing, which a user names.
    """
    device = program.placement.device
    wanted = program.placement.wants(node.op.kind)
    reduction = program.choice.reduction
    first, _ = kernels.choose(node, graph, device.target, None, reduction)
    if first is None or node.op.kind in kernels.ALIASES or wanted != device.kind:
        return []
    found: list[Kernel] = []
    for row in (first, *kernels.of(node.op.kind, wanted)):
        if reduction is not None and row.reduction not in (None, reduction):
            continue
        if (
            row.name in COMPARED
            or row.refuses(node, graph, device.target)
            or row.rewrite(node, graph)
        ):
            continue
        for one in (row, *row.forms(node, graph, device)):
            # Rows of two names may be one kernel, which decides by the shape.
            if all((one.make, one.prepare, one.form) != (f.make, f.prepare, f.form) for f in found):
                found.append(one)
    return found[:CANDIDATES]


def kind_of(node: Node, graph: Graph, program: Program) -> str:
    """Returns the properties that decide a node's time: operator, shapes, types and threads."""

    def said(value: Any, name: str | None) -> str:
        if value is None:
            return "-"
        constant = " constant" if name in graph.constants else ""
        sizes = "x".join(map(str, value.shape))
        return f"{value.dtype}[{sizes}] {value.storage_dtype} {value.layout}{constant}"

    inputs = zip(graph.inputs_of(node), node.inputs, strict=True)
    outputs = zip(graph.outputs_of(node), node.outputs, strict=True)
    values = "; ".join(
        f"{', '.join(said(*one) for one in some)}" for some in (list(inputs), list(outputs))
    )
    threads = (
        f"; {program.placement.threads} threads" if program.placement.device.kind == "cpu" else ""
    )
    return f"{node.op!r}: {values}{threads}"


# ---- measuring ----


def measure(
    program: Program,
    batch: int,
    pixels: bool,
    rows: Mapping[str, Sequence[Kernel]],
    kinds: Mapping[str, str],
) -> dict[str, Found]:
    """Returns the fastest candidate of every kind of the nodes in ``rows``.

    Args:
        kinds: node -> its kind; nodes of one kind get the same kernel.
    """
    before = program.prepared_keys()
    try:
        times: list[dict[str, float]] = []
        for turn in range(max(map(len, rows.values()))):
            chosen = {name: found[turn] for name, found in rows.items() if turn < len(found)}
            times.append(step_times(program, batch, pixels, chosen))
        sums: dict[str, list[float]] = {}
        for name, found in rows.items():
            own = sums.setdefault(kinds[name], [0.0] * len(found))
            for turn in range(len(found)):
                own[turn] += times[turn].get(name, math.inf)
        counts = Counter(kinds[name] for name in rows)
        best = {
            kind: min(range(len(own)), key=lambda turn, own=own: own[turn] * (1 - LEAST_GAIN * (not turn)))
            for kind, own in sums.items()
        }  # fmt: skip
        wanted = {name: found[best[kinds[name]]] for name, found in rows.items()}
        if any(best.values()):
            first = {name: found[0] for name, found in rows.items()}
            if pass_time(program, batch, pixels, wanted) >= pass_time(
                program, batch, pixels, first
            ):
                best = dict.fromkeys(best, 0)
    finally:
        program.forget_prepared(before)
    return {
        kinds[name]: Found(
            found[best[kinds[name]]].name, found[best[kinds[name]]].form,
            sums[kinds[name]][best[kinds[name]]] / counts[kinds[name]],
            sums[kinds[name]][0] / counts[kinds[name]],
        )
        for name, found in rows.items()
    }  # fmt: skip


class _Trial:
    """A plan with certain kernels over images of its own in host memory."""

    def __init__(self, program: Program, batch: int, pixels: bool, chosen: Mapping) -> None:
        from ..plan.builder import build  # which stands on the program

        self.program = program.with_kernels(Chosen(chosen))
        self.device = program.placement.device
        self.plan = build(self.program, batch, pixels)
        rng = np.random.default_rng(0)
        graph = self.program.placed(batch, pixels).graph
        self.arrays = [_drawn(rng, value) for value in graph.inputs]
        self.arrays += [np.empty(v.shape, v.dtype) for v in self.plan.outputs.values()]
        self.plan.bind(*map(_cpu.address_of, self.arrays))


def _drawn(rng: np.random.Generator, value: Any) -> np.ndarray:
    if value.dtype == "float32":
        return rng.standard_normal(value.shape, np.float32)
    most = 2 if value.dtype == "bool" else 100
    return rng.integers(0, most, value.shape).astype(value.dtype)


def step_times(program: Program, batch: int, pixels: bool, chosen: Mapping) -> dict[str, float]:
    """Returns node -> seconds of its steps in passes where these kernels run it."""
    trial = _Trial(program, batch, pixels, chosen)
    device, steps = trial.device, trial.plan.steps
    trial.plan.run_steps()
    device.synchronize()
    samples: list[dict[str, float]] = []
    for _ in range(PASSES):
        times: dict[str, float] = {}
        if device.kind == "cuda":
            device.delay(1e-6 * 20 * len(steps))  # the host is ahead: launches are not timed
            marks = [device.event() for _ in range(len(steps) + 1)]
            marks[0].record(device.stream)
            for step, mark in zip(steps, marks[1:], strict=True):
                step.function(*step.args)
                mark.record(device.stream)
            device.synchronize()
            spans = [device.elapsed_s(*pair) for pair in pairwise(marks)]
        else:
            spans = []
            for step in steps:
                begin = perf_counter()
                step.function(*step.args)
                spans.append(perf_counter() - begin)
        for step, seconds in zip(steps, spans, strict=True):
            times[step.name] = times.get(step.name, 0.0) + seconds
        samples.append(times)
    return {name: statistics.median(times[name] for times in samples) for name in samples[0]}


def pass_time(program: Program, batch: int, pixels: bool, chosen: Mapping) -> float:
    """Returns the median seconds of a pass as a user runs it, where these kernels run the nodes."""
    trial = _Trial(program, batch, pixels, chosen)
    for _ in range(2):  # the second is the first of the device's graph
        trial.plan.run()
    samples = []
    for _ in range(2 * PASSES + 1):
        begin = perf_counter()
        trial.plan.run()
        trial.device.synchronize()
        samples.append(perf_counter() - begin)
    return statistics.median(samples)
