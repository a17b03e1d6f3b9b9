"""``kernel rank``: many kernels on the nodes of a network, each in a process of its own, with intervals."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.kernels.user import CONTRACTS, source
from ..errors import InputError, expected
from ..graph.graph import Graph
from ..measure import statistics
from ..measure.statistics import Estimate
from .cases import Case, grid, of_node
from .process import Fault, Limits
from .trial import Trial
from .wanted import Series, judged, slack


@dataclass
class Entry:
    """One kernel on the board.

    Attributes:
        name: the file's, or what stands for one of the engine's or PyTorch's.
        subject: see :class:`~cnn_engine.kernel.process.Process`.
        computes: what products are rounded to.
        samples: node -> seconds of single calls.
        fault: why it is last, in one line, or None.
        place: from 1; the same for kernels that cannot be told apart; None with a fault.
        ties: names of kernels that it cannot be told apart from.
    """

    name: str
    subject: str
    computes: str = "float32"
    samples: dict[str, list[float]] = field(default_factory=dict)
    fault: str | None = None
    place: int | None = None
    ties: list[str] = field(default_factory=list)

    @property
    def nodes(self) -> dict[str, Estimate]:
        """Node -> the median."""
        return {node: statistics.quantile(seconds) for node, seconds in self.samples.items()}

    @property
    def total(self) -> Estimate | None:
        """The sum of the nodes' medians."""
        return (
            None if self.fault is not None or not self.samples else added(list(self.nodes.values()))
        )


def added(parts: Sequence[Estimate]) -> Estimate:
    """Returns the sum of independent estimates, with its interval."""
    value = sum(part.value for part in parts)
    samples = min(part.samples for part in parts)
    independent = min(part.independent for part in parts)
    if not all(part.known for part in parts):
        return Estimate(value, None, None, samples, independent)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts))
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts))
    return Estimate(value, max(value - below, 0.0), value + above, samples, independent)


@dataclass
class Board:
    """All kernels, the fastest first, those with a fault last.

    Attributes:
        network, operator, device, batch, threads: of what was timed.
        calls: timed calls of each node.
        flops: of one pass over the nodes.
        entries: in order.
        environment: of the machine.
        command: that made it.
    """

    network: str
    operator: str
    device: str
    batch: int
    threads: int
    calls: int
    flops: int
    nodes: list[str]
    entries: list[Entry]
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``--json`` writes."""
        return {
            "schema": 1, "command": self.command, "environment": self.environment,
            "network": self.network, "operator": self.operator, "device": self.device,
            "batch": self.batch, "threads": self.threads, "calls": self.calls, "flops": self.flops,
            "nodes": self.nodes,
            "entries": [
                {"name": e.name, "subject": e.subject, "computes": e.computes, "place": e.place,
                 "ties": e.ties, "fault": e.fault, "seconds": e.total and asdict(e.total),
                 "nodes": {n: asdict(v) for n, v in e.nodes.items()} if e.fault is None else {}}
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
    rounds: int = 2,
    limits: Limits | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> list[Entry]:
    """Checks and times every entry, in ``rounds`` whose order is turned; returns them in order.

    Each entry's process runs the operator's grid first, then calls on inputs and weights that are new every
    time and the same for all entries. Nothing of one process reaches another.
    """
    generator = np.random.default_rng(secrets.randbits(128))
    kinds = sorted({entry.computes for entry in entries if entry.fault is None})
    op = cases[0].op.kind
    small = [case for case in grid(op) if case.label != "large"]  # the nodes are large enough
    given = {kind: [(case, judged(case, generator, kind)) for case in small] for kind in kinds}
    each = -(-calls // rounds)
    series = {}
    for case in cases:
        made = Series.make(case, each)
        for kind in kinds:
            series[case.label, kind] = made.within(slack(made.first, case, kind))
    for number in range(rounds):
        order = entries if number % 2 == 0 else entries[::-1]
        for entry in order:
            if entry.fault is not None:
                continue
            told(f"{entry.name} ({number + 1} of {rounds})")
            try:
                with Trial(entry.subject, device, threads, limits) as trial:
                    if number == 0:
                        for case, inputs in given[entry.computes]:
                            trial.check(case, inputs)
                        for case in cases:
                            trial.check(case, series[case.label, entry.computes].first)
                    for case in cases:
                        found = trial.time(series[case.label, entry.computes], each)
                        entry.samples.setdefault(case.label, []).extend(found)
            except Fault as fault:
                entry.fault = str(fault)
    return placed(entries)


def placed(entries: list[Entry]) -> list[Entry]:
    """Returns entries in order, with places; a place is shared where intervals cannot tell."""
    timed = sorted((e for e in entries if e.total is not None), key=lambda e: e.total.value)
    leader = None
    for index, entry in enumerate(timed):
        ratio = leader and statistics.ratio(entry.total, leader.total)
        tied = ratio is not None and ratio and (not ratio.known or ratio.low <= 1.0)
        if tied:
            entry.place = leader.place
            for other in timed[:index]:
                if other.place == leader.place:
                    other.ties.append(entry.name)
                    entry.ties.append(other.name)
        else:
            entry.place, leader = index + 1, entry
    return [*timed, *(entry for entry in entries if entry.total is None)]
