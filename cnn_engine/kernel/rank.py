"""``kernel rank``: many kernels on the nodes of a network, each in processes of its own, with intervals.

The unit of replication is the process: calls of one process share its memory's pages, its clocks and its
neighbours, so that many calls say little about the next process. Each round runs every kernel in one new
process, in random order (a randomised complete block design); kernels are compared round by round.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..graph.graph import Graph
from ..kernels.user import CONTRACTS, source
from ..measure import statistics
from ..measure.result import LayerTime
from ..measure.roofline import Roofline
from ..measure.statistics import Estimate
from .cases import Case, grid, of_node
from .expected import Series, judged
from .process import Fault, Limits
from .sandbox import Trial

#: Processes of each kernel, unless the user says how many.
ROUNDS = 5


@dataclass
class Entry:
    """One kernel on the board.

    Attributes:
        name: the file's, or what stands for one of the engine's or PyTorch's.
        subject: see :class:`~cnn_engine.kernel.process.Process`.
        computes: what products are rounded to.
        processes: of each process, node -> seconds of single calls.
        fault: why it is last, in one line, or None.
        place: from 1; see :func:`standings`; None with a fault.
        ties: names of the kernels that share its place.
        sandbox: what confined its processes.
    """

    name: str
    subject: str
    computes: str = "float32"
    processes: list[dict[str, list[float]]] = field(default_factory=list)
    fault: str | None = None
    place: int | None = None
    ties: list[str] = field(default_factory=list)
    sandbox: list[str] = field(default_factory=list)

    @property
    def medians(self) -> list[dict[str, float]]:
        """Of each process, node -> the median of its calls."""
        return [
            {node: float(np.median(seconds)) for node, seconds in process.items()}
            for process in self.processes
        ]

    @property
    def nodes(self) -> dict[str, Estimate]:
        """Node -> seconds of a call, over the processes."""
        medians = self.medians
        return {node: over_processes([m[node] for m in medians]) for node in medians[0]}

    @property
    def totals(self) -> list[float]:
        """Of each process, the sum of the nodes' medians."""
        return [sum(medians.values()) for medians in self.medians]

    @property
    def total(self) -> Estimate | None:
        """Seconds of one pass over the nodes, over the processes; None with a fault."""
        timed = self.fault is None and self.processes
        return over_processes(self.totals) if timed else None


def over_processes(seconds: Sequence[float]) -> Estimate:
    """Returns the geometric mean over processes, with Student's interval of the logarithm.

    One process has no interval: it does not show how the next one would differ.
    """
    logarithms = np.log(seconds)
    count, mean = len(logarithms), float(logarithms.mean())
    value = math.exp(mean)
    if count < 2:
        return Estimate(value, None, None, count, count)
    error = float(logarithms.std(ddof=1)) / math.sqrt(count)
    half = min(_student(statistics.CONFIDENCE, count - 1) * error, 300.0)  # exp() stays finite
    return Estimate(value, math.exp(mean - half), math.exp(mean + half), count, count)


def _student(confidence: float, freedom: int) -> float:
    """Returns Student's two-sided quantile."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def differ(totals: np.ndarray) -> np.ndarray:
    """Returns which kernels' times differ: [K, K], symmetric, of bool.

    Student's paired test of the logarithms: a round is a pair, so that what slows a whole round says
    nothing. No variance is shared, since kernels differ in how steady they are. The level is 5 % over the
    number of groups of equal kernels that there can be (K / 2), which holds false places of a whole board
    to 5 %: equal kernels are parted only where all pairs across the gap differ (:func:`standings`).

    Args:
        totals: [K, R] seconds, of K kernels in R rounds, one process each.
    """
    logarithms = np.log(np.asarray(totals, float))
    kernels, rounds = logarithms.shape
    if kernels < 2 or rounds < 2:
        return np.zeros((kernels, kernels), bool)
    ratios = logarithms[:, None] - logarithms[None]
    error = ratios.std(axis=2, ddof=1) / math.sqrt(rounds)
    level = (1 - statistics.CONFIDENCE) / (kernels // 2)
    return np.abs(ratios.mean(axis=2)) > _student(1 - level, rounds - 1) * error


def standings(totals: np.ndarray) -> np.ndarray:
    """Returns the rank of each kernel, from 1: [K] of int.

    In order of their times, a kernel has a place of its own where it and all slower ones differ from all
    faster ones; else it shares the place of the one before. Kernels whose times are equal get different
    places in at most 5 % of boards.

    Args:
        totals: [K, R] seconds, as :func:`differ` takes them.
    """
    totals = np.asarray(totals, float)
    order = np.argsort(np.log(totals).mean(axis=1), kind="stable")
    apart = differ(totals)[np.ix_(order, order)]
    found = np.ones(len(order), int)
    for index in range(1, len(order)):
        parted = apart[:index, index:].all()
        found[order[index]] = index + 1 if parted else found[order[index - 1]]
    return found


@dataclass
class Board:
    """All kernels, the fastest first, those with a fault last.

    Attributes:
        network, operator, device, batch, threads: of what was timed.
        calls: timed calls of each node, in all rounds.
        rounds: processes of each kernel.
        flops: of one pass over the nodes.
        entries: in order.
        complete: whether all rounds are done.
        environment: of the machine.
        command: that made it.
        roofline: of the machine with each kernel on each node, where ``--roofline`` asked for it.
    """

    network: str
    operator: str
    device: str
    batch: int
    threads: int
    calls: int
    rounds: int
    flops: int
    nodes: list[str]
    entries: list[Entry]
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    complete: bool = True
    roofline: Roofline | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``--json``."""
        return {
            "schema": 1, "command": self.command, "environment": self.environment,
            "network": self.network, "operator": self.operator, "device": self.device,
            "batch": self.batch, "threads": self.threads, "calls": self.calls, "rounds": self.rounds,
            "flops": self.flops, "nodes": self.nodes, "complete": self.complete,
            "roofline": self.roofline and asdict(self.roofline),
            "entries": [
                {"name": e.name, "subject": e.subject, "computes": e.computes, "place": e.place,
                 "ties": e.ties, "fault": e.fault, "sandbox": e.sandbox,
                 "seconds": e.total and asdict(e.total),
                 "processes": e.totals if e.fault is None else [],
                 "nodes": {n: asdict(v) for n, v in e.nodes.items()} if e.total else {}}
                for e in self.entries
            ],
        }  # fmt: skip


