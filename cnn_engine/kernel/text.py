"""Text output of ``kernel check`` and ``kernel rank``."""

from __future__ import annotations

from ..measure.statistics import Estimate
from ..report import units
from .check import Checked
from .rank import Board


def checked(found: Checked) -> str:
    """Returns the report of a check."""
    passed = [o for o in found.outcomes if o.refused is None]
    refused = [o for o in found.outcomes if o.refused is not None]
    lines = [f"{found.file}: {found.operator} on {found.device}"]
    if found.compiled is not None:
        return "\n".join(
            [*lines, f"  {found.compiled}", "no case was tried: check it where a GPU is"]
        )
    for outcome in found.outcomes:
        what = (
            f"not taken: {outcome.refused}"
            if outcome.refused
            else f"right, within {outcome.error:.2g} (allowed {outcome.allowed:.2g})"
        )
        lines.append(f"  {outcome.case.label:<32} {what}")
    if found.fault is not None:
        return "\n".join(lines)
    for launch in found.launches:
        grid, block = (" x ".join(map(str, launch[name])) for name in ("grid", "block"))
        lines.append(
            f"  {launch['kernel']}: grid {grid}, block {block}: {launch['registers']} registers per thread, "
            f"{units.size(launch['shared_bytes'])} shared memory per block, {launch['local_bytes']} bytes "
            f"of local memory per thread (spills), occupancy {units.percent(launch['occupancy'])}"
        )
    if found.time is not None:
        seconds, cost = found.time.value, found.cost
        lines.append(
            f"  {found.timed}: {interval(found.time)}; {units.giga_per_second(cost.bytes, seconds)} GB/s of "
            f"{units.size(cost.bytes)}"
        )
        if cost.flops:
            text = f"  {units.giga_per_second(cost.flops, seconds)} GFLOP/s"
            if found.peak:
                share = units.percent(cost.flops / seconds / found.peak[0])
                text += f", {share} of {found.peak[0] / 1e9:,.0f} ({found.peak[1]})"
            lines.append(text)
    for tool in found.sanitized:
        lines.append(f"  {tool}: nothing found")
    rest = f", {len(refused)} not taken" if refused else ""
    lines.append(f"  confined by {', '.join(found.sandbox)}")
    lines.append(f"{units.counted(len(passed), 'case')} passed{rest}")
    return "\n".join(lines)


def interval(time: Estimate) -> str:
    """Returns a time with its interval."""
    if not time.known:
        return units.seconds(time.value)
    return f"{units.seconds(time.value)} ({units.seconds(time.low)} to {units.seconds(time.high)})"


#: Nodes whose times are beside the sum; of more the JSON and the page have them.
MOST_NODES = 6


def board(found: Board) -> str:
    """Returns the board as a table."""
    width = max([len(entry.name) for entry in found.entries] + [6])
    nodes = found.nodes if len(found.nodes) <= MOST_NODES else []
    named = ", ".join(nodes) or units.counted(len(found.nodes), "node")
    lines = [
        f"{found.operator} of {found.network} ({named}), batch {found.batch}, "
        f"on {found.device}: medians of {found.calls} calls on fresh inputs in "
        f"{units.counted(found.rounds, 'process', 'processes')}, with 95 % intervals over processes",
        f"{'':>5} {'kernel':<{width}} {'computes':<9} {'sum':>10} {'from':>10} {'to':>10} {'GFLOP/s':>9}"
        + "".join(f"  {node:>10}" for node in nodes),
    ]
    for entry in found.entries:
        if entry.fault is not None:
            lines.append(f"{'-':>5} {entry.name:<{width}} {entry.fault}")
            continue
        total = entry.total
        place = f"{entry.place}{'=' if entry.ties else ''}"
        lines.append(
            f"{place:>5} {entry.name:<{width}} {entry.computes:<9} {units.seconds(total.value):>10} "
            f"{units.seconds(total.low):>10} {units.seconds(total.high):>10} "
            f"{units.giga_per_second(found.flops, total.value):>9}"
            + "".join(
                f"  {units.seconds(entry.nodes[node].value):>{max(len(node), 10)}}"
                for node in nodes
            )
        )
    if layers := next((entry.sandbox for entry in found.entries if entry.sandbox), None):
        lines.append(f"confined by {', '.join(layers)}")
    if any(entry.ties for entry in found.entries):
        lines.append("=: a shared place: the processes' times show no gap between these kernels")
    return "\n".join(lines)