def nodes_of(graph: Graph, op: str) -> list[Case]:
    """Returns the cases of a network's nodes of an operator.

    Raises:
        InputError: it has none.
    """
    found = [
        of_node(graph, node)
        for node in graph.nodes
        if node.op.kind == op and CONTRACTS[op].refuses(node, graph) is None
    ]
    if not found:
        raise expected("--network", f"nodes of the operator {op}", f"none in {graph.name}")
    return found


def layers_of(entries: Sequence[Entry], cases: Sequence[Case]) -> list[LayerTime]:
    """Returns a call of each kernel on each node, with the node's operations and bytes."""
    found = []
    for entry in entries:
        if entry.total is None:
            continue
        for case in cases:
            cost = case.graph.cost_of(case.node)
            name = entry.name if len(cases) == 1 else f"{entry.name}, {case.label}"
            seconds = entry.nodes[case.label].value
            found.append(
                LayerTime(name, case.op.kind, "cpu", 1, seconds, None, cost.flops, cost.bytes)
            )
    return found


def entries_of(
    paths: Sequence[str], beside: Sequence[str], allowed: Sequence[str]
) -> tuple[str, str, list[Entry]]:
    """Returns the operator, the kind of device and an entry a file, and one for each of ``beside``.

    Raises:
        InputError: files are for several operators or devices.
    """
    entries, kinds = [], {}
    names = [Path(path).name for path in paths]
    for path, name in zip(paths, names, strict=True):
        shown = name if names.count(name) == 1 else path
        entry = Entry(shown, path)
        try:
            read = source.read(path)
        except InputError as error:
            entry.fault = str(error).replace(f"{path}:", f"{name}:", 1)
        else:
            kinds.setdefault((read.contract.op, read.device), path)
            entry.computes = read.computes
            if read.computes not in allowed:
                entry.fault = (
                    f"computes: expected {' or '.join(allowed)} (--computes), found {read.computes}"
                )
        entries.append(entry)
    if len(kinds) != 1:
        found = "; ".join(f"{path}: {op} on {device}" for (op, device), path in kinds.items())
        raise expected(
            "SUBMISSION", "kernels of one operator for one kind of device", found or "none"
        )
    ((op, device),) = kinds
    for name in beside:
        entries.append(Entry(name, name if name == "torch" else f"engine:{name}"))
    return op, device, entries


def rank(
    entries: list[Entry],
    cases: Sequence[Case],
    device: str,
    threads: int,
    calls: int,
    rounds: int = ROUNDS,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda text: None,
    kept: Callable[[list[Entry]], None] = lambda entries: None,
) -> list[Entry]:
    """Checks and times every entry, in ``rounds`` of random order; returns them in order.

    Each entry's process runs the operator's grid first, then calls on inputs and weights that are new every
    time and the same for all entries. Nothing of one process reaches another.

    Args:
        progress: called with what is tried next.
        kept: called with the board so far, after each process.
    """
    generator = np.random.default_rng(secrets.randbits(128))
    kinds = sorted({entry.computes for entry in entries if entry.fault is None})
    op = cases[0].op.kind
    small = [case for case in grid(op) if case.label != "large"]  # the nodes are large enough
    given = {kind: [(case, judged(case, generator, kind)) for case in small] for kind in kinds}
    each = -(-calls // rounds)
    series = {}
    for case in cases:
        made = Series(case, each)
        for kind in kinds:
            series[case.label, kind] = made.within(kind)
    for number in range(rounds):
        for index in generator.permutation(len(entries)):
            entry = entries[index]
            if entry.fault is not None:
                continue
            progress(f"{entry.name} ({number + 1} of {rounds})")
            try:
                with Trial(entry.subject, device, threads, limits) as trial:
                    entry.sandbox = trial.layers
                    if number == 0:
                        for case, inputs in given[entry.computes]:
                            trial.check(case, inputs)
                        for case in cases:
                            trial.check(case, series[case.label, entry.computes][0])
                    entry.processes.append(
                        {c.label: trial.time(series[c.label, entry.computes], each) for c in cases}
                    )
            except Fault as fault:
                entry.fault = str(fault)
            kept(placed(entries))
    return placed(entries)


def placed(entries: list[Entry]) -> list[Entry]:
    """Returns entries in order, with their ranks; those without a time come last."""
    timed = sorted((e for e in entries if e.total is not None), key=lambda e: e.total.value)
    if timed:
        rounds = min(len(entry.processes) for entry in timed)  # an unfinished one is not compared
        totals = np.array([entry.totals[:rounds] for entry in timed])
        for entry, place in zip(timed, standings(totals).tolist(), strict=True):
            entry.place = place
    for entry in timed:
        entry.ties = [e.name for e in timed if e.place == entry.place and e is not entry]
    return [*timed, *(entry for entry in entries if entry.total is None)]
